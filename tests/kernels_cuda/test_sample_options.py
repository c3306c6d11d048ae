"""The end of a step with options: the plain function's tokens over thousands of options and logits."""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest
import torch
from meshfn.functional import sampling
from meshfn.functional.sampling import Controls, fold_seed
from meshfn.functional.shapes import ShapeError
from meshfn.kernels_cuda import sample_options
from meshfn.programs.chooser import Choice, Chooser, choose_inside
from meshfn.programs.steps import State

from .ops import host_ops
from .test_sample_advance import kinds

ENDS = torch.tensor([3, 50])
FIELDS = tuple(Controls.__dataclass_fields__)


def mixed(batch: int, vocabulary: int, seed: int, **fixed) -> Controls:
    """Options of each row's own, each off in about half of the rows; four of five are drawn."""
    r = random.Random(seed)

    def rows(off, on) -> list:
        return [off if r.random() < 0.5 else on() for _ in range(batch)]

    given = {
        "do_sample": [r.random() < 0.8 for _ in range(batch)],
        "temperature": rows(1.0, lambda: r.uniform(0.05, 3)),
        "top_k": rows(vocabulary, lambda: r.randint(1, vocabulary)),
        "top_p": rows(1.0, lambda: r.choice([0.0, r.random(), r.random()])),
        "min_p": rows(0.0, lambda: r.choice([1.0, r.random(), r.random() / 10])),
        "repetition_penalty": rows(1.0, lambda: r.uniform(0.5, 2)),
        "presence_penalty": rows(0.0, lambda: r.uniform(-1, 1)),
        "frequency_penalty": rows(0.0, lambda: r.uniform(-1, 1)),
        "seed": [fold_seed(seed, i) for i in range(batch)],
        **fixed,
    }
    off = Controls.off(batch, vocabulary)
    return Controls(**{name: torch.tensor(given[name], dtype=getattr(off, name).dtype) for name in FIELDS})


def counted(logits: torch.Tensor, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 6, logits.shape, generator=made) - 3).clamp_min(0).int()


def run(logits, positions, counts, controls, **host):
    with host_ops(**host) as launches:
        out = sample_options.sample(logits, positions, counts, controls, ENDS)
    assert [launch.source for launch in launches] == ["sample_options.cu"]
    return out


def check(logits, positions, counts, controls, **host):
    """Tokens, positions and counts are the plain function's."""
    new = None if counts is None else counts.clone()
    found = run(logits, positions, new, controls, **host)
    none = torch.zeros(logits.shape, dtype=torch.int32)
    given = logits, positions, none if counts is None else counts, controls, ENDS
    *usual, usual_counts = sampling.sample(*given, penalizes=counts is not None)
    assert found[0].tolist() == usual[0].tolist()
    assert torch.equal(found[2], usual[2])
    assert [x.dtype for x in found] == [x.dtype for x in usual]
    right = logits.double().log_softmax(-1).gather(-1, found[0][:, None])[:, 0]
    torch.testing.assert_close(found[1].double(), right, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(found[1].isnan(), usual[1].isnan())
    if new is not None:
        assert torch.equal(new, usual_counts)
    return found


def random_rows(batch: int, vocabulary: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Flat to peaked, every fifth in steps (ties), every seventh with many that are -inf."""
    made = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, vocabulary, generator=made) * torch.logspace(-1, 1.2, batch)[:, None]
    logits[::5] = (logits[::5] * 2).round() / 2
    logits[::7] = torch.where(torch.rand(vocabulary, generator=made) < 0.6, -torch.inf, logits[::7])
    logits[:, vocabulary // 3] = 0.0
    return logits.to(dtype)


@pytest.mark.parametrize("vocabulary", [1, 2, 37, 300])
def test_the_plain_functions_tokens(vocabulary):
    """3,200 rows in all."""
    for seed in range(8):
        logits = random_rows(100, vocabulary, seed)
        check(logits, torch.arange(100) - 2, counted(logits, seed), mixed(100, vocabulary, seed))


@pytest.mark.parametrize("option", ["top_k", "top_p", "min_p", "temperature"])
def test_one_option_alone(option):
    given = mixed(200, 90, 5)
    controls = dataclasses.replace(Controls.off(200, 90), do_sample=torch.ones(200, dtype=torch.bool), seed=given.seed)
    controls = dataclasses.replace(controls, **{option: getattr(given, option)})
    check(random_rows(200, 90, 1), torch.arange(200), None, controls)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_of_a_larger_vocabulary_in_every_order(dtype):
    """More than 4,096 tokens, of which half precision makes ties; more threads a block."""
    logits = random_rows(6, 4500, 2, dtype)
    given = torch.arange(6), counted(logits, 3), mixed(6, 4500, 4, do_sample=[True] * 6)
    found = check(logits, *given)
    for order in ("reversed", "shuffled:3"):
        assert all(map(torch.equal, found, run(logits, given[0], given[1].clone(), given[2], order=order)))


@pytest.mark.parametrize("drawn", [False, True])
def test_edges_and_rows_that_are_no_distribution(drawn):
    logits = kinds(60, torch.float32)
    rows = len(logits)
    options = mixed(rows, 60, 6, do_sample=[drawn] * rows)
    check(logits, torch.arange(rows) - 1, counted(logits, 1), options)
    check(logits, torch.arange(rows) - 1, None, dataclasses.replace(options, top_p=torch.full((rows,), 0.5).double()))


def test_ties_at_the_edge_of_top_p_leave_the_highest():
    """Of equal tokens as many are left out, the lowest first; sums that fp32 holds."""
    for vocabulary in (4, 64, 256):
        rows = 33
        controls = mixed(rows, vocabulary, 1, do_sample=[True] * rows, top_k=[vocabulary] * rows, min_p=[0.0] * rows)
        controls = dataclasses.replace(controls, top_p=torch.arange(rows).double() / (rows - 1))
        check(torch.zeros(rows, vocabulary), torch.arange(rows), None, controls)


def test_a_row_is_the_same_in_every_batch():
    logits, options = random_rows(9, 90, 3), mixed(9, 90, 3)
    whole = run(logits, torch.arange(9), None, options)
    for i in (0, 4, 8):
        row = slice(i, i + 1)
        one = Controls(**{name: getattr(options, name)[row] for name in FIELDS})
        alone = run(logits[row], torch.arange(9)[row], None, one)
        assert all(map(torch.equal, alone, (x[row] for x in whole)))


@pytest.mark.parametrize("given", [{"top_p": 0.8, "do_sample": True, "seed": 4}, {"repetition_penalty": 1.3}])
def test_programs_choose_with_it(given):
    """Over steps, as `generate` calls it, and as a graph has it inside, by buffers alone: tokens of the eager way, counts
    of tokens that it adds itself."""
    sizes = {"batch": 3, "vocab_size": 40, "max_new_tokens": 6, "device": torch.device("cpu")}
    rows, chosen = [[1, 2], [3], [4, 5, 6]], {}
    for arch, inside in ((None, False), ("sm_90", False), (None, True), ("sm_90", True)):
        choose, made = Chooser(rows, **sizes, arch=arch, **given), torch.Generator().manual_seed(1)
        if inside:
            choose.fill(choice := Choice.off(3, 40, torch.device("cpu")))
            choose = functools.partial(choose_inside, choice=choice, arch=arch)
        state, fed = State.empty(3, 40, torch.float32, "cpu"), torch.tensor([len(row) - 1 for row in rows])
        for _ in range(6):
            logits = torch.randn(3, 40, generator=made)
            with host_ops() as launches:
                state = choose(dataclasses.replace(state, logits=logits), fed, torch.tensor([-1]))
            assert len(launches) == (arch is not None)
            fed = state.position
            chosen.setdefault((arch, inside), []).append(state.token.tolist())
    assert all(tokens == chosen[None, False] for tokens in chosen.values())


def test_opcheck_and_bad_input():
    logits, options = random_rows(3, 20, 1), mixed(3, 20, 1)
    given = [logits, torch.arange(3), counted(logits, 1), ENDS, *(getattr(options, name) for name in FIELDS)]
    with host_ops() as launches:
        torch.library.opcheck(torch.ops.meshfn_cuda.sample_options.default, tuple(given))
        launches.clear()
        for i, wrong in ((1, torch.arange(2)), (2, given[2][:, :-1]), (5, given[5][:-1])):
            with pytest.raises(ShapeError):
                torch.ops.meshfn_cuda.sample_options(*given[:i], wrong, *given[i + 1 :])
    assert launches == []
    reasons = [sample_options.supports(x, "sm_90") for x in (logits, logits.double(), logits.T)]
    assert reasons == [None, "no float64", "logits by columns"]
    assert sample_options.supports(logits, "sm_75") == "sm_75 is older than sm_80"


@pytest.mark.verify
def test_random_vocabularies():
    for seed in range(100):
        vocabulary = random.Random(seed).choice([1, 3, 31, 32, 33, 129, 1000, 4097])
        logits = random_rows(20, vocabulary, seed)
        check(logits, torch.arange(20), counted(logits, seed), mixed(20, vocabulary, seed), order=f"shuffled:{seed}")


@pytest.mark.verify
@pytest.mark.parametrize("sanitizer", ["address", "undefined", "thread"])
def test_sanitizers_are_silent(sanitizer):
    logits = random_rows(8, 300, 1)
    check(logits, torch.arange(8), counted(logits, 1), mixed(8, 300, 1), sanitizer=sanitizer)
