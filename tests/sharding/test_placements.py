"""Specs as DTensor's placements: the same shards where DTensor can say it, and the reason where it cannot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from meshfn.sharding import Mesh, Spec, SpecError
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def device_mesh(mesh: Mesh, rank: int = 0, *, named: bool = True) -> Iterator[DeviceMesh]:
    """A device mesh as one of many ranks sees it, alone: the fake backend moves nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.size)
    try:
        names = tuple(name for name, _ in mesh.axes) if named else None
        yield init_device_mesh("cpu", tuple(n for _, n in mesh.axes), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def _placed(spec: str, mesh: Mesh, **sizes: int) -> tuple:
    with device_mesh(mesh) as devices:
        return Spec.parse(spec).placements(devices, **sizes)


FOUR = Mesh(g=2, u=2)


def test_each_axis_says_what_it_does():
    assert _placed("B S/u D +g", FOUR, S=8) == (Partial("sum"), Shard(1))
    assert _placed("B S D", FOUR) == (Replicate(), Replicate())
    assert _placed("B S/g/u D", FOUR, S=8) == (Shard(1), Shard(1))
    assert _placed("B/u S/g D", FOUR, S=8, B=2) == (Shard(1), Shard(0))
    assert _placed("(K/u G) S/cp ...", FOUR, K=4, S=3) == (Replicate(), Shard(0))
    assert _placed("... S", FOUR) == (Replicate(), Replicate())


def test_axes_of_one_rank_ask_nothing():
    mesh = Mesh(cp=1, g=2)
    assert _placed("S/cp:zigzag D", mesh, S=6, D=3) == (Shard(0), Replicate())
    assert _placed("S/g/cp D", mesh, S=6) == (Shard(0), Shard(0))
    assert _placed("(K G/cp) D", mesh, G=3) == (Shard(0), Replicate())


SPECS = ("A/g B", "A/u B", "A/g/u B", "A/g B/u", "A/u B/g", "A B/g/u", "(A/g C) B/u", "(A/g/u C) B", "A/g B +u", "A B")


@pytest.mark.parametrize("mesh", [FOUR, Mesh(g=3, u=2), Mesh(g=2, u=4), Mesh(dp=2, g=1, u=3)], ids=str)
def test_shards_are_those_of_dtensor_wherever_it_is_not_refused(mesh):
    said = refused = 0
    sizes = [{"A": a, "B": b, "C": 2} for a in (0, 1, 2, 3, 5, 6, 8, 12, 24) for b in (4, 5, 6)]
    for rank in range(mesh.size):
        with device_mesh(mesh, rank) as devices:
            for text, n in itertools.product(SPECS, sizes):
                spec = Spec.parse(text)
                try:
                    placements = spec.placements(devices, **n)
                except SpecError:
                    refused += 1
                    continue
                said += 1
                shape = (n["A"] * (n["C"] if "C" in text else 1), n["B"])
                x = torch.arange(shape[0] * shape[1]).reshape(shape)
                # A whole tensor is no pending sum to DTensor: each of the addends lies as a copy would.
                whole = [Replicate() if p.is_partial() else p for p in placements]
                local = distribute_tensor(x, devices, whole, src_data_rank=None).to_local()
                assert torch.equal(local, x[spec.slices(n, mesh, rank)]), (text, n, rank)
                assert local.shape == spec.local(n, mesh, rank)
    assert said > 60 * mesh.size
    assert refused > 20 * mesh.size


def _refusal(spec, mesh, *, named=True, **sizes):
    with device_mesh(mesh, named=named) as devices, pytest.raises(SpecError) as e:
        Spec.parse(spec).placements(devices, **sizes)
    return str(e.value)


def test_uneven_shards():
    assert_expected_inline(
        _refusal("B S/u D", Mesh(u=4), S=6),
        """\
DTensor has no placement for this: S=6 over u=4 is [2, 2, 1, 1] here, and [2, 2, 2, 0] there
    B S/u D
      ^^^
    mesh: u=4     sizes: S=6     fix: pad S to 8""",
    )


def test_uneven_pieces():
    assert_expected_inline(
        _refusal("B S/g/u D", Mesh(g=2, u=4), S=12),
        """\
DTensor has no placement for this: a piece of 6 S over u=4 is [2, 2, 1, 1] here, and [2, 2, 2, 0] there
    B S/g/u D
      ^^^^^
    mesh: g=2 u=4     sizes: S=12     fix: pad S to 16""",
    )


def test_head_tail_order():
    assert_expected_inline(
        _refusal("B S/u:zigzag D", Mesh(u=4), S=16),
        """\
DTensor has no placement for this: S lies in head-tail order
    B S/u:zigzag D
      ^^^^^^^^^^
    mesh: u=4     sizes: S=16     fix: S/u, without the order""",
    )


def test_heads_that_several_need():
    assert_expected_inline(
        _refusal("B K@H/u E", Mesh(u=4), H=12, K=3),
        """\
DTensor has no placement for this: K is held as H need it, by several ranks
    B K@H/u E
      ^^^^^
    mesh: u=4     sizes: H=12 K=3 G=4     fix: a plain K/u, or Replicate""",
    )


def test_inner_factors():
    assert_expected_inline(
        _refusal("B (K G/u) E", Mesh(u=4), G=4),
        """\
DTensor has no placement for this: G is an inner factor of (K G)
    B (K G/u) E
         ^^^
    mesh: u=4     sizes: G=4     fix: split the dimension, or shard K""",
    )


def test_a_leading_factor_that_is_uneven():
    assert_expected_inline(
        _refusal("B (K/u G) E", FOUR, K=3, G=2),
        """\
DTensor has no placement for this: K=3 over u=2 is [2, 1] here, and DTensor would cut (K G) as one
    B (K/u G) E
       ^^^
    mesh: g=2 u=2     sizes: K=3 G=2 H=6     fix: pad K to 4""",
    )


def test_axes_in_another_order():
    assert_expected_inline(
        _refusal("B S/u/g D", FOUR, S=8),
        """\
DTensor has no placement for this: S is split by u first, and the device mesh has g before it
    B S/u/g D
      ^^^^^
    mesh: g=2 u=2     sizes: S=8     fix: S/g/u, or a device mesh of u, g""",
    )


def test_after_any_number_of_dimensions():
    assert_expected_inline(
        _refusal("... S/u D", FOUR, S=8),
        """\
DTensor has no placement for this: which dimension S is, after "...", is not known
    ... S/u D
        ^^^
    mesh: g=2 u=2     sizes: S=8     fix: a letter for each dimension in place of "...\"""",
    )


def test_an_axis_that_nobody_knows():
    assert_expected_inline(
        _refusal("B S/pd D", Mesh(dp=2, u=2), S=8),
        """\
no axis "pd"
    B S/pd D
        ^^
    mesh: dp=2 u=2     fix: did you mean "dp"?""",
    )


def test_a_missing_size():
    assert_expected_inline(
        _refusal("B S/u D", FOUR, B=8),
        """\
no size for S
    B S/u D
      ^^^
    mesh: g=2 u=2     sizes: B=8     fix: pass S=..., its global size""",
    )


def test_a_mesh_without_names():
    assert_expected_inline(
        _refusal("B S/u D", FOUR, named=False, S=8),
        """\
a device mesh of 2 2 ranks whose dimensions have no names, and a spec names axes
    B S/u D
    fix: init_device_mesh(..., mesh_dim_names=('dp', 'tp'))""",
    )
