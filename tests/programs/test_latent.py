"""Programs of latent attention and of experts: what the cache holds, which way is taken, what a step reads."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn.programs import dynamo
from meshfn.programs.cpu_latent import BLOCK, latent_attention

from .test_donation import largest_allocation

CPU = torch.ops.meshfn_cpu


def config(dense: bool = True, **more) -> F.DecoderConfig:
    """A dense layer, if wanted, and two with experts, all of latent attention."""
    norm = F.NormConfig(eps=1e-6)
    given = {
        "hidden_size": 32, "num_attention_heads": 3, "kv_lora_rank": 20, "q_lora_rank": 12, "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6, "v_head_dim": 14, "norm": norm, "rope": F.RopeConfig(interleaved=True),
        "initializer_range": 0.3,
    }  # fmt: skip
    attention = F.MLAConfig(**given | more)
    plain = F.MLPConfig(hidden_size=32, intermediate_size=24, norm=norm, initializer_range=0.3)
    experts = F.MoEConfig(
        hidden_size=32, moe_intermediate_size=16, num_experts=12, num_experts_per_tok=3, scoring_func="sigmoid",
        norm_topk_prob=True, correction_bias=True, n_group=3, topk_group=2, norm=norm, initializer_range=0.3,
        shared=F.MLPConfig(hidden_size=32, intermediate_size=8),
    )  # fmt: skip
    layers = tuple(F.LayerConfig(attention=attention, mlp=mlp) for mlp in (plain, experts, experts)[not dense :])
    return F.DecoderConfig(vocab_size=97, hidden_size=32, layers=layers, initializer_range=0.3)


def model(cfg: F.DecoderConfig, dtype: torch.dtype = torch.float32) -> programs.Model:
    torch.manual_seed(5)
    params = F.Decoder.init(cfg, 0, dtype=dtype)
    biases = {p: torch.randn_like(t) * 0.2 for p, t in F.tree.paths(params).items() if "correction" in p}
    return programs.Model(name="latent", config=cfg, params=F.tree.replace(params, biases))


@pytest.fixture(scope="module")
def pair():
    """By Inductor, since it is what writes in place, and eager. Chunks of 8 are absorbed here."""
    cfg = config(dense=False)
    both = [programs.build(model(cfg), batch=2, max_len=1000, chunk=8, compile=c) for c in (True, False)]
    for program in both:
        for cache in program.cache:
            cache.latent.fill_(torch.nan)
    return both


def test_compiled_equals_eager_and_the_plain_function_with_one_compile_each(pair):
    compiled, eager = pair
    for lengths, new in (((21, 5), 12), ((1, 37), 3)):
        rows = [torch.randint(1, 97, (n,)).tolist() for n in lengths]
        found = compiled.generate(rows, max_new_tokens=new)
        assert found.tokens == eager.generate(rows, max_new_tokens=new).tokens
        for row, tokens in zip(rows, found.tokens, strict=True):
            logits, _ = F.decoder(compiled.params, torch.tensor([row + tokens]), compiled.model.config)
            assert logits[0, len(row) - 1 : -1].argmax(-1).tolist() == tokens
    assert (compiled.prefill.compiles, compiled.decode.compiles) == (1, 1)


def test_the_cache_is_latents_alone_and_a_step_writes_one_slot_in_place(pair):
    compiled, _ = pair
    slots = compiled.sizes.slots
    assert [c.latent.shape for c in compiled.cache] == [(2, slots, 20 + 6)] * 2
    assert compiled.plan.cache == 2 * 2 * slots * 26 * 4  # nothing a head
    state = compiled.prefill([[5] * 95, [6] * 7])
    before = [c.latent.view(torch.int32).clone() for c in compiled.cache]
    assert largest_allocation(lambda: compiled.decode(state)) < before[0].nbytes / 2
    for old, cache in zip(before, compiled.cache, strict=True):
        changed = (old != cache.latent.view(torch.int32)).any(-1)
        assert [row.nonzero()[:, 0].tolist() for row in changed] == [[95], [7]]
    lone = compiled.prefill([[5] * 9])
    before = [c.latent[1].view(torch.int32).clone() for c in compiled.cache]
    compiled.decode(lone)
    assert all(torch.equal(a, c.latent[1].view(torch.int32)) for a, c in zip(before, compiled.cache, strict=True))


def test_absorbed_decode_reads_the_live_projection(pair):
    """No copy of kv_b to go stale: an update in place is seen by the next step."""
    compiled, eager = pair
    rows = [[3, 1, 4, 1, 5], [9, 2, 6]]
    before = compiled.generate(rows, max_new_tokens=4).tokens
    state = compiled.prefill(rows)
    with torch.no_grad():
        for each in compiled.params.layers:
            each.attention.kv_b.add_(torch.randn(72, 20, generator=torch.Generator().manual_seed(0)))
    moved = compiled.decode(state).logits
    for mine, theirs in zip(F.tree.leaves(compiled.params), F.tree.leaves(eager.params), strict=True):
        theirs.copy_(mine)
    assert compiled.generate(rows, max_new_tokens=4).tokens == eager.generate(rows, max_new_tokens=4).tokens != before
    assert not torch.equal(moved, eager.decode(eager.prefill(rows)).logits)  # over latents from before the change


def test_long_chunks_are_expanded_and_sizes_stay_dynamic(monkeypatch):
    """A chunk of 64 queries, in a ring."""
    monkeypatch.setattr(dynamo, "inductor", lambda graph, inputs: graph.forward)
    cfg = config(dense=False, window=40)
    given = model(cfg)
    program = programs.build(given, batch=2, max_len=150, chunk=64)
    for cache in program.cache:
        cache.latent.fill_(torch.nan)
    rows = [torch.randint(1, 97, (n,)).tolist() for n in (130, 31)]
    found = program.generate(rows, max_new_tokens=5).tokens
    assert (program.prefill.compiles, program.decode.compiles) == (1, 1)
    assert str(program.plan).count("latent attention expanded") == 1
    for row, tokens in zip(rows, found, strict=True):
        logits, _ = F.decoder(given.params, torch.tensor([row + tokens]), cfg)
        assert logits[0, len(row) - 1 : -1].argmax(-1).tolist() == tokens


def test_plan():
    """Bytes: of experts those that are chosen, of attention its projection and the cache."""
    plan = programs.plan(model(config()), batch=1, max_len=1000, chunk=64)
    text = str(plan)
    head, _, rest = text.partition("\n\nprefill")
    ways = [line for line in text.splitlines() if "latent attention" in line]
    assert_expected_inline(
        "\n".join([head, *ways, rest[rest.index("\ndecode") :]]),
        """\
program latent   cpu float32   batch 1   max_len 1000   chunk 64
  weights  0.1 M parameters, 241.2 KiB, read where the model keeps them
  cache    312.3 KiB, 3 x (latent 1 1025 26), written in place
  choice   the most likely token, at the end of a step; with sampling options after it, eagerly
  steps    one call each, over the slots that rows fill, nothing captured; the end is looked for every 16
  layers[0..2] latent attention expanded: at most 7.4 M products, 824.0 KiB a layer (absorbed: 9.1 M products, 104.0 KiB)
  layers[0..2] latent attention absorbed: at most 0.1 M products, 104.0 KiB a layer (expanded: 1.6 M products, 824.0 KiB)

decode   B=1 S=1 T<=1024
  layers[0..2] latent attention absorbed: at most 0.1 M products, 104.0 KiB a layer (expanded: 1.6 M products, 824.0 KiB)
  before the layers
    x                       embedding       1 1 32    reads         128 B  compiler
  layers[0], reads <= 131.2 KiB and writes 104 B
    kv_down q_down          norm_linear     1 1 26    reads       4.9 KiB  gemv
    kv_latent               normalize       1 1 20    reads          80 B  compiler (no cpu kernel)
    q_latent                normalize       1 1 12    reads          48 B  compiler (no cpu kernel)
    key_rope                apply_rope      1 1 1 6                        compiler (no cpu kernel)
    q_BSHE                  norm_linear     1 1 48    reads       2.2 KiB  gemv
    q_rope                  apply_rope      1 1 3 6                        compiler (no cpu kernel)
    o_BSHV                  absorbed_core   1 1 3 14  reads <=  109.6 KiB  latent
    out_BSD                 norm_linear     1 1 32    reads       5.2 KiB  gemv
    h_BSF                   gated_mlp       1 1 24    reads       6.1 KiB  gemv
    out_BSD                 norm_linear     1 1 32    reads       3.0 KiB  gemv
    cache.latent            write           1 1 26    writes        104 B  compiler
  layers[1..2] x2, each reads <= 144.8 KiB and writes 104 B
    kv_down q_down          norm_linear     1 1 26    reads       4.9 KiB  gemv
    kv_latent               normalize       1 1 20    reads          80 B  compiler (no cpu kernel)
    q_latent                normalize       1 1 12    reads          48 B  compiler (no cpu kernel)
    key_rope                apply_rope      1 1 1 6                        compiler (no cpu kernel)
    q_BSHE                  norm_linear     1 1 48    reads       2.2 KiB  gemv
    q_rope                  apply_rope      1 1 3 6                        compiler (no cpu kernel)
    o_BSHV                  absorbed_core   1 1 3 14  reads <=  109.6 KiB  latent
    out_BSD                 norm_linear     1 1 32    reads       5.2 KiB  gemv
    h_BSD                   normalize       1 1 32    reads         128 B  compiler (no cpu kernel)
    logits                  norm_linear     1 1 12    reads       1.5 KiB  gemv
    choice                  add             1 1 12    reads          48 B  compiler
    out_BSD                 expert_mlp      1 1 32    reads      18.0 KiB  chosen
    h_BSF                   gated_mlp       1 1 8     reads       2.0 KiB  gemv
    out_BSD                 norm_linear     1 1 32    reads       1.0 KiB  gemv
    cache.latent            write           1 1 26    writes        104 B  compiler
  after the layers
    logits_Z                norm_linear     1 97      reads      12.2 KiB  gemv
    token logprob position  sample_advance  1                              compiler (no cpu kernel)

a decode step reads 121.2 KiB of weights and at most 312.0 KiB of cache, and writes 312 B
bound: 2252.62 steps a second for each GB/s of memory bandwidth, cache full; 8036.00, cache empty""",
    )
    sizes = F.tree.paths(plan.phases["decode"].graph and model(config()).params)
    whole = sum(t.nbytes for t in sizes.values()) - sizes[".embed"].nbytes + 32 * 4
    experts = sum(
        t.nbytes for p, t in sizes.items() if p.endswith((".mlp.gate", ".mlp.up", ".mlp.down")) and t.dim() == 3
    )
    assert plan.phases["decode"].reads == whole - experts + experts * 3 // 12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_pass_over_latents_equals_the_definition(dtype):
    """Over several blocks, at odd sizes, with slots that hold NaN, rows that see nothing, masks by head."""
    torch.manual_seed(0)
    keys = 2 * BLOCK + 77
    q = torch.randn(2, 3, 5, 7 + 4, dtype=dtype)
    latent, kv_b = torch.randn(2, keys, 9 + 4, dtype=dtype), torch.randn(5 * (7 + 6), 9, dtype=dtype) * 0.3
    k_positions = torch.arange(keys).expand(2, -1).clone()
    k_positions[0, 700:] = -1
    latent[0, 700:] = torch.nan
    q_positions = torch.tensor([[3, 500, 699], [-1, 0, keys - 1]])
    mask = torch.rand(2, 5, 3, keys) < 0.7
    mask[1, :, 1] = False
    given = {"nope_dim": 7, "softmax_scale": 0.4, "q_positions": q_positions, "k_positions": k_positions}
    for more in ({"causal": True}, {"causal": True, "window": 90}, {"mask": mask}):
        found = CPU.absorbed_core.default(q, latent, kv_b, **given, **more)
        wanted = F.absorbed_attention(q.double(), latent.double(), kv_b.double(), **given, **more)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
        assert found.dtype == dtype
        assert found[1, 0].abs().max() == 0
    many = CPU.absorbed_core.default(
        *(t.repeat(5, *[1] * (t.dim() - 1)) for t in (q, latent)), kv_b, causal=True,
        nope_dim=7, softmax_scale=0.4, q_positions=q_positions.repeat(5, 1), k_positions=k_positions.repeat(5, 1),
    )  # fmt: skip
    few = CPU.absorbed_core.default(q, latent, kv_b, causal=True, **given)
    torch.testing.assert_close(
        many[:2], few, rtol=3e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2 if dtype == torch.bfloat16 else 1e-5
    )
    none = torch.randn(2, 0, 5, 13, dtype=dtype)
    assert latent_attention(none, latent, None, None, 9, 1.0).shape == (2, 0, 5, 9)


@pytest.mark.parametrize("options", [{}, {"swiglu_limit": 0.5}])
def test_chosen_experts_equal_the_grouped_ones(options):
    torch.manual_seed(0)
    x, index = torch.randn(3, 1, 10), torch.stack([torch.randperm(16)[:4] for _ in range(3)])[:, None]
    weights = torch.rand(3, 1, 4)
    gate, up, down = torch.randn(16, 14, 10).split(7, 1) + (torch.randn(16, 10, 7),)
    biases = (torch.randn(16, 7), torch.randn(16, 7)) if options else (None, None)
    wanted = F.expert_mlp(x, index, weights, gate, up, down, *biases, **options)
    others = [e for e in range(16) if e not in index.flatten().tolist()]
    for leaf in (gate, up, down):
        leaf[others] = torch.nan
    found = CPU.expert_mlp.default(x, index, weights, gate, up, down, *biases, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_half_precision_keeps_what_is_stored_in_fp32():
    """The router and its correction decide who computes: a program in bfloat16 reads them as they are."""
    given = model(config(dense=False))
    program = programs.build(given, batch=1, max_len=20, chunk=8, dtype=torch.bfloat16, compile=False)
    program.generate([[1, 2, 3]], max_new_tokens=4)
    live = F.tree.unflatten(F.tree.structure(given.params), F.tree.leaves(program._weights.live()))
    assert live.layers[0].mlp.router is not given.params.layers[0].mlp.router
    assert live.layers[0].mlp.router.dtype == live.layers[0].mlp.correction_bias.dtype == torch.float32
    assert live.layers[0].mlp.router.data_ptr() == given.params.layers[0].mlp.router.data_ptr()
    assert live.layers[0].mlp.gate.dtype == torch.bfloat16
    routers = sum(t.numel() for p, t in F.tree.paths(given.params).items() if "router" in p or "correction" in p)
    assert program.plan.converted == 2 * (given.num_parameters - routers)
