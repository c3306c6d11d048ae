"""Four models that between them have every kind of layer, compiled: equal to eager, once, and as planned."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn.programs import dynamo

from ..families import family
from .test_donation import largest_allocation

# mistral: rings alone, by Inductor, since it is what writes in place; for the others AOTAutograd's graphs are enough, and
# cost a fifth. gemma3: rings beside a full cache, norms on every side, two rotary bases. phi3-long: fused leaves, angles by length.
# phi: LayerNorm, a parallel residual, a plain MLP.
SIZES = {
    "mistral": {"sliding_window": 40, "num_hidden_layers": 2},
    "gemma3": {
        "sliding_window": 40,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


@pytest.fixture(scope="module", params=["mistral", "gemma3", "phi3-long", "phi"])
def pair(request):
    """Compiled and eager."""
    torch.manual_seed(2)
    module = family(request.param, **SIZES.get(request.param, {}))
    model = programs.load(module)
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "mistral":
            patch.setattr(dynamo, "inductor", torch._dynamo.lookup_backend("aot_eager"))
        both = [programs.build(model, batch=2, max_len=120, chunk=16, compile=compile) for compile in (True, False)]
    for program in both:
        for cache in program.cache:
            cache.k.fill_(torch.nan)
            cache.v.fill_(torch.nan)
    return request.param, module, *both


def test_compiled_equals_eager_and_transformers_with_one_compile_each(pair):
    """Rows that turn the ring once and twice, at the end of a chunk and within one."""
    name, module, compiled, eager = pair
    for lengths, new in (((30, 5), 40), ((48, 97), 12), ((1, 16), 3)):
        rows = [torch.randint(1, 97, (n,)).tolist() for n in lengths]
        found = compiled.generate(rows, max_new_tokens=new)
        assert found.tokens == eager.generate(rows, max_new_tokens=new).tokens
        if name != "phi3-long":  # transformers has one length for all rows
            longest = max(lengths)
            ids = torch.tensor([[0] * (longest - len(r)) + r for r in rows])
            mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows])
            out = module.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
            assert out[:, longest:].tolist() == found.tokens
    assert (compiled.prefill.compiles, compiled.decode.compiles) == (1, 1)
    for mine, theirs in zip(compiled.cache, eager.cache, strict=True):
        seen = ~theirs.k.isnan()
        torch.testing.assert_close(mine.k[seen], theirs.k[seen], rtol=1e-4, atol=1e-4)


def test_an_inactive_row_changes_no_byte(pair):
    _, _, compiled, _ = pair
    compiled.generate([[5] * 50, [6] * 60], max_new_tokens=2)
    before = [t[1].clone().view(torch.int32) for c in compiled.cache for t in (c.k, c.v)]
    compiled.generate([[7] * 45], max_new_tokens=9)
    after = [t[1].view(torch.int32) for c in compiled.cache for t in (c.k, c.v)]
    assert all(map(torch.equal, before, after))


def test_a_step_writes_one_slot_of_a_ring_in_place(pair):
    name, _, compiled, _ = pair
    if name != "mistral":
        return
    state = compiled.prefill([[5] * 95, [6] * 7])
    before = [t.view(torch.int32).clone() for c in compiled.cache for t in (c.k, c.v)]
    whole = min(t.nbytes for t in before)
    assert whole == 2 * 41 * 2 * 12 * 4
    assert largest_allocation(lambda: compiled.decode(state)) < whole / 2
    for old, new in zip(before, (t for c in compiled.cache for t in (c.k, c.v)), strict=True):
        changed = (old != new.view(torch.int32)).flatten(2).any(-1)
        assert [row.nonzero()[:, 0].tolist() for row in changed] == [[95 % 40], [7]]


def test_training_step_is_seen_by_the_compiled_program(pair):
    """Fused leaves are views of the module's own parameters: nothing is built again."""
    _, module, compiled, eager = pair
    before = compiled.prefill([[1, 2, 3, 4]]).logits[0]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.01)
    after = compiled.prefill([[1, 2, 3, 4]]).logits[0]
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(after, eager.prefill([[1, 2, 3, 4]]).logits[0], rtol=1e-4, atol=1e-4)
    assert (compiled.prefill.compiles, compiled.decode.compiles) == (1, 1)


def test_plan_says_the_bytes_of_the_rings():
    model = programs.load(family("gemma2", num_hidden_layers=4, sliding_window=40))
    head, _, decode = str(programs.plan(model, batch=2, max_len=1000, chunk=16)).partition("\n\nprefill")
    assert_expected_inline(
        head + decode[decode.index("\n\ndecode") :],
        """\
program Gemma2ForCausalLM   cpu float32   batch 2   max_len 1000   chunk 16
  weights  0.1 M parameters, 231.4 KiB, read where the model keeps them
  cache    666.2 KiB, 2 x (k 2 41 2 10, v 2 41 2 10); 2 x (k 2 1025 2 10, v 2 1025 2 10), written in place
  choice   the most likely token, at the end of a step; with sampling options after it, eagerly
  steps    one call each, over the slots that rows fill, nothing captured; the end is looked for every 16

decode   B=2 S=1 T<=1024
  before the layers
    x                       embedding         2 1 48    reads         384 B  compiler
  layers[0,2] x2, each reads <= 65.8 KiB and writes 320 B
    q k v                   norm_linear       2 1 60    reads      18.9 KiB  gemv
    k_BSKE                  apply_rope        2 1 2 10                       compiler (no cpu kernel)
    q_BSHE                  apply_rope        2 1 6 10                       compiler (no cpu kernel)
    o_BSHV                  decode_attention  2 1 6 10  reads <=   12.5 KiB  one_pass
    out_BSD                 norm_linear       2 1 48    reads      11.2 KiB  gemv
    out_BSD                 normalize         2 1 48    reads         192 B  compiler (no cpu kernel)
    h_BSF                   gated_mlp         2 1 40    reads      15.2 KiB  gemv
    out_BSD                 norm_linear       2 1 48    reads       7.5 KiB  gemv
    out_BSD                 normalize         2 1 48    reads         192 B  compiler (no cpu kernel)
    cache.k                 write             2 1 2 10  writes        160 B  compiler
    cache.v                 write             2 1 2 10  writes        160 B  compiler
  layers[1,3] x2, each reads <= 373.2 KiB and writes 320 B
    q k v                   norm_linear       2 1 60    reads      18.9 KiB  gemv
    k_BSKE                  apply_rope        2 1 2 10                       compiler (no cpu kernel)
    q_BSHE                  apply_rope        2 1 6 10                       compiler (no cpu kernel)
    o_BSHV                  decode_attention  2 1 6 10  reads <=  320.0 KiB  one_pass
    out_BSD                 norm_linear       2 1 48    reads      11.2 KiB  gemv
    out_BSD                 normalize         2 1 48    reads         192 B  compiler (no cpu kernel)
    h_BSF                   gated_mlp         2 1 40    reads      15.2 KiB  gemv
    out_BSD                 norm_linear       2 1 48    reads       7.5 KiB  gemv
    out_BSD                 normalize         2 1 48    reads         192 B  compiler (no cpu kernel)
    cache.k                 write             2 1 2 10  writes        160 B  compiler
    cache.v                 write             2 1 2 10  writes        160 B  compiler
  after the layers
    logits_Z                norm_linear       2 97      reads      18.4 KiB  gemv
    token logprob position  sample_advance    2                              compiler (no cpu kernel)

a decode step reads 231.8 KiB of weights and at most 665.0 KiB of cache, and writes 1.2 KiB
bound: 1087.49 steps a second for each GB/s of memory bandwidth, cache full; 4191.26, cache empty""",
    )


def test_dropout_is_said_and_left_out():
    """In the plan, and in a step, which computes what it does without."""
    module = family("phi", resid_pdrop=0.1, embd_pdrop=0.2, attention_dropout=0.3)
    model = programs.load(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamo, "inductor", lambda graph, inputs: graph.forward)
        program = programs.build(model, max_len=20, chunk=8)
    assert "dropout  embd_pdrop 0.2, resid_pdrop 0.1, attention_dropout 0.3, which inference leaves out" in str(program)
    out = module.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    assert program.generate([[5, 6, 7]], max_new_tokens=4).tokens == [out[0, 3:].tolist()]


# One of each kind of part: tracing a family costs three seconds.
@pytest.mark.parametrize("name", ["qwen3", "smollm3", "gemma2", "olmo2", "phi3-long", "phi", "nemotron", "cohere"])
def test_every_byte_of_every_part_is_in_its_plan(name):
    """Traced without weights and without the device: a step reads each parameter once, and of an embedding B rows."""
    model = programs.load(family(name), abstract=True)
    plan = programs.plan(model, batch=2, max_len=100, device="cuda", arch="sm_90")
    read = sum(leaf.nbytes for leaf in F.tree.leaves(model.params)) + 2 * 48 * 4
    assert plan.phases["decode"].reads == read - (0 if model.params.head is None else model.params.embed.nbytes)
