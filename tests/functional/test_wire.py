from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from meshfn import functional as F
from meshfn.functional.attention import project_qkv
from meshfn.functional.wire import Heads, choices_of, edges_of, identity
from torch import Tensor

from ..tiny import llama, ours
from .gdn_cases import config
from .latent_cases import tiny

LINEAR = F.GDNConfig(hidden_size=20, num_key_heads=2, num_value_heads=4, key_head_dim=3, value_head_dim=5)
KDA = replace(LINEAR, num_value_heads=2, channel_decay=True, decay_rank=3, gate_rank=3)


class Counting:
    """A wire that notes each edge with its scope, its call and its shape, and moves nothing."""

    moves = False

    def layer(self, **facts: Any) -> Counting:
        return self

    def heads(self, *, sent: bool = False, of: str = "q") -> Heads:
        return Heads()

    def __init__(self, log: list[tuple[str, str, Any]], scope: str = "") -> None:
        self.log, self.prefix = log, scope

    def _note(self, call: str, named: dict[str, Tensor | None]) -> None:
        self.log += [(call, self.prefix + n, None if t is None else tuple(t.shape)) for n, t in named.items()]

    def send(self, **named: Tensor | None) -> Any:
        self._note("send", named)
        return identity.send(**named)

    def receive(self, *sent: Any, **named: Tensor | None) -> tuple[Any, ...]:
        self._note("receive", named)
        return identity.receive(*sent, **named)

    def projection(self, weight: Tensor) -> Any:
        return identity.projection(weight)

    def own(self, letter: str) -> None:
        return None

    def gather(self, params: Any, *names: str, **sizes: int) -> Any:
        return params

    def stays(self, name: str) -> bool:
        return True

    def all_of(self, **named: Tensor | None) -> Tensor | None:
        return identity.all_of(**named)

    def pass_(self, **named: Tensor | None) -> Any:
        self._note("pass", named)
        return identity.pass_(**named)

    def scope(self, name: str) -> Counting:
        return Counting(self.log, f"{self.prefix}{name}.")


def without(declared, *parts):
    """The names of edges that are of none of these parts, nor of several ranks, nor of keys and latents kept before."""
    several = (".summary", ".tail", ".rows", ".attention.cache_k", ".attention.cache_v", ".cache_latent")
    return {n for n in declared if not any(f".{part}." in n for part in parts) and not n.endswith(several)}


def test_every_edge_passes_with_the_shape_it_declares():
    model = ours(llama(layers=2))
    tokens = torch.randint(0, 97, (2, 5))
    log: list[tuple[str, str, Any]] = []
    options = {"segment_ids": torch.zeros(2, 5, dtype=torch.int64), "mask": torch.ones(2, 6, 5, 5, dtype=torch.bool)}
    plain, _ = F.decoder(model.params, tokens, model.config, **options)
    wired, _ = F.decoder(model.params, tokens, model.config, **options, wire=Counting(log))
    assert torch.equal(plain, wired)
    one_layer = [
        ("pass", "layers.attention.x", (2, 5, 48)),
        ("send", "layers.attention.k", (2, 5, 2, 8)),
        ("send", "layers.attention.v", (2, 5, 2, 8)),
        ("send", "layers.attention.k_positions", (2, 5)),
        ("send", "layers.attention.k_segment_ids", (2, 5)),
        ("receive", "layers.attention.q", (2, 5, 6, 8)),
        ("receive", "layers.attention.q_positions", (2, 5)),
        ("receive", "layers.attention.q_segment_ids", (2, 5)),
        ("receive", "layers.attention.mask", (2, 6, 5, 5)),
        ("receive", "layers.attention.sinks", None),
        ("send", "layers.attention.o", (2, 5, 6, 8)),
        ("pass", "layers.attention.out", (2, 5, 48)),
        ("pass", "layers.mlp.x", (2, 5, 48)),
        ("pass", "layers.mlp.h", (2, 5, 40)),
        ("pass", "layers.mlp.out", (2, 5, 48)),
    ]
    ends = [("pass", "tokens", (2, 5)), ("pass", "embedded", (2, 5, 48))], [("pass", "logits", (2, 5, 97))]
    assert log == [*ends[0], *one_layer, *one_layer, *ends[1]]
    declared = edges_of(F.decoder)
    assert {name for _, name, _ in log} == without(declared, "moe", "mla", "gdn")
    sizes = {"B": 2, "S": 5, "T": 5, "D": 48, "K": 2, "G": 3, "E": 8, "V": 8, "F": 40, "Z": 97}
    for _, name, shape in log:
        if shape is not None:
            assert F.shapes.shape_of(declared[name], sizes) == shape


@pytest.mark.parametrize(
    ("attention", "others"),
    [(tiny(), ("moe", "attention", "gdn")), (LINEAR, ("moe", "attention", "mla")), (KDA, ("moe", "attention", "mla"))],
    ids=["mla", "gdn", "gdn by channel"],
)
def test_other_kinds_of_attention_pass_their_edges_in_a_decoder(attention, others):
    layers = F.LayerConfig(attention=attention, mlp=F.MLPConfig(hidden_size=20, intermediate_size=9))
    cfg = F.DecoderConfig(vocab_size=97, hidden_size=20, layers=(layers, layers))
    log: list[tuple[str, str, Any]] = []
    tokens, positions = torch.randint(0, 97, (2, 5)), torch.arange(5)[None]
    options = {"positions": positions, "segment_ids": torch.zeros(2, 5, dtype=torch.int64)}
    plain, _ = F.decoder(F.Decoder.init(cfg, 0), tokens, cfg, **options)
    wired, _ = F.decoder(F.Decoder.init(cfg, 0), tokens, cfg, **options, wire=Counting(log))
    assert torch.equal(plain, wired)
    declared = edges_of(F.decoder)
    assert {name for _, name, _ in log} == without(declared, *others)
    sizes = {**attention.sizes, "B": 2, "S": 5, "T": 5, "F": 9, "Z": 97}
    for _, name, shape in log:
        if shape is not None:
            assert F.shapes.shape_of(declared[name], sizes) == shape, name


def test_a_mask_for_a_gated_delta_net_is_refused_before_anything_moves():
    mlp = F.MLPConfig(hidden_size=20, intermediate_size=9)
    layers = tuple(F.LayerConfig(attention=each, mlp=mlp) for each in (tiny(), LINEAR))
    cfg = F.DecoderConfig(vocab_size=97, hidden_size=20, layers=layers)
    params, log = F.Decoder.init(cfg, 0), []
    mask, told = torch.ones(5, 5, dtype=torch.bool), {"positions": torch.arange(5)[None]}
    with pytest.raises(ValueError, match=r"decoder\(mask=...\): a gated delta net reads a state"):
        F.decoder(params, torch.ones(2, 5, dtype=torch.int64), cfg, mask=mask, wire=Counting(log))
    with pytest.raises(ValueError, match=r"layer\(mask=...\): a gated delta net reads a state"):
        F.layer(params.layers[1], torch.randn(2, 5, 20), layers[1], mask=mask, wire=Counting(log), **told)
    assert not log


def test_a_gated_delta_net_passes_its_edges_in_a_decoder():
    """Positions only where some are given, since without padding there is none to look for."""
    gdn = config("kimi_linear", 2, 3)
    layers = F.LayerConfig(attention=gdn, mlp=F.MLPConfig(hidden_size=11, intermediate_size=9))
    cfg = F.DecoderConfig(vocab_size=97, hidden_size=11, layers=(layers, layers))
    params, tokens = F.Decoder.init(cfg, 0), torch.randint(0, 97, (2, 5))
    ids = torch.zeros(2, 5, dtype=torch.int64)
    for given in ({}, {"positions": torch.arange(5)[None], "segment_ids": ids}):
        log: list[tuple[str, str, Any]] = []
        plain, _ = F.decoder(params, tokens, cfg, **given)
        wired, _ = F.decoder(params, tokens, cfg, **given, wire=Counting(log))
        assert torch.equal(plain, wired)
        declared = edges_of(F.decoder)
        assert {name for _, name, _ in log} == without(declared, "moe", "attention", "mla")
        sizes = {**gdn.sizes, "B": 2, "S": 5, "T": 5, "F": 9, "Z": 97}
        assert {name for _, name, shape in log if shape is None} == (
            {f"layers.gdn.cache_{leaf}" for leaf in ("q", "k", "v", "state")}
            | (set() if given else {f"layers.gdn.{side}_{of}" for side in "qk" for of in ("positions", "segment_ids")})
        )
        for _, name, shape in log:
            if shape is not None:
                assert F.shapes.shape_of(declared[name], sizes) == shape


def test_parts_that_stand_for_each_other_are_declared():
    kinds = {"attention": F.Attention, "mla": F.MLA, "gdn": F.GDN}
    assert choices_of(F.attention) == ()
    assert choices_of(F.layer) == (kinds,)
    wanted = ({f"layers.{name}": kind for name, kind in kinds.items()},)
    assert choices_of(F.decoder) == choices_of(F.backbone) == choices_of(F.next_token_loss) == wanted


def test_sinks_are_an_edge_and_per_head_parameters_can_be_cut():
    """A wire that keeps the first key/value head computes the first heads of the whole."""
    cfg = F.AttentionConfig(hidden_size=12, num_attention_heads=6, num_key_value_heads=2, head_dim=4, sinks=True)
    params = F.Attention.init(cfg, 0, dtype=torch.float64)
    params = F.tree.replace(params, {".sinks": torch.randn(6, dtype=torch.float64)})
    x, positions = torch.randn(2, 5, 12, dtype=torch.float64), torch.arange(5)[None]
    seen = []

    class FirstHead(Counting):
        def receive(self, *sent: Any, **named: Any) -> tuple[Any, ...]:
            if "q" not in named:
                return super().receive(*sent, **named)
            q, q_positions, q_ids, mask, sinks, k, v, *rest = super().receive(*sent, **named)
            return (q[:, :, :3], q_positions, q_ids, mask, sinks[:3], k[:, :, :1], v[:, :, :1], *rest)

        def send(self, **named: Any) -> Any:
            seen.append(named)
            if "o" in named:
                return super().send(o=torch.nn.functional.pad(named["o"], (0, 0, 0, 3)))
            return super().send(**named)

    F.attention(params, x, cfg, positions=positions, wire=FirstHead([]))
    (part,) = [n["o"] for n in seen if "o" in n]
    q, k, v, _ = project_qkv(params, x, cfg)
    whole = F.dot_product_attention(q, k, v, causal=True, sinks=params.sinks)
    torch.testing.assert_close(part, whole[:, :, :3])


def test_a_function_without_edges_is_refused():
    with pytest.raises(ValueError, match="declares no edges"):
        edges_of(F.rms_norm)


def test_two_ranks_sum_to_the_whole_and_a_bias_counts_once():
    """Attention by heads and MLP by width on two ranks, each edge after the last projection their sum."""
    model = ours(llama(6, 2, bias=True).double())
    layer, cfg = model.params.layers[0], model.config.layers[0]
    x, positions = torch.randn(2, 5, 48, dtype=torch.float64), torch.arange(5)[None]
    whole, _ = F.layer(layer, x, cfg, positions=positions)

    def part(tree, rank):
        """Leaves cut where their spec names tp."""
        specs, new = F.tree.paths(tree.specs()), {}
        for path, leaf in F.tree.paths(tree).items():
            dims = [i for i, dim in enumerate(top_level(specs[path])) if "/tp" in dim]
            new[path] = leaf.chunk(2, dims[0])[rank] if dims else leaf
        return F.tree.replace(tree, new)

    class Half(Counting):
        """Notes what it would sum, and gives back what it was given to sum with."""

        def __init__(self, log, others, scope=""):
            super().__init__(log, scope)
            self.others = others

        def pass_(self, **named: Tensor) -> Tensor:
            ((name, edge),) = named.items()
            if name == "out":
                self.log.append(edge)
                return edge + self.others.pop(0) if self.others else edge
            return edge

        def _note(self, call: str, named: Any) -> None:
            pass

        def scope(self, name: str) -> Half:
            return self

    def run(fn, params, x, config, **given):
        sent: list[Tensor] = []
        fn(part(params, 1), x, config, wire=Half(sent, []), **given)
        return fn(part(params, 0), x, config, wire=Half([], sent[:1]), **given)

    a, _ = run(F.attention, layer.attention, x, cfg.attention, positions=positions)
    torch.testing.assert_close(x + a + run(F.mlp, layer.mlp, x + a, cfg.mlp), whole)


def top_level(spec: str) -> list[str]:
    """The dimensions of a spec, `"((K/tp G) E) D"` -> `["((K/tp G) E)", "D"]`."""
    dims, depth = [""], 0
    for c in spec:
        depth += (c == "(") - (c == ")")
        if c == " " and not depth:
            dims.append("")
        else:
            dims[-1] += c
    return dims


def test_kv_index_and_heads_reach_the_core():
    cfg = F.AttentionConfig(hidden_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    params, x = F.Attention.init(cfg, 0), torch.randn(1, 3, 12)
    told: dict[str, Any] = {}

    class Dealt(Counting):
        def heads(self, *, sent: bool = False, of: str = "q") -> Heads:
            return Heads(offset=2, local=4, kv_index=torch.tensor([1, 1, 0, 0]))

    def core(q, k, v, **given):
        told.update(given)
        return F.dot_product_attention(q, k, v, **given)

    out, _ = F.attention(params, x, cfg, positions=torch.arange(3)[None], wire=Dealt([]), core=core)
    assert (told["head_offset"], told["local_heads"]) == (2, 4)
    positions, cache = torch.arange(3)[None], F.empty_caches([cfg], 1, 4, dtype=torch.float32)[0]
    given = {"positions": positions, "cache": cache, "wire": Dealt([]), "core": F.decode_attention}
    torch.testing.assert_close(F.attention(params, x, cfg, **given)[0], out)
    swapped = F.tree.replace(params, {".k": params.k.roll(4, 0), ".v": params.v.roll(4, 0)})
    torch.testing.assert_close(out, F.attention(swapped, x, cfg, positions=torch.arange(3)[None])[0])
