"""What the adapters share: names and configs of the parts that most families have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ...functional import (
    AttentionConfig,
    DecoderConfig,
    GDNConfig,
    LayerConfig,
    MLAConfig,
    MLPConfig,
    MoEConfig,
    NormConfig,
    RopeConfig,
)
from ...functional.rope import ROPE_TYPES

__all__ = ["activation", "attention", "by_type", "decoder", "layers", "mlp", "names", "rms", "rope", "windows"]

Kind = TypeVar("Kind")

LAYER = "model.layers.{i}."
OURS = ".layers[{i}]."
ATTENTION = {f"self_attn.{each}_proj": f"attention.{each}" for each in "qkvo"}
MLP = {f"mlp.{each}_proj": f"mlp.{each}" for each in ("gate", "up", "down")}
PRE_NORMS = {"input_layernorm": "attention.norm", "post_attention_layernorm": "mlp.norm"}
# transformers' names of activations -> ours
_ACTIVATIONS = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}


def names(*parts: Mapping[str, str], norm: str = "model.norm", bias: bool = False) -> dict[str, str]:
    """The table of a family. parts: modules of a layer -> paths within ours; of projections, `attention.q`, and of
    norms, `mlp.norm`. norm: the final one. bias: whether norms have a bias."""
    found = {"model.embed_tokens.weight": ".embed"}
    for part in parts:
        for module, path in part.items():
            if path.endswith("norm"):
                found[f"{LAYER}{module}.weight"] = f"{OURS}{path}.weight"
                if bias:
                    found[f"{LAYER}{module}.bias"] = f"{OURS}{path}.bias"
            else:
                found[f"{LAYER}{module}.weight"] = f"{OURS}{path}"
                found[f"{LAYER}{module}.bias"] = f"{OURS}{path}_bias"
    found[f"{norm}.weight"] = ".norm.weight"
    if bias:
        found[f"{norm}.bias"] = ".norm.bias"
    return found | {"lm_head.weight": ".head"}


def rms(hf: Mapping[str, Any], **options: Any) -> NormConfig:
    return NormConfig(eps=hf.get("rms_norm_eps", 1e-6), **options)


def attention(hf: Mapping[str, Any], **options: Any) -> AttentionConfig:
    """Sizes, dropout and scale from their usual fields; all else from `options`."""
    width, heads = hf["hidden_size"], hf["num_attention_heads"]
    return AttentionConfig(
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or width // heads,
        attention_dropout=hf.get("attention_dropout") or 0.0,
        initializer_range=hf.get("initializer_range", 0.02),
        **options,
    )


def activation(name: str | None) -> str:
    """Ours, from what transformers calls it."""
    return _ACTIVATIONS.get(name or "silu", name or "silu")


def mlp(hf: Mapping[str, Any], act: str | None, **options: Any) -> MLPConfig:
    """act: as transformers calls it."""
    return MLPConfig(
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        hidden_act=activation(act),
        initializer_range=hf.get("initializer_range", 0.02),
        **options,
    )


def layers(
    hf: Mapping[str, Any],
    attentions: AttentionConfig | MLAConfig | Sequence[AttentionConfig | MLAConfig | GDNConfig],
    feeds: MLPConfig | MoEConfig | Sequence[MLPConfig | MoEConfig],
    **options: Any,
) -> tuple[LayerConfig, ...]:
    """One attention for all layers, or one a layer, and so of what follows it."""
    count = hf["num_hidden_layers"]
    first = attentions if isinstance(attentions, Sequence) else [attentions] * count
    second = feeds if isinstance(feeds, Sequence) else [feeds] * count
    return tuple(LayerConfig(attention=a, mlp=m, **options) for a, m in zip(first, second, strict=True))


def decoder(
    hf: Mapping[str, Any], stack: tuple[LayerConfig, ...], norm: NormConfig, *, tied: bool = False, **options: Any
) -> DecoderConfig:
    """tied: what a config that does not say means."""
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        layers=stack,
        norm=norm,
        tie_word_embeddings=hf.get("tie_word_embeddings", tied),
        initializer_range=hf.get("initializer_range", 0.02),
        **options,
    )


def windows(hf: Mapping[str, Any]) -> list[int | None]:
    """The window of each layer, from `layer_types` and `sliding_window`."""
    kinds = {"full_attention": None, "sliding_attention": hf.get("sliding_window")}
    return by_type(hf, kinds, lambda i: "full_attention")


def by_type(hf: Mapping[str, Any], kinds: Mapping[str, Kind], default: Callable[[int], str]) -> list[Kind]:
    """One of `kinds` for each layer, as `layer_types` says; default: the type of a layer where the config does not."""
    count = hf["num_hidden_layers"]
    types = hf.get("layer_types") or [default(i) for i in range(count)]
    unknown = sorted(set(types) - set(kinds))
    if unknown:
        raise ValueError(f"layer_types: {', '.join(unknown)} unknown\n    known: {', '.join(kinds)}")
    if len(types) != count:
        raise ValueError(f"layer_types: {len(types)} entries for num_hidden_layers={count}")
    return [kinds[each] for each in types]


def rope(
    hf: Mapping[str, Any],
    layer_type: str | None = None,
    *,
    partial: bool = False,
    interleaved: bool = False,
    mrope: bool = False,
) -> RopeConfig:
    """`rope_parameters` of transformers 5, of one layer type where it has them by type, or `rope_theta` and
    `rope_scaling` of older configs. partial: whether the family has a `partial_rotary_factor`. mrope: whether it has
    positions of three axes."""
    found = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    if layer_type is not None:
        found = dict(found[layer_type])
    kind = found.pop("rope_type", None) or found.pop("type", None) or "default"
    found.pop("type", None)
    if kind not in ROPE_TYPES:
        raise ValueError(f'rope_type "{kind}" is unknown\n    known: {", ".join(ROPE_TYPES)}')
    # Older configs have these at the top; read whether or not they matter, so that they count as explained.
    theta, share = hf.get("rope_theta"), hf.get("partial_rotary_factor")
    theta = found.pop("rope_theta", None) or theta or 10_000.0
    share = found.pop("partial_rotary_factor", None) or share or 1.0
    if share != 1.0 and not partial:
        raise ValueError(f"rope_parameters: partial_rotary_factor={share} is not known to this family")
    needs, may = ROPE_TYPES[kind]
    if mrope:
        may = (*may, "mrope_section", "mrope_interleaved")
    context = hf.get("max_position_embeddings")
    if "max_position_embeddings" in needs:
        found["max_position_embeddings"] = context
    # As in transformers the one at the top wins.
    original = hf.get("original_max_position_embeddings")
    original = original or found.get("original_max_position_embeddings") or context
    if "original_max_position_embeddings" in needs:
        found["original_max_position_embeddings"] = original
    if "factor" in needs and found.get("factor") is None and context and original:
        found["factor"] = context / original
    # A default or linear one may name the original context, which changes nothing there.
    silent = {"original_max_position_embeddings", "finetuned"}
    unknown = sorted(name for name in set(found) - {*needs, *may} - silent if found[name] is not None)
    if unknown:
        raise ValueError(f"rope_parameters: {', '.join(unknown)} unknown for rope_type={kind!r}")
    # A YaRN correction of 0 is none.
    none = {name for name in ("mscale", "mscale_all_dim") if not found.get(name)}
    kept: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v
        for name, v in found.items()
        if name in (*needs, *may) and name not in none
    }
    return RopeConfig(
        rope_theta=float(theta), rope_type=kind, partial_rotary_factor=share, interleaved=interleaved, **kept
    )
