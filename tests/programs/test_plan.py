"""Plans and graphs, golden; what is said beforehand is what runs."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn.functional.primitive import PRIMITIVES
from meshfn.programs import dynamo
from meshfn.programs.cpu import CPU_KERNELS
from meshfn.programs.lower import primitive_name, walk

from ..tiny import llama, ours


def test_smollm2():
    model = programs.load("smollm2-135m", abstract=True)
    assert_expected_inline(
        str(programs.plan(model)),
        """\
program smollm2-135m   cpu float32   batch 1   max_len 1024   chunk 256
  weights  134.5 M parameters, 513.1 MiB, read where the model keeps them
  cache    45.0 MiB, 30 x (k 1 1025 3 64, v 1 1025 3 64), written in place
  choice   the most likely token, at the end of a step; with sampling options after it, eagerly
  steps    one call each, over the slots that rows fill, nothing captured; the end is looked for every 16

prefill   B=1 S=256 T<=1024
  before the layers
    x                       embedding       1 256 576   reads     576.0 KiB  compiler
  layers[0..29] x30, each reads <= 15.0 MiB and writes 384.0 KiB
    q k v                   norm_linear     1 256 576   reads       2.1 MiB  onednn
    k_BSKE                  apply_rope      1 256 3 64                       compiler (no cpu kernel)
    q_BSHE                  apply_rope      1 256 9 64                       compiler (no cpu kernel)
    o_BSHV                  core_attention  1 256 9 64  reads <=    1.5 MiB  flash
    out_BSD                 norm_linear     1 256 576   reads       1.3 MiB  onednn
    h_BSF                   gated_mlp       1 256 1536  reads       6.8 MiB  onednn
    out_BSD                 norm_linear     1 256 576   reads       3.4 MiB  onednn
    cache.k                 write           1 256 3 64  writes    192.0 KiB  compiler
    cache.v                 write           1 256 3 64  writes    192.0 KiB  compiler
  after the layers
    logits_Z                norm_linear     1 49152     reads     108.0 MiB  gemv
    token logprob position  sample_advance  1                                compiler (no cpu kernel)

decode   B=1 S=1 T<=1024
  before the layers
    x                       embedding         1 1 576   reads       2.2 KiB  compiler
  layers[0..29] x30, each reads <= 15.0 MiB and writes 1.5 KiB
    q k v                   norm_linear       1 1 576   reads       2.1 MiB  gemv
    k_BSKE                  apply_rope        1 1 3 64                       compiler (no cpu kernel)
    q_BSHE                  apply_rope        1 1 9 64                       compiler (no cpu kernel)
    o_BSHV                  decode_attention  1 1 9 64  reads <=    1.5 MiB  one_pass
    out_BSD                 norm_linear       1 1 576   reads       1.3 MiB  gemv
    h_BSF                   gated_mlp         1 1 1536  reads       6.8 MiB  gemv
    out_BSD                 norm_linear       1 1 576   reads       3.4 MiB  gemv
    cache.k                 write             1 1 3 64  writes        768 B  compiler
    cache.v                 write             1 1 3 64  writes        768 B  compiler
  after the layers
    logits_Z                norm_linear       1 49152   reads     108.0 MiB  gemv
    token logprob position  sample_advance    1                              compiler (no cpu kernel)

a decode step reads 513.1 MiB of weights and at most 45.0 MiB of cache, and writes 45.0 KiB
bound: 1.71 steps a second for each GB/s of memory bandwidth, cache full; 1.86, cache empty""",
    )


def test_graph_of_a_decode_step(tiny):
    assert tiny.program.decode._module is not None
    assert_expected_inline(
        str(tiny.program.decode.graph),
        """\
graph decode
  tokens                  3 1     state.token[:, None]
  positions               3 1     state.position[:, None]
  x                       3 1 48  embedding(tokens, params.embed)
  exponents               4       (arange(0, 8, 2, dtype=int64).float() / 8)
  powers                  4       (10000 ** exponents)
  turns                   4       (1 / powers)
  where                   3 1 1   positions[..., None]
  angles                  3 1 4   (where.float() * turns)
  cos_1                   3 1 4   angles.cos().to(float32)
  sin_1                   3 1 4   angles.sin().to(float32)
  getitem_3               3 1 48  layer_0(x, params.layers[0], cos_1, sin_1, positions, cache[0], read[0].size()[0], read[0])
  x_1                     3 1 48  layer_0(getitem_3, params.layers[1], cos_1, sin_1, positions, cache[1], read[0].size()[0], read[0])
  logits_Z                3 97    meshfn_cpu.norm_linear(x_1[:, 0], params.norm.weight, [params.head], [None], eps=1e-06)
  after                   3       where((state.position >= 0), (state.position + 1), -1)
  token logprob position  3       meshfn.sample_advance(logits_Z, after, eos_token_id)
  return                          (token, logprob, position, logits_Z)

layer_0   called 2 times
  q k v        3 1 48      meshfn_cpu.norm_linear(x, layer.attention.norm.weight, [layer.attention.q, layer.attention.k, layer.attention.v], [layer.attention.q_bias, layer.attention.k_bias, layer.attention.v_bias], eps=1e-06)
  q_1          3 1 6 8     q.unflatten(-1, (-1, 8))
  k_1          3 1 2 8     k.unflatten(-1, (-1, 8))
  v_BSKV       3 1 2 8     v.unflatten(-1, (-1, 8))
  k_BSKE       3 1 2 8     meshfn.apply_rope(k_1, cos_1, sin_1)
  positions_1  3 1         positions.expand((3, 1))
  q_BSHE       3 1 6 8     meshfn.apply_rope(q_1, cos_1, sin_1)
  part         3 2049 2 8  meshfn.write_tokens(cache.k, k_BSKE, positions_1)
  part_1       3 2049 2 8  meshfn.write_tokens(cache.v, v_BSKV, positions_1)
  k_read       3 n 2 8     part.narrow(1, 0, read[0].size()[0])
  v_read       3 n 2 8     part_1.narrow(1, 0, read[0].size()[0])
  k_positions  3 n         meshfn.slot_positions(read[0], positions_1)
  o_BSHV       3 1 6 8     meshfn_cpu.decode_attention(q_BSHE, k_read, v_read, causal=True, k_positions=k_positions, q_positions=positions_1)
  out_BSD      3 1 48      meshfn_cpu.norm_linear(o_BSHV.flatten(2), None, [layer.attention.o], [None])
  out_BSD_1    3 1 48      (out_BSD + layer.attention.o_bias)
  x_BSD        3 1 48      (x + out_BSD_1)
  h_BSF        3 1 40      meshfn_cpu.gated_mlp(x_BSD, layer.mlp.norm.weight, layer.mlp.gate, layer.mlp.up, layer.mlp.gate_bias, layer.mlp.up_bias, activation=silu, eps=1e-06)
  out_BSD_2    3 1 48      meshfn_cpu.norm_linear(h_BSF, None, [layer.mlp.down], [None])
  out_BSD_3    3 1 48      (out_BSD_2 + layer.mlp.down_bias)
  x_BSD_1      3 1 48      (x_BSD + out_BSD_3)
                           cache.k.copy_(part)
                           cache.v.copy_(part_1)
  return                   (x_BSD_1)""",
    )


def test_the_plan_is_what_was_compiled(tiny):
    plan = programs.plan(tiny.model, batch=3, max_len=2048, chunk=8)
    assert str(tiny.program) == str(plan)
    for name in ("prefill", "decode"):
        compiled = getattr(tiny.program, name)
        assert str(compiled.graph) == str(plan.phases[name].graph)
        # A write into a cache, and where its slots stand, are in the row of what is copied and of what reads them.
        unlisted = (None, "write_tokens", "slot_positions")
        ran = [primitive_name(n) for n in walk(compiled._module) if primitive_name(n) not in unlisted]
        rows = [row for block in plan.phases[name].blocks for row in block.rows if row.op in PRIMITIVES]
        assert sorted(ran) == sorted(row.op for row in rows if not row.chosen)
        ops = {kernel.op: kernel.primitive for kernel in CPU_KERNELS}
        swapped = [ops[n.target] for n in walk(compiled._module) if n.target in ops]
        assert sorted(swapped) == sorted(row.op for row in rows if row.chosen)
    eager = programs.build(tiny.model, batch=3, max_len=70, chunk=8, compile=False)
    assert str(eager).startswith("program LlamaForCausalLM   cpu float32 eager   batch 3")
    assert "copied whole by each call" in str(eager)


def test_bytes_are_those_of_the_tensors(tiny):
    plan = tiny.program.plan
    size = lambda t: t.numel() * t.element_size()  # noqa: E731
    assert plan.weights == sum(map(size, F.tree.leaves(tiny.program.params)))
    assert plan.cache == sum(size(t) for c in tiny.program.cache for t in (c.k, c.v))
    embed = tiny.program.params.embed
    # A step reads every weight once, but of the embedding its rows alone.
    assert plan.phases["decode"].reads == plan.weights - size(embed) + 3 * size(embed[0])
    tied = ours(llama(tied=True))
    assert programs.plan(tied).phases["decode"].reads == programs.plan(tied).weights + 48 * 4


def test_kinds_of_layers_are_folded_by_kind_and_stay_apart(monkeypatch):
    module = llama(layers=4)
    model = ours(module)
    layers = list(model.config.layers)
    wide = F.AttentionConfig(**{**vars(layers[0].attention), "window": 5})
    layers[1] = layers[3] = F.LayerConfig(attention=wide, mlp=layers[1].mlp)
    config = F.DecoderConfig(**{**vars(model.config), "layers": tuple(layers)})
    mixed = programs.Model(name="mixed", config=config, params=model.params)
    titles = [b.title for b in programs.plan(mixed).phases["decode"].blocks]
    assert titles == ["before the layers", "layers[0,2] x2", "layers[1,3] x2", "after the layers"]
    monkeypatch.setattr(dynamo, "inductor", lambda graph, inputs: graph.forward)
    traced = programs.build(mixed, max_len=32, chunk=4)
    tokens = traced.generate([[1, 2, 3, 4, 5, 6, 7]], max_new_tokens=6).tokens[0]
    whole = [1, 2, 3, 4, 5, 6, 7]
    for token in tokens:
        logits, _ = F.decoder(model.params, torch.tensor([whole]), config)
        assert int(logits[0, -1].argmax()) == token
        whole.append(token)


def test_other_devices_and_dtypes_are_planned_without_them():
    model = programs.load(llama(), abstract=True)
    assert model.device.type == "meta"
    plan = programs.plan(model, device="cuda", arch="sm_90", dtype=torch.bfloat16, batch=4, max_len=32)
    text = str(plan)
    assert text.startswith("program LlamaForCausalLM   cuda bfloat16 sm_90   batch 4")
    assert "compiler (no cuda kernel)" in text
    assert plan.weights == 2 * model.num_parameters
