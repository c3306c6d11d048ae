from __future__ import annotations

import copy
import pickle

import optree
import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn.functional import tree
from meshfn.functional.tree import Tree, TreeError, dim, pytree, static
from torch import Tensor


class Cfg:
    sizes = {"D": 4, "F": 6}  # noqa: RUF012
    bias = True
    kind = "a"
    inner = None
    parts = ()


@pytree
class Leafy(Tree):
    w: Tensor = dim("F/tp D")
    b: Tensor | None = dim("F/tp", when="bias", initial=0.0)
    kind: str = static(default="a")


@pytree
class Nested(Tree):
    inner: Leafy | None = None
    parts: tuple[Leafy, ...]


class NestedCfg(Cfg):
    inner = Cfg()
    parts = (Cfg(), Cfg())


def test_three_constructors_share_one_structure():
    made, shapes = Nested.init(NestedCfg(), 0), Nested.abstract(NestedCfg())
    assert tree.structure(made) == tree.structure(shapes) == tree.structure(made.specs())
    assert [t.shape for t in tree.leaves(made)] == [t.shape for t in tree.leaves(shapes)]
    assert all(t.device.type == "meta" for t in tree.leaves(shapes))
    assert tree.paths(made.specs())[".parts[1].w"] == "F/tp D"
    assert_expected_inline(
        repr(made),
        """\
Nested (6 leaves)
    .inner.w     F D  6x4  float32
    .inner.b     F    6    float32
    .parts[0].w  F D  6x4  float32
    .parts[0].b  F    6    float32
    .parts[1].w  F D  6x4  float32
    .parts[1].b  F    6    float32""",
    )


def test_init_depends_on_seed_and_path_alone():
    a, b = Nested.init(NestedCfg(), 7), Nested.init(NestedCfg(), 7)
    assert all(map(torch.equal, tree.leaves(a), tree.leaves(b)))
    assert not torch.equal(a.parts[0].w, a.parts[1].w)
    assert not torch.equal(a.parts[0].w, Nested.init(NestedCfg(), 8).parts[0].w)
    assert torch.equal(a.parts[0].b, torch.zeros(6))
    with torch.device("meta"):
        torch.set_default_dtype(torch.float64)
        try:
            ambient = Nested.init(NestedCfg(), 7)
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, tree.leaves(a), tree.leaves(ambient)))


def test_both_registries_take_it():
    params = Nested.init(NestedCfg(), 0)
    double = tree.map(lambda t: 2 * t, params)
    assert isinstance(double, Nested)
    other = optree.tree_map(lambda t: 2 * t, params, namespace="meshfn")
    assert isinstance(other, Nested)
    assert all(map(torch.equal, tree.leaves(double), tree.leaves(other)))
    accessors = optree.tree_accessors(params, namespace="meshfn")
    assert accessors[2].codify("p") == "p.parts[0].w"


def test_absent_leaves_and_statics_belong_to_the_definition():
    bare = Leafy(w=torch.ones(6, 4))
    assert list(tree.paths(bare)) == [".w"]
    assert tree.structure(bare) != tree.structure(Leafy(w=torch.ones(6, 4), kind="b"))
    assert tree.map(lambda t: t, bare).b is None


def test_copies_and_pickles():
    params = Nested.init(NestedCfg(), 0)
    for again in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert all(map(torch.equal, tree.leaves(params), tree.leaves(again)))


def test_grad_returns_the_class_and_compile_does_not_repeat():
    def loss(p: Nested) -> Tensor:
        return sum((x.w @ x.w.mT).sum() + x.b.sum() for x in p.parts)  # type: ignore[misc]

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for seed in range(3):
        params = Nested.init(NestedCfg(), seed)
        torch.testing.assert_close(compiled(params), loss(params))
    assert len(graphs) == 1
    grads = torch.func.grad(loss)(params)
    assert isinstance(grads, Nested)
    assert torch.equal(grads.parts[1].b, torch.ones(6))


def test_trainable_lists_bases_once():
    fused = torch.nn.Parameter(torch.randn(12, 4))
    tied = torch.nn.Parameter(torch.randn(6, 4))
    params = Nested(parts=(Leafy(w=fused[:6]), Leafy(w=fused[6:]), Leafy(w=tied), Leafy(w=tied)))
    found = tree.trainable(params)
    assert [id(t) for t in found] == [id(fused), id(tied)]
    cut = torch.randn(12, 4)[:6].requires_grad_()
    assert tree.trainable(Leafy(w=cut))[0] is cut, "a leaf of autograd trains by itself, whatever it was cut from"
    tree.leaves(tree.map(lambda t: t.sum(), params))[1].backward()
    assert fused.grad is not None


def test_errors_name_paths():
    params = Nested.init(NestedCfg(), 0)
    wrong = tree.replace(params, {".parts[1].w": torch.ones(6, 5), ".inner.b": 3})
    with pytest.raises(TreeError) as error:
        tree.check(wrong, Nested.abstract(NestedCfg()))
    assert_expected_inline(
        str(error.value),
        """\
params do not match in 2 leaves
    .inner.b: a tensor is needed, not int
    .parts[1].w: "F/tp D" = (6, 4), but the tensor has (6, 5)""",
    )
    with pytest.raises(TreeError) as error:
        tree.check(Nested(parts=(Leafy(w=torch.ones(6, 4)),)), Nested.abstract(NestedCfg()))
    assert_expected_inline(
        str(error.value),
        """\
params do not match in 5 leaves
    .inner.w: missing, "F/tp D" = (6, 4)
    .inner.b: missing, "F/tp" = (6,)
    .parts[0].b: missing, "F/tp" = (6,)
    .parts[1].w: missing, "F/tp D" = (6, 4)
    .parts[1].b: missing, "F/tp" = (6,)""",
    )
    with pytest.raises(TreeError) as error:
        tree.map(torch.add, params, Nested(parts=params.parts))
    assert_expected_inline(
        str(error.value),
        """\
trees of one structure are needed
    .inner.w: only in the first tree
    .inner.b: only in the first tree""",
    )
    with pytest.raises(TreeError) as error:
        tree.replace(params, {".parts[2].w": torch.ones(1)})
    assert_expected_inline(
        str(error.value),
        """\
no leaf at .parts[2].w
    paths: .inner.w, .inner.b, .parts[0].w, .parts[0].b, .parts[1].w, .parts[1].b""",
    )


def test_bad_declarations_are_refused():
    with pytest.raises(ValueError, match="never closed"):
        dim("(K E D")
    with pytest.raises(TypeError, match="must derive from Tree"):
        pytree(type("Plain", (), {}))

    @pytree
    class Unbound(Tree):
        w: Tensor = dim("Q D")

    with pytest.raises(F.ShapeError, match="no size for Q"):
        Unbound.abstract(Cfg())
