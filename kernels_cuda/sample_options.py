"""The end of a step with options: `sample_options.cu`, in the place of `functional.sampling.sample`.

Everything that decides is a tensor, and nothing waits for the device, so a captured graph serves all options: the
number that a row draws by is a function of its seed and position, which the step advances.

Letters: B batch, Z vocabulary, N end-of-sequence tokens.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..functional import sampling
from ..functional.sampling import Controls
from ..functional.shapes import check_shapes
from .launch import Launch
from .ops import Op, define
from .rules import (
    CPP_TYPES,
    arch_rule,
    by_rows,
    check_contiguous,
    check_dtype,
    check_most,
    check_rows,
    check_same,
    dtype_rule,
)
from .sample_advance import MOST_VOCABULARY

__all__ = ["sample", "supports"]

# Threads of a block, up to a size of the vocabulary.
_FEW, _MANY, _SMALL = 128, 512, 4096
# Of controls that are no fp32.
_DTYPES = {"do_sample": torch.bool, "top_k": torch.int64, "top_p": torch.float64, "seed": torch.int64}


def _reference(
    logits: Tensor,
    positions: Tensor,
    counts: Tensor | None,
    eos_token_id: Tensor,
    do_sample: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    repetition_penalty: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`sampling.sample` without the counts that it returns; counts: None where nothing is penalized."""
    controls = Controls(
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )
    given = logits if counts is None else counts
    return sampling.sample(logits, positions, given, controls, eos_token_id, penalizes=counts is not None)[:3]


def _outputs(
    logits: Tensor, positions: Tensor, counts: Tensor | None, eos_token_id: Tensor, *controls: Tensor, **named: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows = dict(zip(Controls.__dataclass_fields__, controls, strict=False)) | named
    check_dtype("sample_options", logits=logits)
    check_same("sample_options", torch.int64, positions=positions, eos_token_id=eos_token_id)
    check_same("sample_options", torch.int32, counts=counts)
    for name, t in rows.items():
        check_same("sample_options", _DTYPES.get(name, torch.float32), **{name: t})
    given = {"logits": (logits, "B Z"), "positions": (positions, "B"), "counts": (counts, "B Z")}
    by_row = {name: (t, "B") for name, t in rows.items()}
    sizes = check_shapes("sample_options", **given, **by_row, eos_token_id=(eos_token_id, "N"))
    check_most("sample_options", "logits", "Z", sizes["Z"], MOST_VOCABULARY)
    check_rows("sample_options", logits=logits, eos_token_id=eos_token_id, **rows)
    check_contiguous("sample_options", counts=counts)
    batch = sizes["B"]
    logprob = logits.new_empty(batch, dtype=torch.float32)
    token = logits.new_empty(batch, dtype=torch.int64)
    return token, logprob, torch.empty_like(token)


def _launches(
    out: tuple[Tensor, Tensor, Tensor],
    logits: Tensor,
    positions: Tensor,
    counts: Tensor | None,
    eos_token_id: Tensor,
    *controls: Tensor,
    **named: Tensor,
) -> list[Launch]:
    batch, vocabulary = logits.shape
    threads = _FEW if vocabulary <= _SMALL else _MANY
    scores = logits.new_empty(batch, vocabulary, dtype=torch.float32)
    integer, long = ctypes.c_int, ctypes.c_longlong
    launch = Launch(
        source="sample_options.cu",
        name=f"sample_options<{CPP_TYPES[logits.dtype]}, {threads}>",
        grid=(batch, 1, 1),
        block=(threads, 1, 1),
        args=(
            *(logits, long(logits.stride(0)), positions, long(positions.stride(0))),
            *(
                counts,
                *controls,
                *named.values(),
                eos_token_id,
                scores,
                *out,
                integer(vocabulary),
                integer(len(eos_token_id)),
            ),
        ),
        programmatic=True,
    )
    return [launch]


_sample_options = define(Op("sample_options", _reference, _outputs, _launches))


def sample(
    logits: Tensor, positions: Tensor, counts: Tensor | None, controls: Controls, eos_token_id: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `functional.sampling.sample`: token, logprob and positions `B`. counts: `B Z`, int32, to which the token is
    added in place where positions are not -1; None where nothing is penalized."""
    given = {name: getattr(controls, name) for name in Controls.__dataclass_fields__}
    out: tuple[Tensor, Tensor, Tensor] = _sample_options(logits, positions, counts, eos_token_id, *given.values())
    if counts is not None:
        active = (positions >= 0).to(counts.dtype)
        counts.scatter_add_(-1, out[0][:, None], active[:, None])
    return out


def supports(logits: Tensor, arch: str | None) -> str | None:
    """None where the kernel computes it of logits `B Z`, else the reason why not."""
    return arch_rule(arch) or dtype_rule(logits) or by_rows(logits=[logits])
