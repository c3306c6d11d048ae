"""What is joined computes what was written, and writes what that wrote; what cannot be joined is left alone."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshfn import functional as F
from meshfn.programs import Kernel, dynamo
from meshfn.programs.cuda import CUDA_KERNELS
from meshfn.programs.lower import lower
from meshfn.programs.sizes import Target

from .ops import host_ops

TARGET = Target("cuda", torch.float32, "sm_90")
D = 8
ROW, FEW, MANY, SQUARE = (D,), (3, D), (9, D), (D, D)


def in_place(x, h, w):
    x += F.linear(h, w)
    return x.tanh()


def of_another_name(x, h, w):
    x = x * 2
    before = x
    x += F.linear(h, w)
    return before


def written_after_the_product(x, h, w):
    y = F.linear(h, w)
    h[0] = 3
    return x + y


def written_after_the_product_by_a_view(x, h, w):
    y = F.linear(h, w)
    h[1:].mul_(2)
    return x + y


def written_after_the_sum(x, h, w):
    total = x + h
    doubled = total * 2
    total.mul_(3)
    return F.normalize(total, w), doubled


def another_written_after_the_sum(x, h, w, other):
    total = x + h
    other.copy_(total)
    return F.normalize(total, w), total


def weight_computed_after_the_sum(x, h, w):
    total = x + h
    return F.normalize(total, 1 + w), total


# what is written -> function, shapes of its arguments, joined or not
CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], str | None]] = {
    "a residual": (lambda x, h, w: x + F.linear(h, w), [FEW, FEW, SQUARE], "linear_add"),
    "with a bias": (lambda x, h, w, b: (F.linear(h, w) + b) + x, [FEW, FEW, SQUARE, ROW], "linear_add"),
    "by keywords": (
        lambda x, h, w: torch.tanh(x) + F.norm_linear(h, None, weights=[w], biases=[None])[0],
        [FEW, FEW, SQUARE],
        "linear_add",
    ),
    "the product twice": (lambda h, w: (lambda y: y + y)(F.linear(h, w)), [FEW, SQUARE], None),
    "the product returned": (lambda x, h, w: (lambda y: (x + y, y))(F.linear(h, w)), [FEW, FEW, SQUARE], None),
    "a number": (lambda h, w: F.linear(h, w) + 1.5, [FEW, SQUARE], None),
    "alpha": (lambda x, h, w: torch.add(x, F.linear(h, w), alpha=2), [FEW, FEW, SQUARE], None),
    "one product for all residuals": (lambda x, h, w: x + F.linear(h, w), [FEW, (1, D), SQUARE], None),
    "residuals of more ranks": (lambda x, h, w: x + F.linear(h, w), [(2, *FEW), FEW, SQUARE], None),
    "one residual for all": (lambda x, h, w: x + F.linear(h, w), [(1, D), FEW, SQUARE], None),
    "a bias of one number": (lambda x, h, w, b: x + (F.linear(h, w) + b), [FEW, FEW, SQUARE, (1,)], None),
    "a product of one number": (lambda x, h, w, b: x + (F.linear(h, w) + b), [FEW, FEW, (1, D), ROW], None),
    "in place": (in_place, [FEW, FEW, SQUARE], None),
    "in place, under another name": (of_another_name, [FEW, FEW, SQUARE], None),
    "written after the product": (written_after_the_product, [FEW, FEW, SQUARE], None),
    "written by a view": (written_after_the_product_by_a_view, [FEW, FEW, SQUARE], None),
    "a norm": (lambda x, h, w: F.normalize(x + h, w), [MANY, MANY, ROW], "add_norm"),
    "a norm by keywords": (lambda x, h, w: F.normalize(weight=w, x=x + h), [MANY, MANY, ROW], "add_norm"),
    "a product by keywords": (
        lambda x, h, w, v: F.norm_linear(weights=[v], x=x + h, biases=[None], norm_weight=w, eps=1e-3)[0],
        [MANY, MANY, ROW, SQUARE],
        "add_norm",
    ),
    "the sum as its own weight": (lambda x, h: (lambda y: F.normalize(y, y))(x + h), [ROW, ROW], None),
    "a weight computed later": (weight_computed_after_the_sum, [MANY, MANY, ROW], None),
    "the sum written": (written_after_the_sum, [MANY, MANY, ROW], None),
    "another tensor written": (another_written_after_the_sum, [MANY, MANY, ROW, MANY], "add_norm"),
}


def lowered(fn: Callable[..., Any], given: list[torch.Tensor], kernels=CUDA_KERNELS) -> torch.fx.GraphModule:
    module = dynamo.capture(fn, *given)
    lower(module, TARGET, kernels)
    module.graph.lint()
    return module


def joined_in(module: torch.fx.GraphModule) -> list[str]:
    names = [dynamo.op_name(node).partition("::")[2] for node in module.graph.nodes]
    return [name for name in names if name in ("linear_add", "add_norm")]


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_was_written(name):
    fn, shapes, joined = CASES[name]
    given, copies = [[torch.randn(*s, generator=torch.Generator().manual_seed(sum(s))) for s in shapes] for _ in "ab"]
    module = lowered(fn, given)
    assert joined_in(module) == ([] if joined is None else [joined])
    by_name = dict(zip(inspect.signature(fn).parameters, given, strict=True))
    with host_ops(), torch.no_grad():
        found = module(*(by_name[dynamo.source_of(node)] for node in module.graph.find_nodes(op="placeholder")))
    right = fn(*copies)
    torch.testing.assert_close(list(found), list(right) if isinstance(right, tuple) else [right])
    torch.testing.assert_close(given, copies)


@torch.library.custom_op("meshfn_test::mine", mutates_args=())
def mine(
    x: torch.Tensor, norm_weight: torch.Tensor | None, weights: list[torch.Tensor], biases: list[torch.Tensor | None]
) -> list[torch.Tensor]:
    return [F.linear(x, w) for w in weights]


@torch.library.custom_op("meshfn_test::my_sum", mutates_args=())
def my_sum(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear_add(x, weight, residual, bias)


def test_a_users_kernel_of_the_product_is_asked_first():
    fn, shapes, _ = CASES["a residual"]
    given = [torch.randn(*s) for s in shapes]
    product = Kernel("mine", "norm_linear", torch.ops.meshfn_test.mine.default)
    total = Kernel("my sum", "linear_add", torch.ops.meshfn_test.my_sum.default)
    for kernels, right in (
        ([product], ["meshfn_test.mine.default", "getitem", "add"]),
        ([total], ["meshfn_test.my_sum.default"]),
        ([total, product], ["meshfn_test.my_sum.default"]),
        ([product, total], ["meshfn_test.mine.default", "getitem", "add"]),
    ):
        graph = lowered(fn, given, (*kernels, *CUDA_KERNELS)).graph
        called = [node.target for node in graph.nodes if node.op == "call_function"]
        names = {operator.add: "add", operator.getitem: "getitem"}
        assert [names.get(target, str(target)) for target in called] == right


def test_two_norms_of_one_graph_have_names_of_their_own():
    def block(x, y, a, b):
        s = x + y
        n = F.normalize(s, a)
        t = s + n
        return F.normalize(t, b) + t

    given = [torch.empty(64, 1, 32, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    given += [torch.empty(32, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    module = dynamo.capture(block, *given)
    lower(module, Target("cuda", torch.bfloat16, "sm_90"), CUDA_KERNELS)
    module.graph.lint()
    assert sum(node.name.startswith("normed") for node in module.graph.nodes) == 2
