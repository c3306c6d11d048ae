"""Programs of hybrid models, gated delta nets beside attention: states written in place, good for one step."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn.functional.primitive import PRIMITIVES
from meshfn.programs.cpu import CPU_KERNELS
from meshfn.programs.lower import primitive_name, walk

from ..families import family
from .test_donation import largest_allocation

LINEAR = {"linear_key_head_dim": 24, "linear_value_head_dim": 40}
# Bits that a computation would change: NaNs with a payload, quiet and signalling, and zeros with a sign.
BITS = torch.tensor([0x7FC12345, -0x7EDCBB, -0x80000000, 0x7F812345])


def hybrid(name: str = "qwen3_5", **more) -> programs.Model:
    """Two gated delta nets that share a region, and attention."""
    torch.manual_seed(3)
    layers = {"layer_types": ["linear_attention"] * 2 + ["full_attention"]}
    return programs.load(family(name, **layers | (LINEAR if name == "qwen3_5" else {}) | more))


@pytest.fixture(scope="module")
def pair():
    """By Inductor, since it is what writes in place, and eager."""
    return [programs.build(hybrid(), batch=2, max_len=200, chunk=8, compile=c) for c in (True, False)]


def leaves(program) -> list[torch.Tensor]:
    return [leaf for cache in program.cache for leaf in F.tree.leaves(cache)]


def bits(program, rows=slice(None)) -> list[torch.Tensor]:
    return [leaf[rows].view(torch.int32).clone() for leaf in leaves(program)]


def poison(program, row: int) -> None:
    for leaf in leaves(program):
        many = BITS.to(torch.int32).repeat(-(-leaf[row].numel() // 4))[: leaf[row].numel()]
        leaf[row].view(torch.int32).copy_(many.view(leaf[row].shape))


def likeliest(model: programs.Model, row: list[int], new: list[int]) -> list[int]:
    """By the plain function, of all tokens in one go: what follows each of them from the last of `row` on."""
    logits, _ = F.decoder(model.params, torch.tensor([row + new]), model.config)
    return logits[0, len(row) - 1 : -1].argmax(-1).tolist()


def test_compiled_equals_eager_and_the_plain_function_with_one_compile_each(pair):
    """Ragged rows, prompts shorter than the convolution, of one chunk and of several; one row alone."""
    compiled, eager = pair
    for lengths, new in (((21, 5), 6), ((1, 37), 3), ((8,), 4)):
        for program in pair:
            for row in range(2):
                poison(program, row)
        rows = [torch.randint(1, 97, (n,)).tolist() for n in lengths]
        found = compiled.generate(rows, max_new_tokens=new)
        assert found.tokens == eager.generate(rows, max_new_tokens=new).tokens
        assert found.tokens == [likeliest(compiled.model, *each) for each in zip(rows, found.tokens, strict=True)]
    assert (compiled.prefill.compiles, compiled.decode.compiles) == (1, 1)


def test_a_prompt_in_chunks_equals_one_go(pair):
    """The state after chunks of 8 is that after one chunk of all 29 tokens, in rows of other lengths too."""
    compiled, _ = pair
    rows = [torch.randint(1, 97, (n,)).tolist() for n in (29, 3)]
    whole = programs.build(compiled.model, batch=2, max_len=200, chunk=64, compile=False)
    found, wanted = compiled.prefill(rows), whole.prefill(rows)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(compiled.cache[:2], whole.cache[:2], strict=True):
        for a, b in zip(F.tree.leaves(mine), F.tree.leaves(theirs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_step_writes_the_bytes_of_its_plan_in_place(pair):
    """All of each state and one slot of keys and values; nothing of a state's size is allocated."""
    compiled, _ = pair
    state = compiled.prefill([torch.randperm(97)[:n].tolist() for n in (21, 7)])
    before, addresses = bits(compiled), [leaf.data_ptr() for leaf in leaves(compiled)]
    assert before[3].nbytes == 2 * 4 * 40 * 24 * 4
    assert largest_allocation(lambda: compiled.decode(state)) < before[3].nbytes / 4
    assert addresses == [leaf.data_ptr() for leaf in leaves(compiled)]
    changed = [old != new for old, new in zip(before, bits(compiled), strict=True)]
    assert [each.all().item() for each in changed] == [True] * 8 + [False] * 2
    assert [row.flatten(1).any(1).nonzero()[:, 0].tolist() for row in changed[-1]] == [[21], [7]]
    assert sum(int(each.sum()) for each in changed) * 4 == compiled.plan.phases["decode"].writes


def test_an_inactive_row_changes_no_byte(pair):
    """By a prefill of the other row, by its steps, and by those after it ended itself."""
    compiled, _ = pair
    for row in (1, 0):
        poison(compiled, row)
    before = bits(compiled, slice(1, 2))
    state = compiled.prefill([[7] * 13])
    for _ in range(3):
        state = compiled.decode(state)
    assert all(map(torch.equal, before, bits(compiled, slice(1, 2))))
    assert not any(leaf[0].isnan().any() for leaf in leaves(compiled)[:8])
    state = compiled.prefill([[7] * 13, [9] * 5])
    state = dataclasses.replace(state, position=torch.where(torch.tensor([True, False]), state.position, -1))
    poison(compiled, 1)
    after = compiled.decode(state)
    assert all(map(torch.equal, before, bits(compiled, slice(1, 2))))
    assert after.position.tolist() == [14, -1]
    assert not after.logits[0].isnan().any()


def test_a_step_takes_no_tree_apart(pair, monkeypatch):
    """Parameters and caches are taken apart once: of many layers that would take longer than the step."""
    compiled, _ = pair
    state = compiled.prefill([[3, 1, 4]])

    def refused(tree):
        raise AssertionError("a tree was taken apart")

    with monkeypatch.context() as patch:
        for name in ("leaves", "paths", "structure"):
            patch.setattr(F.tree, name, refused)
        found = compiled.decode(state)
    compiled.params = compiled.params  # which is read anew
    again = compiled.decode(compiled.prefill([[3, 1, 4]]))
    assert torch.equal(found.logits[0], again.logits[0])


def test_rows_that_end_early_and_several_of_one_prompt(pair):
    compiled, eager = pair
    rows = [[3, 1, 4, 1, 5], [9, 2, 6]]
    long = compiled.generate(rows, max_new_tokens=12).tokens
    stop = long[1][3]
    found = compiled.generate(rows, max_new_tokens=12, eos_token_id=stop)
    for row, whole in zip(found.tokens, long, strict=True):
        assert row == whole[: whole.index(stop) + 1 if stop in whole else None]
    options = {"max_new_tokens": 7, "do_sample": True, "temperature": 2.0, "num_return_sequences": 2, "seed": [4, 5]}
    several = compiled.generate([rows[0]], **options).tokens
    assert several == eager.generate([rows[0]], **options).tokens
    assert several[0] != several[1]


def test_a_state_is_good_for_one_step(pair):
    """What it needs is written over; a token of the user's own goes where the last one would."""
    for program in pair:
        first = program.prefill([[3, 1, 4, 1, 5]])
        second = program.decode(first)
        with pytest.raises(ValueError, match="not of this program's last step"):
            program.decode(first)
        mine = dataclasses.replace(second, token=torch.tensor([42, 0]))
        logits = program.decode(mine).logits[0]
        told = [[3, 1, 4, 1, 5, int(first.token[0]), 42]]
        wanted = F.decoder(program.model.params, torch.tensor(told), program.model.config)[0][0, -1]
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_score_reads_each_row_from_its_start(pair):
    _, eager = pair
    rows = [torch.randint(1, 97, (n,)).tolist() for n in (19, 6)]
    state = eager.prefill(rows)
    for row, found in zip(rows, eager.score(rows), strict=True):
        logits, _ = F.decoder(eager.params, torch.tensor([row]), eager.model.config)
        wanted = logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(row)[1:, None])[:, 0]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="whose cache it would read"):
        eager.decode(state)


def test_the_plan_is_what_was_compiled(pair):
    compiled, _ = pair
    plan = programs.plan(compiled.model, batch=2, max_len=200, chunk=8)
    assert str(compiled) == str(plan)
    for name in ("prefill", "decode"):
        phase = getattr(compiled, name)
        assert str(phase.graph) == str(plan.phases[name].graph)
        rows = [row for block in plan.phases[name].blocks for row in block.rows if row.op in PRIMITIVES]
        ran = [primitive_name(n) for n in walk(phase._module)]
        unlisted = (None, "write_tokens", "slot_positions")
        assert sorted(x for x in ran if x not in unlisted) == sorted(row.op for row in rows if not row.chosen)
        ops = {kernel.op: kernel.primitive for kernel in CPU_KERNELS}
        assert sorted(ops[n.target] for n in walk(phase._module) if n.target in ops) == sorted(
            row.op for row in rows if row.chosen
        )


def test_plan():
    """Of each kind of layer what a step reads and writes; a state is read whole, at any context."""
    text = str(programs.plan(hybrid(), batch=2, max_len=200, chunk=8))
    head, _, rest = text.partition("\n\nprefill")
    assert_expected_inline(
        head + rest[rest.index("\n\ndecode") :],
        """\
program Qwen3_5ForCausalLM   cpu float32   batch 2   max_len 200   chunk 8
  weights  0.1 M parameters, 398.7 KiB, read where the model keeps them
  cache    184.5 KiB, 2 x (q 2 48 3, k 2 48 3, v 2 160 3, state 2 4 40 24); 1 x (k 2 225 2 16, v 2 225 2 16), written in place
  choice   the most likely token, at the end of a step; with sampling options after it, eagerly
  steps    one call each, over the slots that rows fill, nothing captured; the end is looked for every 16

decode   B=2 S=1 T<=224
  before the layers
    x                       embedding         2 1 48     reads         384 B  compiler
  layers[0..1] x2, each reads 172.6 KiB and writes 36.0 KiB
    q k v b a z             norm_linear       2 1 48     reads      79.7 KiB  gemv
    q_BSKE q_state          short_conv        2 1 2 24   reads       1.9 KiB  taps
    k_BSKE k_state          short_conv        2 1 2 24   reads       1.9 KiB  taps
    v_BSHV v_state          short_conv        2 1 4 40   reads       6.2 KiB  taps
    bias                    view              4          reads          16 B  compiler
    g beta_BSH              gdn_gates         2 1 4      reads          16 B  compiler (no cpu kernel)
    o_BSHV state            gated_delta_rule  2 1 4 40   reads      30.0 KiB  two_passes
    o_BSHV                  gated_rms_norm    2 1 4 40   reads         160 B  compiler (no cpu kernel)
    out_BSD                 norm_linear       2 1 48     reads      30.0 KiB  gemv
    h_BSF                   gated_mlp         2 1 40     reads      15.2 KiB  gemv
    out_BSD                 norm_linear       2 1 48     reads       7.5 KiB  gemv
    cache.q                 write             2 48 3     writes      1.1 KiB  compiler
    cache.k                 write             2 48 3     writes      1.1 KiB  compiler
    cache.v                 write             2 160 3    writes      3.8 KiB  compiler
    cache.state             write             2 4 40 24  writes     30.0 KiB  compiler
  layers[2], reads <= 201.0 KiB and writes 512 B
    q k v                   norm_linear       2 1 192    reads      48.2 KiB  gemv
    q                       normalize         2 1 6 16   reads          64 B  compiler (no cpu kernel)
    k                       normalize         2 1 2 16   reads          64 B  compiler (no cpu kernel)
    k_BSKE                  apply_rope        2 1 2 16                        compiler (no cpu kernel)
    q_BSHE                  apply_rope        2 1 6 16                        compiler (no cpu kernel)
    o_BSHV                  decode_attention  2 1 6 16   reads <=  112.0 KiB  one_pass
    out_BSD                 norm_linear       2 1 48     reads      18.0 KiB  gemv
    h_BSF                   gated_mlp         2 1 40     reads      15.2 KiB  gemv
    out_BSD                 norm_linear       2 1 48     reads       7.5 KiB  gemv
    cache.k                 write             2 1 2 16   writes        256 B  compiler
    cache.v                 write             2 1 2 16   writes        256 B  compiler
  after the layers
    logits_Z                norm_linear       2 97       reads      18.4 KiB  gemv
    token logprob position  sample_advance    2                               compiler (no cpu kernel)

a decode step reads 380.9 KiB of weights, 72.0 KiB of states and at most 112.0 KiB of cache, and writes 72.5 KiB
bound: 1532.16 steps a second for each GB/s of memory bandwidth, cache full; 1858.79, cache empty""",
    )


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe", "olmo_hybrid", "kimi_linear"])
def test_rows_have_names_that_a_person_gave(name):
    plan = programs.plan(hybrid(name), batch=2, max_len=64, chunk=8)
    rows = [row for phase in plan.phases.values() for block in phase.blocks for row in block.rows]
    assert not [row.names for row in rows if {"getitem", "tensor"} & set(row.names.split())]


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_gated_delta_nets_cost_the_same_at_any_length(name):
    model = hybrid(name, layer_types=["linear_attention"] * 3)
    short, long = (programs.plan(model, max_len=n, chunk=8) for n in (64, 1 << 15))
    assert str(short).splitlines()[-2:] == str(long).splitlines()[-2:]
    decode = long.phases["decode"]
    assert decode.context == 0
    assert decode.state == decode.writes == long.cache
    assert "<=" not in str(long)[str(long).index("\ndecode") :].replace("T<=", "")


def test_eager_plan_says_that_whole_caches_are_written(pair):
    _, eager = pair
    assert eager.plan.phases["decode"].writes == eager.plan.cache
