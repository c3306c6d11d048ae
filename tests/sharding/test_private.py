"""The private torch interfaces that sharding leans on do what is said of them; a release that moves one fails here."""

from __future__ import annotations

import threading

import torch
from meshfn.sharding import functorch, moves
from meshfn.sharding.meter import Meter


def test_a_transform_is_seen_from_inside_alone():
    seen = []
    torch.func.grad(lambda x: (seen.append((functorch.transform_level(), functorch.is_wrapped(x))), x.sum())[1])(
        torch.ones(2)
    )
    assert seen == [(1, True)]
    assert not functorch.transform_level()
    assert not functorch.is_wrapped(torch.ones(2, requires_grad=True))


def test_another_thread_is_outside_of_the_transform():
    """Which is why a tensor of it counts as a constant there, and must be refused."""
    seen = []

    def loss(x):
        def other():
            seen.append(functorch.transform_level())
            with functorch.Guarded():
                try:
                    x * 2
                except ValueError as error:
                    seen.append("its gradient would be lost" in str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(10)
        return x.sum()

    torch.func.grad(loss)(torch.ones(2))
    assert seen == [0, True]


def test_a_rank_may_have_transforms_of_its_own():
    with functorch.Guarded():
        assert torch.func.grad(lambda x: (x * x).sum())(torch.ones(2)).tolist() == [2, 2]
        assert torch.vmap(lambda x: x * 2)(torch.ones(2)).tolist() == [2, 2]


def test_what_plans_are_marked_with_is_what_torch_marks_constants_with():
    marked = torch.compiler.assume_constant_result(lambda: None)
    assert all(vars(marked).items() <= vars(fn).items() for fn in (moves.reads, moves.move))


def test_the_functional_collectives_have_the_signatures_that_are_called():
    import torch.distributed._functional_collectives

    found = {
        name: str(getattr(torch.ops._c10d_functional, name).default._schema).split("(")[1].split(")")[0]
        for name in (
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "all_to_all_single",
            "all_reduce",
            "wait_tensor",
        )
    }
    arguments = {name: [word.split()[-1] for word in text.split(",")] for name, text in found.items()}
    assert arguments == {
        "all_gather_into_tensor": ["input", "group_size", "group_name"],
        "reduce_scatter_tensor": ["input", "reduce_op", "group_size", "group_name"],
        "all_to_all_single": ["input", "output_split_sizes", "input_split_sizes", "group_name"],
        "all_reduce": ["input", "reduce_op", "group_name"],
        "wait_tensor": ["tensor"],
    }


def test_a_mode_sees_what_backward_makes_and_when_memory_is_given_back():
    seen = []
    x = torch.empty(3, device="meta", requires_grad=True)
    with Meter(lambda: 0, [x], []) as meter:
        y = x.exp().exp()  # the first is kept for backward
        seen.append(meter.found[-1])
        (g,) = torch.autograd.grad(y, x, torch.empty(3, device="meta"))
        del y, g
        torch.empty(3, device="meta")
        seen.append(meter.found[-1])
    assert seen == [(0, 36), (0, 24)]
