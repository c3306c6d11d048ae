"""`one_shot_all_reduce` carried out by two GPUs at once on a CPU: against fp64, with a peer that is late, ahead, gone, or
sums something else; and faults planted into its text."""

from __future__ import annotations

import itertools
import shutil

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn.kernels_cuda.one_shot_all_reduce import CAP_BYTES, failure

from .harness import FOREVER, KERNELS, Device, Host, KernelFault
from .two_gpus import OP, Ends

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def payload(n, dtype, offset=0):
    """n numbers that begin `offset` numbers behind a multiple of 16 bytes."""
    return torch.randn(n + offset).to(dtype)[offset:]


def run(ends, calls, *, sleeps=((0, 0), (0, 0)), limit=10**6, **how):
    """What both ranks have of each of some calls, each call the x of both."""
    made = [[ends.call(rank, both[rank], limit) for both in calls] for rank in range(2)]
    devices = [Device([launch for _, launch in of], each) for of, each in zip(made, sleeps, strict=True)]
    Host(**how).together(devices)
    return [[out for out, _ in of] for of in made]


def check(found, calls):
    """The same bits on both, and those of the sum in fp64, rounded once: two numbers have no order to add in."""
    for one, two, (x, y) in zip(*found, calls, strict=True):
        assert torch.equal(one, two)
        wanted = (x.double() + y.double()).to(x.dtype)
        torch.testing.assert_close(one, wanted, rtol=torch.finfo(x.dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_fp64(dtype):
    """Several calls in a row, of one number up to what several blocks share; aligned on one rank alone, or on neither."""
    ends = Ends()
    for n, (a, b) in itertools.product((1, 3, 4097, 9001), ((0, 0), (0, 1), (3, 1))):
        calls = [(payload(n, dtype, a), payload(n, dtype, b)) for _ in range(3)]
        check(run(ends, calls), calls)
    assert failure(ends.control[0], 1.0) is None


def test_orders_of_threads_and_ranks():
    calls = [(payload(9001, torch.bfloat16), payload(9001, torch.bfloat16)) for _ in range(4)]
    for order in ("reversed", "shuffled:1", "shuffled:2"):
        check(run(Ends(), calls, order=order), calls)


def test_what_is_no_number_is_the_same_on_both():
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.inf, -0.0, 3e38, 1e-45, 0.0])
    y = torch.tensor([1.0, 1.0, torch.inf, torch.inf, -0.0, 3e38, 1e-45, -0.0])
    (one,), (two,) = run(Ends(), [(x, y)])
    assert torch.equal(one.view(torch.int32), two.view(torch.int32))
    torch.testing.assert_close(one, x + y, rtol=0, atol=0, equal_nan=True)


def overtaken(folder=KERNELS):
    """Whichever round it is in which one rank stands still, while the other goes on as far as it can."""
    for rank, since in itertools.product(range(2), range(0, 18, 2)):
        calls = [(payload(5, torch.float32), payload(5, torch.float32)) for _ in range(5)]
        sleeps = [(0, 0), (0, 0)]
        sleeps[rank] = (since, since + 60)
        check(run(Ends(), calls, sleeps=sleeps, folder=folder), calls)


def test_one_rank_ahead_of_the_other():
    overtaken()


def test_a_late_peer():
    calls = [(payload(700, torch.float16), payload(700, torch.float16)) for _ in range(3)]
    check(run(Ends(), calls, sleeps=((0, 0), (0, 900))), calls)


def test_a_captured_graph_sends_a_new_message_at_each_replay():
    """The same launches again, over numbers that have changed: what counts lies on the device."""
    ends = Ends()
    x, y = (torch.zeros(700) for _ in range(2))
    made = [[ends.call(rank, each) for _ in range(2)] for rank, each in enumerate((x, y))]
    for _ in range(3):
        for each in (x, y):
            each.copy_(torch.randn(700))
        Host().together([Device([launch for _, launch in of]) for of in made])
        check([[out for out, _ in of] for of in made], [(x, y)] * 2)
    assert ends.control[0][0] == 6


def gone(folder=KERNELS):
    """A peer that comes after the limit, twice: it gets the first sum, which is right, and never a second."""
    ends, calls = Ends(), [(payload(9001, torch.bfloat16), payload(9001, torch.bfloat16)) for _ in range(4)]
    made = [[ends.call(rank, both[rank], 300) for both in calls] for rank in range(2)]
    host = Host(folder=folder)
    host.together([Device([launch for _, launch in made[0]]), Device([made[1][0][1]], (0, FOREVER))])
    assert all(out.isnan().all() for out, _ in made[0])
    told = [failure(ends.control[0], 3e-7)]
    host.together([Device([], (0, FOREVER)), Device([launch for _, launch in made[1]])])
    first, *rest = [out for out, _ in made[1]]
    torch.testing.assert_close(first, (calls[0][0].float() + calls[0][1].float()).bfloat16(), rtol=0, atol=0)
    assert all(out.isnan().all() for out in rest)
    return [*told, failure(ends.control[1], 3e-7)]


def test_a_peer_that_is_gone():
    assert_expected_inline(
        "\n".join(gone()),
        """\
the peer's message 1 of channel 0 did not come within 3e-07 s
the peer's message 2 of channel 0 did not come within 3e-07 s""",
    )


def other_length(folder=KERNELS):
    ends = Ends()
    ((one,), (two,)) = run(ends, [(payload(5, torch.float32), payload(6, torch.float32))], folder=folder)
    assert one.isnan().all()
    assert two.isnan().all()
    return [failure(control, 1.0) for control in ends.control]


def test_a_peer_that_sums_something_else():
    assert_expected_inline(
        "\n".join(other_length()),
        """\
the peer's message 1 of channel 0 has 24 bytes, and this rank's 20
the peer's message 1 of channel 0 has 20 bytes, and this rank's 24""",
    )


def numbers(folder):
    calls = [(payload(4097, torch.bfloat16, 1), payload(4097, torch.bfloat16)) for _ in range(3)]
    check(run(Ends(), calls, folder=folder), calls)


def races(folder):
    calls = [(payload(3, torch.float32), payload(3, torch.float32)) for _ in range(3)]
    check(run(Ends(), calls, folder=folder, sanitizer="thread"), calls)


# name -> what stands in the text, what is planted in its place, what catches it. No fence is missed here: a CPU's stores
# are in order, so that "st.release" may be weakened unseen.
PLANTED = {
    "one slot for all messages": ("sequence % 2;", "0;", overtaken),
    "the slot of the message before": (
        "reinterpret_cast<const T*>(here.parts[slot]",
        "reinterpret_cast<const T*>(here.parts[1 - slot]",
        numbers,
    ),
    "the mark of the message before": ("mark = here.marks[slot]", "mark = here.marks[1 - slot]", gone),
    "any mark will do": ("!= sequence) {", "== 0) {", overtaken),
    "one's own message": ("others = load<VEC>(message + v", "others = load<VEC>(x + v", numbers),
    "a number that does not advance": ("      kept.sent[channel] = sequence;\n", "", overtaken),
    "a mark in front of its message": ("send<1, THREADS>(x, message, count);\n    __syncthreads();", "send<1, THREADS>(x, message, count);", races),
    "a tail left out": ("count; i += THREADS) out[i] = summed", "count - 1; i += THREADS) out[i] = summed", numbers),
    "another length taken": ("mark.bytes == bytes ?", "true ?", other_length),
    "a failure forgotten": ("load_acquire(&kept.failure) != FINE", "false", gone),
    "a failure known to one thread": ("failed = __syncthreads_or(failed);", "", gone),
}  # fmt: skip
USUAL = ("one slot for all messages", "a failure forgotten")


def planted(tmp_path, old, new):
    for path in (*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")):
        shutil.copy(path, tmp_path)
    text = (tmp_path / "one_shot_all_reduce.cu").read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times"
    (tmp_path / "one_shot_all_reduce.cu").write_text(text.replace(old, new))
    return tmp_path


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in USUAL else pytest.mark.verify) for n in PLANTED])
def test_a_planted_fault_is_caught(tmp_path, name):
    old, new, catches = PLANTED[name]
    with pytest.raises((AssertionError, KernelFault)):
        catches(planted(tmp_path, old, new))


@pytest.mark.verify
@pytest.mark.parametrize("sanitizer", ["address", "undefined", "thread"])
def test_sanitizers_are_silent(sanitizer):
    calls = [(payload(9001, torch.bfloat16, 1), payload(9001, torch.bfloat16)) for _ in range(3)]
    check(run(Ends(), calls, sanitizer=sanitizer), calls)
    run(Ends(), calls[:1], sleeps=((0, 0), (0, FOREVER)), limit=300, sanitizer=sanitizer)


@pytest.mark.verify
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_payload(dtype):
    n = CAP_BYTES // dtype.itemsize
    calls = [(payload(n - i, dtype), payload(n - i, dtype)) for i in range(2)]
    for each in calls:
        check(run(Ends(), [each]), [each])


def test_bad_arguments():
    x, control = torch.zeros(4), Ends().control[0]
    cases = [
        (x.double(), control, 0, 0, 0, 1),
        (torch.zeros(CAP_BYTES // 4 + 1), control, 0, 0, 0, 1),
        (x.view(2, 2), control, 0, 0, 0, 1),
        (x[::2], control, 0, 0, 0, 1),
        (x, control, 0, 0, 2, 1),
        (x, control.to("meta"), 0, 0, 0, 1),
        (x, control[1:], 0, 0, 0, 1),
        (x, control.int(), 0, 0, 0, 1),
        (x.clone().requires_grad_(), control, 0, 0, 0, 1),
    ]
    lines = []
    for args in cases:
        with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
            OP.run(lambda launch: None, *args)
        lines.append(str(error.value))
    assert_expected_inline(
        "\n".join(lines),
        """\
one_shot_all_reduce(x=...): no float64
    fix: the all-reduce of torch.distributed
one_shot_all_reduce(x=...): 1,048,580 bytes, 1,048,576 at most
    fix: the all-reduce of torch.distributed
one_shot_all_reduce(x=...): (2, 2) with strides (2, 1), and one row without gaps is needed
    fix: x.contiguous().view(-1)
one_shot_all_reduce(x=...): (2,) with strides (2,), and one row without gaps is needed
    fix: x.contiguous().view(-1)
one_shot_all_reduce(rank=2): 0 or 1
one_shot_all_reduce(control=...): it is on meta, and x on cpu
    fix: control.to("cpu")
one_shot_all_reduce(control=...): (36,) of torch.int64
    fix: control_for(device)
one_shot_all_reduce(control=...): (37,) of torch.int32
    fix: control_for(device)
one_shot_all_reduce(x=...): it needs a gradient, and control is written in place
    fix: torch.no_grad(), or the plain function to train""",
    )
