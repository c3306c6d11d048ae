from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F


def dense(x, head, labels, weights):
    each = torch.nn.functional.cross_entropy((x @ head.T).flatten(0, -2), labels.flatten(), reduction="none")
    return (each * weights.flatten()).sum()


@pytest.mark.parametrize("chunk", [1, 4, 7, 14, 100])
def test_equals_torch_with_gradients(chunk):
    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    head = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    labels, weights = torch.randint(0, 11, (2, 7)), torch.rand(2, 7, dtype=torch.float64)
    labels[0, 3] = labels[1, 0] = -100
    loss, total = F.cross_entropy(x, head, labels, weights, chunk=chunk)
    expected = dense(x, head, labels, weights)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(total, weights[labels != -100].sum())
    for got, want in zip(torch.autograd.grad(loss, (x, head)), torch.autograd.grad(expected, (x, head)), strict=True):
        torch.testing.assert_close(got, want)
    fn = lambda x, head: F.cross_entropy(x, head, labels, weights, chunk=chunk)[0]  # noqa: E731
    assert torch.autograd.gradgradcheck(fn, (x, head))


def test_sums_of_parts_are_the_whole():
    x, head, labels = torch.randn(9, 4), torch.randn(5, 4), torch.randint(0, 5, (9,))
    parts = [F.cross_entropy(x[i::3], head, labels[i::3]) for i in range(3)]
    loss, total = F.cross_entropy(x, head, labels)
    torch.testing.assert_close(sum(p[0] for p in parts), loss)
    assert sum(float(p[1]) for p in parts) == float(total) == 9


def test_transforms_and_compile():
    x, head, labels = torch.randn(3, 5, 4), torch.randn(7, 4), torch.randint(0, 7, (3, 5))
    fn = lambda x, head, labels: F.cross_entropy(x, head, labels, chunk=2)[0]  # noqa: E731
    rows = torch.stack([fn(x[i], head, labels[i]) for i in range(3)])
    torch.testing.assert_close(torch.vmap(fn, (0, None, 0))(x, head, labels), rows)
    grads = torch.vmap(torch.func.grad(fn, argnums=1), (0, None, 0))(x, head, labels)
    torch.testing.assert_close(grads.sum(0), torch.func.grad(fn, argnums=1)(x, head, labels))
    jacobian = torch.func.jacrev(lambda h: torch.stack([fn(x[i], h, labels[i]) for i in range(3)]))(head)
    torch.testing.assert_close(jacobian, grads)
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    x.requires_grad_()
    got, want = (torch.autograd.grad(f(x, head, labels), x)[0] for f in (compiled, fn))
    torch.testing.assert_close(got, want)


def test_half_precision_is_computed_in_single():
    x, head, labels = torch.randn(64, 16).bfloat16(), torch.randn(32, 16).bfloat16(), torch.randint(0, 32, (64,))
    loss, _ = F.cross_entropy(x, head, labels)
    assert loss.dtype == torch.float32
    exact = dense(x.double(), head.double(), labels, torch.ones(64, dtype=torch.float64))
    assert abs(loss.double() - exact) <= 2e-3 * exact


def test_nothing_to_learn_from():
    x, head = torch.randn(0, 4, requires_grad=True), torch.randn(5, 4)
    loss, total = F.cross_entropy(x, head, torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert float(loss.detach()) == float(total) == 0
    loss, total = F.cross_entropy(torch.randn(3, 4), head, torch.full((3,), -100))
    assert float(loss) == float(total) == 0
    x = torch.randn(3, 4)
    x[1] = torch.nan
    x.requires_grad_()
    head.requires_grad_()
    loss, _ = F.cross_entropy(x, head, torch.tensor([1, -100, 2]))
    loss.backward()
    assert bool(loss.isfinite() and x.grad.isfinite().all() and head.grad.isfinite().all())
    assert not bool(x.grad[1].any())


def test_errors():
    x, head, labels = torch.ones(2, 3, 4), torch.ones(5, 4), torch.zeros(2, 3, dtype=torch.int64)
    calls = [
        ((x, head, labels[:, :2]), {}),
        ((x, head, labels, torch.ones(6)), {}),
        ((x, torch.ones(5, 3), labels), {}),
        ((x, head, labels), {"chunk": 0}),
    ]
    texts = []
    for args, options in calls:
        with pytest.raises(ValueError, match="cross_entropy") as error:
            F.cross_entropy(*args, **options)
        texts.append(str(error.value))
    assert_expected_inline(
        "\n\n".join(texts),
        """\
cross_entropy: labels and weights must have x's shape without D
    x (2, 3, 4), labels (2, 2)

cross_entropy: labels and weights must have x's shape without D
    x (2, 3, 4), labels (2, 3), weights (6,)

cross_entropy(head=...): D is 4 in x but 3 in head
    x   : ... D = 2 3 4
    head: Z D = 5 3
                  ^
    so far: D=4 Z=5

cross_entropy(chunk=0): at least 1""",
    )
