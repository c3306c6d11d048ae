"""Programs of two ranks whose sums over tp the kernel `one_shot_all_reduce` makes, on two GPUs that a CPU carries out."""

from __future__ import annotations

import contextlib
import dataclasses
import re

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn import sharding as sh
from meshfn.programs import pair_sums

from ..kernels_cuda.harness import FOREVER
from ..kernels_cuda.ops import host_ops
from ..kernels_cuda.two_gpus import TwoGpus
from ..sharding.test_latent_models import HEADS, MLP
from ..sharding.test_recurrent_models import DELTA
from .test_ranks import FEW, PROMPTS, dense, hybrid, made

DENSE, HYBRID = ((HEADS, MLP),) * 2, ((DELTA, MLP), (HEADS, MLP))
SIZES = {"batch": 3, "max_len": 40, "chunk": 4, "dtype": torch.float32}


def model(parts):
    """In fp32, which the kernel adds up."""
    of = made(parts)
    return dataclasses.replace(of, params=F.tree.map(lambda p: p.float(), of.params))


@pytest.fixture
def run(monkeypatch):
    """Runs `body(program, at)` on each rank, `at` with a record, by GPUs or by none."""

    def call(body, axes, layout=dense, parts=DENSE, gpus=None):
        of, record = model(parts), sh.trace(sh.Mesh(**axes))
        if gpus is not None:
            monkeypatch.setattr(pair_sums, "place_rule", lambda device: None)
            monkeypatch.setattr(pair_sums, "memory_of", gpus.mine)

        def of_rank(at):
            if gpus is not None:
                gpus.of(at)
            with programs.build(of, mesh=at.recording(record), layout=layout, **SIZES) as program:
                return body(program, at)

        with host_ops(gpus) if gpus is not None else contextlib.nullcontext():
            found = sh.Threads(record.mesh).run(of_rank)
        monkeypatch.undo()
        return found

    return call


def generated(program, at):
    """Tokens and log-probabilities, and whether a step sends what the plan says."""
    out = program.generate(PROMPTS, max_new_tokens=5, return_logprobs=True)
    record, state = program.ranks.mesh.trace, program.prefill(PROMPTS)
    before = len(record.of(at.rank))
    program.decode(state)
    events = [(e.what, e.kind, e.axes, e.sent, e.received) for e in record.of(at.rank)[before:]]
    planned = [(e.what, e.kind, e.axes, e.sent, e.received) for e in program.plan.phases["decode"]]
    return out.tokens, out.logprobs, events == planned


@pytest.mark.parametrize(
    ("axes", "layout", "parts", "sums"),
    [
        # 3 of the trial, and 5 of each call: 2 x 3 of prefill and 5 of decode, on each pair of ranks
        ({"tp": 2}, dense, DENSE, 58),
        ({"tp": 2}, hybrid, HYBRID, 58),
        ({"dp": 2, "tp": 2}, dense, DENSE, 2 * 58),
    ],
    ids=["dense", "hybrid", "dense over dp"],
)
def test_tokens_are_those_of_the_librarys_sums(run, axes, layout, parts, sums):
    """To the bit: two numbers are added up in one way."""
    gpus = TwoGpus()
    found, wanted = run(generated, axes, layout, parts, gpus), run(generated, axes, layout, parts)
    for (tokens, logprobs, as_planned), (right, of_right, _) in zip(found, wanted, strict=True):
        assert (tokens, logprobs, as_planned) == (right, of_right, True)
    assert gpus.live == {}
    assert len(gpus.launches) == 2 * sums


def test_the_plan_says_who_adds_up(run):
    lines = []
    for axes, gpus in (({"tp": 2}, None), ({"tp": 4}, TwoGpus()), ({"dp": 2}, None), ({"tp": 2}, TwoGpus())):
        parts = ((FEW, MLP),) if axes == {"tp": 4} else DENSE
        text = run(lambda program, at: str(program.plan), axes, parts=parts, gpus=gpus)[0]
        lines += re.findall(r"  mesh .*|  sums.*", text)
    assert_expected_inline(
        "\n".join([*lines, *text.splitlines()[-12:]]),
        """\
  mesh     tp=2, rank 0
  sums     over tp by the library's all-reduce (one_shot_all_reduce: cpu, only cuda)
  mesh     tp=4, rank 0
  sums     over tp by the library's all-reduce (one_shot_all_reduce: tp=4, only 2)
  mesh     dp=2, rank 0
  mesh     tp=2, rank 0
  sums     over tp with rank 1 by one_shot_all_reduce, up to 1.0 MiB, 2.0 MiB of exchange memory on this rank; a wait ends after 60 s

prefill   7 exchanges, sends 2.4 KiB, receives 2.4 KiB
  all-gather           over tp  agreement  x1     48 B
  one_shot_all_reduce  over tp  embedded   x1    480 B
  one_shot_all_reduce  over tp  out        x4  1.9 KiB
  all-gather           over tp  shares     x1     36 B

decode   7 exchanges, sends 684 B, receives 684 B
  all-gather           over tp  agreement  x1   48 B
  one_shot_all_reduce  over tp  embedded   x1  120 B
  one_shot_all_reduce  over tp  out        x4  480 B
  all-gather           over tp  shares     x1   36 B""",
    )


def test_what_is_left_to_the_library(run):
    """Sum by sum, of a rank that is linked."""

    def body(program, at):
        x, call = torch.zeros(9), sh.Call("B +tp -> B")
        cases = [
            (x, ("tp",), call),
            (x.double(), ("tp",), call),
            (torch.zeros(2**18 + 1), ("tp",), call),
            (x, ("dp",), call),
            (x, ("dp", "tp"), call),
            (x, ("tp",), call._replace(grad=True)),
            (x, ("tp",), call._replace(backward=True)),
        ]
        return [program.sums.reason(*case) for case in cases]

    for reasons in run(body, {"dp": 2, "tp": 2}, gpus=TwoGpus()):
        assert_expected_inline(
            "\n".join(map(str, reasons)),
            """\
None
no float64
1,048,580 bytes, 1,048,576 at most
over dp
over dp/tp
it has a gradient
it has a gradient""",
        )


def test_a_sum_beyond_the_cap_is_the_librarys(run, monkeypatch):
    """Of a prefill, where those of decode are the kernel's."""

    def body(program, at):
        return program.generate(PROMPTS, max_new_tokens=3).tokens, str(program.plan)

    wanted = run(body, {"tp": 2})[0][0]
    usual = pair_sums.rule
    gpus, cap = TwoGpus(), SIZES["batch"] * 20 * 4

    def smaller(dtype, numbers):
        return usual(dtype, numbers) or (None if numbers * 4 <= cap else f"{numbers * 4:,} bytes, {cap:,} at most")

    with monkeypatch.context() as changed:
        changed.setattr(pair_sums, "rule", smaller)
        (tokens, text), _ = run(body, {"tp": 2}, gpus=gpus)
    assert tokens == wanted
    assert_expected_inline(
        "\n".join(re.findall(r".*all.reduce  .*", text)),
        """\
  all-reduce  over tp  embedded   x1    480 B
  all-reduce  over tp  out        x4  1.9 KiB
  one_shot_all_reduce  over tp  embedded   x1  120 B
  one_shot_all_reduce  over tp  out        x4  480 B""",
    )


def test_a_peer_that_is_gone(run, monkeypatch):
    """In the middle of a generation: an error on every rank that names the other, and at once in every call that follows."""
    gpus = TwoGpus()
    gpus.sleeps = lambda rank, number: (0, FOREVER) if rank == 1 and number == 20 else (0, 0)
    monkeypatch.setattr(pair_sums, "_LIMIT_S", 1e-6)

    def body(program, at):
        with pytest.raises(sh.TransportError) as error:
            program.generate(PROMPTS, max_new_tokens=5)
        before = len(gpus.launches)
        with pytest.raises(sh.TransportError):
            program.generate(PROMPTS, max_new_tokens=5)
        assert len(gpus.launches) == before
        return str(error.value)

    assert_expected_inline(
        "\n".join(run(body, {"tp": 2}, gpus=gpus)),
        """\
rank 0: one_shot_all_reduce over tp with rank 1 failed: the peer's message 21 of channel 0 did not come within 1e-06 s
    a peer is gone, was slower than the time limit, or made another call     mesh: tp=2
    fix: end all ranks and build the program again
    during decode, step 4 after prefill
rank 1: one_shot_all_reduce over tp with rank 0 failed: the peer's message 22 of channel 0 did not come within 1e-06 s
    a peer is gone, was slower than the time limit, or made another call     mesh: tp=2
    fix: end all ranks and build the program again
    during decode, step 4 after prefill""",
    )
    assert list(gpus.live.values()) == [0, 0]  # given back with the process: nobody waits for a peer that is gone


def test_a_program_that_is_left_by_an_error_waits_for_nobody(run):
    gpus = TwoGpus()

    def body(program, at):
        if at.rank == 0:
            raise ArithmeticError("of a rank's own")

    with pytest.raises(ArithmeticError, match="of a rank's own"):
        run(body, {"tp": 2}, gpus=gpus)
