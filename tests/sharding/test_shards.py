"""Who holds what: `Spec.local` and `Spec.slices` against numpy, cut by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from meshfn import sharding as sh

from .cases import held, make


def starts(spec, sizes, **axes):
    """The indices of a one-dimensional tensor that each rank holds."""
    mesh, x = sh.Mesh(**axes), torch.arange(next(iter(sizes.values())))
    return [x[sh.Spec.parse(spec).slices(sizes, mesh, rank)].tolist() for rank in range(mesh.size)]


def split(n, parts):
    return [part.tolist() for part in np.array_split(np.arange(n), parts)]


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_one_axis_is_balanced_and_the_first_ranks_hold_one_more(n, parts):
    assert starts("S/u", {"S": n}, u=parts) == split(n, parts)
    shapes = [sh.Spec.parse("S/u").local({"S": n}, sh.Mesh(u=parts), rank) for rank in range(parts)]
    assert shapes == [(len(part),) for part in split(n, parts)]


def test_nested_axes_split_major_to_minor():
    by_hand = [inner for outer in np.array_split(np.arange(13), 2) for inner in np.array_split(outer, 3)]
    assert starts("S/g/u", {"S": 13}, g=2, u=3) == [part.tolist() for part in by_hand]
    # [5 4 4] by u, each then in two; rank = (g, u) with u fastest
    assert [len(part) for part in starts("S/u/g", {"S": 13}, g=2, u=3)] == [3, 2, 2, 2, 2, 2]
    assert starts("S/u/g", {"S": 13}, g=2, u=3)[:2] == [[0, 1, 2], [5, 6]]


def test_head_tail_order():
    assert starts("S/cp:zigzag", {"S": 8}, cp=2) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert starts("S/cp:zigzag", {"S": 12}, cp=3) == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    # an axis inside splits what the outer one leaves, unevenly where it must
    assert starts("S/cp:zigzag/u", {"S": 12}, cp=2, u=4) == [
        [0, 1], [2, 9], [10], [11], [3, 4], [5, 6], [7], [8],
    ]  # fmt: skip
    assert starts("S/cp:zigzag", {"S": 0}, cp=2) == [[], []]


def test_key_value_heads_as_query_heads_need_them():
    assert starts("K@H/u", {"K": 3, "H": 12}, u=4) == [[0], [0, 1], [1, 2], [2]]
    assert starts("K@H/u", {"K": 3, "G": 4}, u=4) == [[0], [0, 1], [1, 2], [2]]
    assert starts("K@H/u", {"K": 1, "H": 2}, u=4) == [[0], [0], [], []]
    assert starts("K@H/g/u", {"K": 3, "H": 9}, g=2, u=2) == [[0], [1], [1, 2], [2]]
    assert starts("K@H/u", {"K": 0, "H": 0, "G": 2}, u=2) == [[], []]
    assert starts("K@H/u", {"K": 2, "G": 0}, u=2) == [[], []]


def test_factors_of_a_composite_dimension():
    whole = np.arange(3 * 4).reshape(3, 4)
    sizes, mesh = {"K": 3, "G": 4}, sh.Mesh(u=2, tp=2)
    x = torch.arange(12)
    for spec, cut in (
        ("(K/u G)", lambda u, tp: np.array_split(whole, 2, 0)[u]),
        ("(K G/u)", lambda u, tp: np.array_split(whole, 2, 1)[u]),
        ("(K/u G/tp)", lambda u, tp: np.array_split(np.array_split(whole, 2, 0)[u], 2, 1)[tp]),
        ("(K/u/tp G)", lambda u, tp: np.array_split(np.array_split(whole, 2, 0)[u], 2, 0)[tp]),
        ("(K G/u:zigzag)", lambda u, tp: whole[:, [0, 3] if u == 0 else [1, 2]]),
    ):
        for rank, (u, tp) in enumerate(itertools.product(range(2), repeat=2)):
            index = sh.Spec.parse(spec).slices(sizes, mesh, rank)
            assert x[index].tolist() == cut(u, tp).reshape(-1).tolist(), (spec, rank)
            assert sh.Spec.parse(spec).local(sizes, mesh, rank) == (cut(u, tp).size,)
    # the fault that started this: 6 query heads over 2 ranks follow 3 key/value heads, [4, 2] and not [3, 3]
    assert [sh.Spec.parse("(K/u G)").local({"H": 6, "K": 3}, sh.Mesh(u=2), r) for r in (0, 1)] == [(4,), (2,)]


def test_an_index_is_made_of_slices_where_it_can_be():
    spec, mesh = sh.Spec.parse("B/dp ... S/g D"), sh.Mesh(dp=2, g=2)
    assert spec.slices({"B": 3, "S": 5, "D": 4}, mesh, 1) == (slice(0, 2), ..., slice(3, 5), slice(0, 4))
    assert torch.zeros(3, 7, 9, 5, 4)[spec.slices({"B": 3, "S": 5, "D": 4}, mesh, 3)].shape == (1, 7, 9, 2, 4)
    x = torch.arange(48).view(3, 2, 8)
    index = sh.Spec.parse("... S/g:zigzag").slices({"S": 8}, mesh, 1)
    assert torch.equal(x[index], x[..., [2, 3, 4, 5]])
    index = sh.Spec.parse("S/g:zigzag ...").slices({"S": 8}, mesh, 0)
    assert torch.equal(x.movedim(-1, 0)[index], x.movedim(-1, 0)[[0, 1, 6, 7]])


def test_axes_that_are_not_named_and_axes_that_the_mesh_lacks_change_nothing():
    mesh = sh.Mesh(g=2, u=2)
    assert starts("S/u", {"S": 3}, g=2, u=2) == [[0, 1], [2], [0, 1], [2]]
    assert starts("S/tp", {"S": 3}, g=2) == [[0, 1, 2]] * 2
    assert sh.Spec.parse("").local({}, mesh, 3) == ()
    assert sh.Spec.parse("B S +u").local({"B": 2, "S": 3}, mesh, 3) == (2, 3)


def test_random_specs_hold_what_numpy_says_and_cover_the_tensor():
    kinds = set()
    for seed in range(150):
        case = make(seed)
        mesh = sh.Mesh(**case.axes)
        shape = [case.every[x] for dim in case.dims for x in dim]
        whole = np.arange(int(np.prod(shape))).reshape(shape)
        joined = torch.from_numpy(whole.reshape([int(np.prod([case.every[x] for x in d])) for d in case.dims]))
        for text, side in zip(case.pair.split("->"), (case.left, case.right), strict=True):
            spec, seen = sh.Spec.parse(text), set()
            for rank in range(mesh.size):
                shard = joined[spec.slices(case.every, mesh, rank)]
                assert tuple(shard.shape) == spec.local(case.every, mesh, rank)
                by_hand = whole[np.ix_(*held(case, side, mesh.coordinates(rank)))]
                assert np.array_equal(shard.numpy(), by_hand.reshape(shard.shape)), (text, rank)
                seen |= set(shard.reshape(-1).tolist())
            assert seen == set(whole.reshape(-1).tolist())
            kinds |= {mark for mark in side["marks"].values() if mark}
    assert kinds == {"@H", ":zigzag"}
