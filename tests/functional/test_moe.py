"""Mixtures of experts: against transformers' blocks, and what they read, count and refuse."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2MoeConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from .test_mla_messages import refused


def tiny(**more):
    given = {
        "hidden_size": 10,
        "moe_intermediate_size": 7,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "initializer_range": 0.5,
    }
    return F.MoEConfig(**given | more)


def make(cfg, seed=0, dtype=torch.float64):
    return F.tree.map(lambda t: t + 0.1 * torch.randn_like(t), F.MoE.init(cfg, seed, dtype=dtype))


OPTIONS = {
    "softmax": {},
    "sigmoid": {
        "scoring_func": "sigmoid",
        "correction_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "groups": {"n_group": 3, "topk_group": 2, "correction_bias": True, "scoring_func": "sigmoid"},
    "groups-by-best": {"n_group": 3, "topk_group": 1, "group_score_topk": 1},
    "clamped": {"swiglu_limit": 0.4, "bias": True, "router_bias": True, "norm_topk_prob": True},
    "shared": {
        "shared": F.MLPConfig(hidden_size=10, intermediate_size=5),
        "shared_gate": True,
        "norm": F.NormConfig(),
        "post_norm": F.NormConfig(),
    },
    "all": {"num_experts_per_tok": 6},
}


def written_out(params, x, cfg):
    """The definition, token by token and expert by expert, with plain numbers where it chooses."""
    h = x if cfg.norm is None else F.rms_norm(x, params.norm.weight, eps=cfg.norm.eps)
    outs = []
    for token in h.reshape(-1, cfg.hidden_size):
        logits = params.router @ token + (0 if params.router_bias is None else params.router_bias)
        scores = logits.softmax(0) if cfg.scoring_func == "softmax" else logits.sigmoid()
        choice = (scores + (0 if params.correction_bias is None else params.correction_bias)).tolist()
        size = cfg.num_experts // cfg.n_group
        groups = [choice[g * size : (g + 1) * size] for g in range(cfg.n_group)]
        best = sorted(
            range(cfg.n_group), key=lambda g: (-sum(sorted(groups[g], reverse=True)[: cfg.group_score_topk]), g)
        )[: cfg.topk_group]
        allowed = [e for e in range(cfg.num_experts) if e // size in best]
        chosen = sorted(allowed, key=lambda e: (-choice[e], e))[: cfg.num_experts_per_tok]
        weights = scores[chosen] / (scores[chosen].sum() if cfg.norm_topk_prob else 1) * cfg.routed_scaling_factor
        out = 0
        for w, e in zip(weights, chosen, strict=True):
            g, u = params.gate[e] @ token, params.up[e] @ token
            if cfg.bias:
                g, u = g + params.gate_bias[e], u + params.up_bias[e]
            if cfg.swiglu_limit is None:
                y = params.down[e] @ (g * g.sigmoid() * u)
            else:
                g, u = g.clamp(max=cfg.swiglu_limit), u.clamp(-cfg.swiglu_limit, cfg.swiglu_limit)
                y = params.down[e] @ ((u + 1) * g * (1.702 * g).sigmoid())
            out = out + w * (y if params.down_bias is None else y + params.down_bias[e])
        if cfg.shared is not None:
            s = params.shared
            shared = s.down @ ((s.gate @ token) * (s.gate @ token).sigmoid() * (s.up @ token))
            out = out + shared * (params.shared_gate @ token).sigmoid()
        outs.append(out if cfg.post_norm is None else F.rms_norm(out, params.post_norm.weight, eps=cfg.post_norm.eps))
    return torch.stack(outs).view(x.shape)


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_definition_with_gradients(name):
    """Every gradient, the router's too; lengths 1, 3 and 5, batch 2, x not contiguous."""
    torch.manual_seed(1)
    cfg = tiny(**OPTIONS[name])
    params = F.tree.map(lambda t: t.requires_grad_(), make(cfg))
    for size in (1, 3, 5):
        x = torch.randn(size, 2, 10, dtype=torch.float64).transpose(0, 1).requires_grad_()
        mine, wanted = F.moe(params, x, cfg), written_out(params, x, cfg)
        torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-12)
        weight = torch.randn_like(mine)
        leaves = [x, *F.tree.leaves(params)]
        found, theirs = (
            torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True, materialize_grads=True)
            for y in (mine, wanted)
        )
        for a, b in zip(found, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
        assert found[1 + [".router" in p for p in F.tree.paths(params)].index(True)].abs().max() > 1e-3
    assert F.moe(params, torch.randn(2, 0, 10, dtype=torch.float64), cfg).shape == (2, 0, 10)


def test_equals_transformers_block_with_a_shared_gate():
    config = Qwen2MoeConfig(
        hidden_size=10, moe_intermediate_size=7, shared_expert_intermediate_size=5, num_experts=6, num_experts_per_tok=3
    )
    block = Qwen2MoeSparseMoeBlock(config).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    gate, up = block.experts.gate_up_proj.split(7, 1)
    shared = block.shared_expert
    params = F.MoE(
        router=block.gate.weight,
        gate=gate,
        up=up,
        down=block.experts.down_proj,
        shared=F.MLP(gate=shared.gate_proj.weight, up=shared.up_proj.weight, down=shared.down_proj.weight),
        shared_gate=block.shared_expert_gate.weight,
    )
    cfg = tiny(num_experts_per_tok=3, shared=F.MLPConfig(hidden_size=10, intermediate_size=5), shared_gate=True)
    x = torch.randn(2, 4, 10, dtype=torch.float64)
    found, wanted = F.moe(params, x, cfg), block(x)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)  # its softmax is in fp32
    mine = torch.autograd.grad(found.sum(), list(block.parameters()))
    for a, b in zip(mine, torch.autograd.grad(wanted.sum(), list(block.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_equal_scores_choose_the_lowest_index():
    cfg = tiny(num_experts=64, num_experts_per_tok=5)
    params = make(cfg, dtype=torch.float32)
    params = F.tree.replace(params, {".router": torch.zeros(64, 10)})
    assert (F.route(params, torch.randn(3, 40, 10), cfg).indices == torch.arange(5)).all()
    cfg = tiny(num_experts=64, num_experts_per_tok=5, n_group=8, topk_group=2)
    assert (F.route(params, torch.randn(3, 40, 10), cfg).indices == torch.arange(5)).all()
    rows = torch.zeros(64, 10).index_fill(0, torch.tensor([7, 40, 41]), 1.0)
    params = F.tree.replace(params, {".router": rows})
    assert F.route(params, torch.ones(1, 1, 10), tiny(num_experts=64, num_experts_per_tok=5)).indices.tolist() == [
        [[7, 40, 41, 0, 1]]
    ]


class Read(TorchDispatchMode):
    """Bytes of some storages that operations read as operands of a product."""

    def __init__(self, tensors):
        super().__init__()
        self.watched = {t.untyped_storage().data_ptr() for t in tensors}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for arg in args:
            product = func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten._grouped_mm)
            if product and isinstance(arg, torch.Tensor) and arg.untyped_storage().data_ptr() in self.watched:
                self.bytes += arg.numel() * arg.element_size()
        return func(*args, **(kwargs or {}))


def test_one_token_reads_the_chosen_experts_alone():
    """Counted in bytes; and the others may hold anything."""
    cfg = tiny(num_experts=16)
    params = make(cfg)
    x = torch.randn(1, 1, 10, dtype=torch.float64)
    index = F.route(params, x, cfg).indices.flatten().tolist()
    wanted = F.moe(params, x, cfg)
    with Read([params.gate, params.up, params.down]) as read:
        F.moe(params, x, cfg)
    assert read.bytes == 2 * 3 * 7 * 10 * 8
    others = [e for e in range(16) if e not in index]
    for leaf in (params.gate, params.up, params.down):
        leaf[others] = torch.nan
    assert torch.equal(F.moe(params, x, cfg), wanted)
    long = torch.cat([x] * 50, 1)
    with Read([params.gate, params.up, params.down]) as read:
        F.moe(params, long, cfg)
    assert read.bytes == 2 * 3 * 7 * 10 * 8  # grouped: however many tokens


def test_transforms_and_compile():
    cfg = tiny()
    params = make(cfg)
    x = torch.randn(3, 2, 4, 10, dtype=torch.float64)

    def loss(params, x):
        return F.moe(params, x, cfg).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    for i in range(3):
        for a, b in zip(F.tree.leaves(each), F.tree.leaves(torch.func.grad(loss)(params, x[i])), strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-9, atol=1e-11)
    run = torch.compile(loss, fullgraph=True, backend="aot_eager")
    live = F.tree.map(lambda t: t.requires_grad_(), params)
    found, wanted = run(live, x[0]), loss(live, x[0])
    torch.testing.assert_close(found, wanted)
    for a, b in zip(
        torch.autograd.grad(found, F.tree.leaves(live)), torch.autograd.grad(wanted, F.tree.leaves(live)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_compiled_transforms(transform):
    """`torch.func` within `torch.compile`."""
    cfg = tiny()
    params, x = make(cfg), torch.randn(3, 2, 4, 10, dtype=torch.float64)
    fn = torch.func.grad(lambda x: F.moe(params, x, cfg).square().sum())
    if transform == "vmap":
        fn, given = torch.func.vmap(lambda x: F.moe(params, x, cfg)), x
    else:
        given = x[0]
    found = torch.compile(fn, fullgraph=True, backend="aot_eager")(given)
    torch.testing.assert_close(found, fn(given))


def test_balance_loss_and_counts_are_transformers_over_layers_and_masks():
    cfg = tiny()
    layers = [make(cfg, seed) for seed in range(3)]
    x, mask = torch.randn(2, 5, 10, dtype=torch.float64), torch.rand(2, 5) < 0.7
    mask[0, 0] = True
    routings = [F.moe(p, x, cfg, return_routing=True)[1] for p in layers]
    logits = tuple((x.view(-1, 10) @ p.router.T) for p in layers)
    for given in (None, mask):
        wanted = load_balancing_loss_func(logits, 6, 2, attention_mask=given)
        found = F.balance_loss(routings, given)
        torch.testing.assert_close(found, wanted.double(), rtol=1e-6, atol=1e-7)
    assert F.expert_counts(routings[0]).sum() == 2 * 5 * 2
    assert F.expert_counts(routings[0], mask).sum() == 2 * mask.sum()
    counts = torch.bincount(routings[0].indices.flatten(), minlength=6)
    assert torch.equal(F.expert_counts(routings[0]), counts)


def test_a_decoder_returns_the_routing_of_its_layers():
    attention = F.AttentionConfig(hidden_size=10, num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    dense = F.LayerConfig(attention=attention, mlp=F.MLPConfig(hidden_size=10, intermediate_size=8))
    sparse = F.LayerConfig(attention=attention, mlp=tiny())
    cfg = F.DecoderConfig(vocab_size=11, hidden_size=10, layers=(dense, sparse))
    params = F.tree.map(lambda t: t.requires_grad_(), F.Decoder.init(cfg, 0))
    assert isinstance(params.layers[0].mlp, F.MLP)
    assert isinstance(params.layers[1].mlp, F.MoE)
    logits, none, routings = F.decoder(params, torch.randint(0, 11, (2, 5)), cfg, return_routing=True)
    assert (logits.shape, none, routings[0]) == ((2, 5, 11), None, None)
    F.balance_loss(routings).backward()
    assert params.layers[1].mlp.router.grad.abs().max() > 0
    assert params.layers[1].mlp.gate.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_fp32(dtype):
    cfg = tiny(num_experts_per_tok=6)
    params = make(cfg, dtype=torch.float32)
    x = torch.randn(2, 9, 10)
    exact = F.moe(F.tree.map(lambda t: t.double(), params), x.double(), cfg)
    half = F.tree.map(lambda t: t.to(dtype), params)
    error = (F.moe(half, x.to(dtype), cfg).double() - exact).norm() / exact.norm()
    assert error < {torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]


def test_the_loss_is_of_the_tokens_that_count():
    """Whatever the others hold; 0 where none counts; and scores that all vanished are no division by zero."""
    cfg = tiny(scoring_func="sigmoid")
    params, x = make(cfg), torch.randn(2, 3, 10, dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    routing = F.route(params, x, cfg)
    wanted = F.balance_loss(routing, mask)
    holes = routing._replace(scores=routing.scores.masked_fill(~mask[..., None], torch.nan))
    assert torch.equal(F.balance_loss(holes, mask), wanted)
    router = params.router.clone().requires_grad_()
    none = F.balance_loss(F.route(F.tree.replace(params, {".router": router}), x, cfg), torch.zeros_like(mask))
    none.backward()
    assert none == 0
    assert router.grad.abs().max() == 0
    assert F.balance_loss(routing._replace(scores=torch.zeros_like(routing.scores))).isfinite()


def test_autocast_leaves_the_router_in_fp32():
    cfg = tiny(hidden_size=16, moe_intermediate_size=16, shared=F.MLPConfig(hidden_size=16, intermediate_size=8))
    params, x = make(cfg, dtype=torch.float32), torch.randn(2, 3, 16)
    wanted = F.route(params, x, cfg)
    with torch.autocast("cpu", torch.bfloat16):
        found = F.route(params, x, cfg)
        out = F.moe(params, x.bfloat16(), cfg)
    assert torch.equal(found.scores, wanted.scores)
    assert torch.equal(found.indices, wanted.indices)
    torch.testing.assert_close(out.float(), F.moe(params, x, cfg), rtol=5e-2, atol=5e-2)


def test_forward_mode_and_second_order():
    cfg = tiny()
    params, x = make(cfg), torch.randn(1, 2, 10, dtype=torch.float64)
    v = torch.randn_like(x)

    def fn(x):
        return F.moe(params, x, cfg).square().sum()

    _, tangent = torch.func.jvp(fn, (x,), (v,))
    torch.testing.assert_close(tangent, (torch.func.grad(fn)(x) * v).sum())
    torch.testing.assert_close(torch.func.hessian(fn)(x), torch.autograd.functional.hessian(fn, x))
    direction = F.tree.map(torch.randn_like, params)
    _, tangent = torch.func.jvp(lambda p: F.moe(p, x, cfg).square().sum(), (params,), (direction,))
    grads = torch.func.grad(lambda p: F.moe(p, x, cfg).square().sum())(params)
    pairs = zip(F.tree.leaves(grads), F.tree.leaves(direction), strict=True)
    torch.testing.assert_close(tangent, sum((a * b).sum() for a, b in pairs))


def test_shapes_alone_without_values():
    """On the meta device."""
    cfg = tiny(bias=True)
    params = F.MoE.abstract(cfg)
    assert F.moe(params, torch.empty(2, 3, 10, device="meta"), cfg).shape == (2, 3, 10)


def test_what_cannot_be_is_refused():
    mlp = F.MLPConfig(hidden_size=9, intermediate_size=5)
    bad = [
        {"num_experts_per_tok": 7},
        {"num_experts": True},
        {"n_group": 4},
        {"n_group": 2, "topk_group": 3},
        {"n_group": 3, "topk_group": 1, "num_experts_per_tok": 3},
        {"n_group": 6, "topk_group": 3, "num_experts_per_tok": 3},
        {"scoring_func": "tanh"},
        {"hidden_act": "swosh"},
        {"routed_scaling_factor": float("nan")},
        {"shared_gate": True},
        {"shared": mlp},
    ]
    lines = [refused(tiny, **each) for each in bad]
    cfg, biased = tiny(), tiny(bias=True)

    def of(experts):
        return F.Routing(torch.zeros(2, 3, 2, dtype=torch.long), torch.ones(2, 3, 2), torch.rand(2, 3, experts))

    params = make(cfg, dtype=torch.float32)
    lines += [
        refused(F.moe, params, torch.randn(2, 3, 9), cfg),
        refused(F.moe, params, torch.randn(2, 3, 10), cfg, return_routings=True, aux=1),
        refused(F.moe, F.tree.replace(params, {".down": torch.randn(6, 7, 10)}), torch.randn(2, 3, 10), cfg),
        refused(F.balance_loss, [None, None]),
        refused(F.balance_loss, [of(6), of(4)]),
        refused(F.balance_loss, of(6), torch.ones(1, 3, dtype=torch.bool)),
        refused(F.balance_loss, of(6), torch.ones(2, 3)),
        refused(F.moe, F.tree.replace(make(biased), {".down_bias": torch.randn(6, 1)}), torch.randn(2, 3, 10), biased),
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
ValueError: MoEConfig(num_experts_per_tok=7): more than num_experts=6
    fix: num_experts_per_tok=6 at most
ValueError: MoEConfig(num_experts=...): a positive integer is needed, not True
ValueError: MoEConfig(n_group=4): num_experts=6 do not divide over it
ValueError: MoEConfig(topk_group=3): more than n_group=2
ValueError: MoEConfig(num_experts_per_tok=3): topk_group=1 groups of 2 experts have 2
ValueError: MoEConfig(group_score_topk=2): a group has 1 experts
ValueError: MoEConfig(scoring_func="tanh") is unknown
    known: softmax, sigmoid
ValueError: MoEConfig(hidden_act="swosh") is unknown
    known: gelu, gelu_pytorch_tanh, relu2, silu
ValueError: MoEConfig(routed_scaling_factor=nan): a finite number above 0 is needed
ValueError: MoEConfig(shared_gate=True): there are no shared experts
    fix: shared=MLPConfig(...)
ValueError: MoEConfig(shared=...): its hidden_size=9, not 10
ShapeError: moe(x=...): D is 10 in the config but 9 in x
    x: B S D = 2 3 9
                   ^
    so far: D=10 X=6 I=1 B=2 S=3
TypeError: moe: unknown arguments
    return_routings    did you mean return_routing?
    aux
    known: params, x, cfg, return_routing, wire
ShapeError: moe(down=...): D is 10 in the config but 7 in down
    down: X D F = 6 7 10
                    ^
    so far: D=10 X=6 I=1 B=2 S=3 F=7
ValueError: balance_loss(routings=...): no layer has experts
ValueError: balance_loss(routings=...): layers have 4, 6 experts
    fix: one loss for each number of them
ShapeError: balance_loss(mask=...): B is 2 in indices but 1 in mask
    indices: B S J = 2 3 2
    mask   : B S = 1 3
                   ^
    so far: B=2 S=3 J=2 X=6
TypeError: balance_loss(mask=...): a boolean mask is needed, true for tokens that count, not torch.float32
ShapeError: moe(down_bias=...): D is 10 in the config but 1 in down_bias
    down_bias: X D = 6 1
                       ^
    so far: D=10 X=6 I=1 B=2 S=3 F=7""",
    )
