"""Programs over ranks that are processes, eager: tokens of one rank, arguments and weights that differ, and ranks that
end in the middle of a call or are slower than the limit: each of the others says in time for whom it waited, in which
exchange and in which step, and what was saved before is whole.

Functions above a test without `test_` in their name are its scenario, which every process runs (see `gloo`).
"""

from __future__ import annotations

import functools
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from meshfn import functional as F
from meshfn import programs
from meshfn import sharding as sh
from meshfn.programs import pair_sums

from ..kernels_cuda.two_gpus import FakeMemory, TwoGpus
from ..sharding import gloo
from . import test_rank_faults as faults
from . import test_ranks as ranks
from . import test_reading as reading

LIMIT = 2.0  # seconds of an exchange, where a rank is slower


@pytest.fixture(scope="module")
def four():
    return gloo.run(
        4, [tokens, read, differing, refused, weights, slow, saved, killed, left_behind], limit=240.0, fresh=True
    )


def tokens():
    """Whether a rank generates what one rank does, by the options of a call, and sends what its plan says."""
    found = []
    for i, axes in ((2, {"dp": 2, "tp": 2}), (1, {"tp": 4}), (8, {"tp": 4}), (6, {"ep": 2, "tp": 2})):
        layout, _, parts = ranks.CASES[i]
        of, record = ranks.made(parts), sh.trace(gloo.mesh_of(**axes))
        program, one = (
            ranks.build(of, layout, record.mesh, compile=False),
            programs.build(of, compile=False, **ranks.SIZES),
        )
        for options in ranks.OPTIONS:
            mine, whole = (p.generate(ranks.PROMPTS, max_new_tokens=12, **options) for p in (program, one))
            found.append(mine.tokens == whole.tokens)
        if "ep" not in axes:  # there only the router says what is sent
            state = program.prefill(ranks.PROMPTS)
            record.clear()
            program.decode(state)
            found.append(gloo.facts(record) == gloo.facts(program.plan.phases["decode"]))
    return found


def test_tokens_are_those_of_one_rank(four):
    for of_rank in four["tokens"]:
        assert of_rank == [True] * 23, of_rank


def read():
    """Whether prompts that are read with their tokens over ranks go on as one rank's."""
    found = []
    for case in ("heads become rows", "states by head"):
        of, record = ranks.made(reading.CASES[case][3]), sh.trace(gloo.mesh_of(**reading.CASES[case][2]))
        program, one = (
            reading.build(case, record.mesh, of, chunk=12),
            programs.build(of, compile=False, **reading.SIZES),
        )
        for options in reading.OPTIONS:
            mine, whole = (p.generate(reading.PROMPTS, max_new_tokens=12, **options) for p in (program, one))
            found.append(mine.tokens == whole.tokens)
    return found


def test_prompts_read_with_their_tokens_over_ranks(four):
    assert four["read"] == [[True] * 4] * 4


def differing():
    """What a rank says where the last was told something else; and that all go on."""
    layout, _, parts = ranks.CASES[0]
    program = ranks.build(ranks.made(parts), layout, gloo.mesh_of(dp=2, tp=2), compile=False)
    with pytest.raises(ValueError, match="told") as error:
        program.generate(ranks.PROMPTS, max_new_tokens=5 + (dist.get_rank() == 3))
    return str(error.value), program.generate(ranks.PROMPTS, max_new_tokens=5).lengths


def test_ranks_that_are_told_different_things(four):
    for said, lengths in four["differing"]:
        assert "max_new_tokens: 5 on rank 0, 1, 2; 6 on rank 3" in said
        assert lengths == [5] * 3


def refused():
    """What a plan says of sums over tp where every second rank has no memory to share, and what is left of the others'."""
    layout, _, parts = ranks.CASES[0]
    of, gpus, rank = ranks.made(parts), TwoGpus(), dist.get_rank()

    def memory_of(device):
        if rank % 2:
            raise RuntimeError("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY")
        return FakeMemory(gpus, rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_sums, "place_rule", lambda device: None)
        patch.setattr(pair_sums, "memory_of", memory_of)
        program = programs.build(
            of, mesh=gloo.mesh_of(dp=2, tp=2), layout=layout, batch=2, dtype=torch.float32, compile=False
        )
    return program.plan.sums, gpus.live


def test_two_ranks_link_or_neither_does(four):
    why = "rank 1 of the pair: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"
    line = f"over tp by the library's all-reduce (one_shot_all_reduce: {why})"
    assert four["refused"] == [(line, {})] * 4


def waits(fn):
    """What this rank is told of a peer, and after how many seconds."""
    start = time.monotonic()
    with pytest.raises(sh.TransportError) as error:
        fn()
    return str(error.value), time.monotonic() - start


def strikes(program, what, at):
    """At this step of decode, of this rank."""
    inner, left = program.decode.step, [at]

    def step(*args):
        left[0] -= 1
        if not left[0]:
            what()
        return inner(*args)

    program.decode.step = step


def weights():
    """Other weights on one process, when it is built and when they are set."""
    of, mesh = ranks.made(ranks.CASES[0][2]), gloo.mesh_of(dp=2, tp=2)
    other = faults.own(of)
    other.params.norm.weight.add_(mesh.rank == 3)
    said = [faults.refused(lambda: ranks.build(other, ranks.dense, mesh, compile=False))]
    program = ranks.build(of, ranks.dense, mesh, compile=False)
    if mesh.rank == 3:
        program.params = of.params
    said.append(faults.refused(lambda: program.generate(ranks.PROMPTS, max_new_tokens=3)))
    program.params = of.params
    return said, program.generate(ranks.PROMPTS, max_new_tokens=3).lengths


def test_other_weights(four):
    (first, *others) = four["weights"]
    assert others == [first] * 3
    assert ".norm.weight: rank 3 otherwise than rank 0" in first[0][0]
    assert "program.params was set on rank 3 alone" in first[0][1]
    assert first[1] == [3, 3, 3]


def slow():
    """Rank 1 sleeps in a step for longer than its group waits."""
    mesh = gloo.breakable(LIMIT, "tp")
    program = ranks.build(ranks.made(ranks.CASES[1][2]), ranks.dense, mesh, compile=False)
    if mesh.rank == 1:
        strikes(program, lambda: time.sleep(2 * LIMIT), 3)
    return waits(lambda: program.generate(ranks.PROMPTS, max_new_tokens=9))


def test_a_rank_slower_than_the_limit(four):
    for rank, (told, seconds) in enumerate(four["slow"]):
        peers = ", ".join(str(r) for r in range(4) if r != rank)
        assert f"rank {rank}: all-reduce over tp with rank {peers} failed: " in told
        assert told.endswith("during decode, step 3 after prefill")
        assert seconds < 10 * LIMIT


@functools.cache
def shared():
    """A folder that all processes have."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return Path(box[0])


def parts(value):
    """Of a tree over all processes, what this one has."""
    mesh = gloo.mesh_of(dp=2, tp=2)
    return {"a": torch.full((3, 4), value + mesh.rank)}, {"a": sh.Spec.parse("A/dp/tp B")}, mesh


def saved():
    """Twice, so that the first files are gone; and what one rank cannot save, none does."""
    tree, specs, mesh = parts(1.0)
    specs = {"a": sh.ports.Sized(specs["a"], {"A": 12, "B": 4})}
    for value in (5.0, 1.0):
        programs.save_shards({"a": tree["a"] - 1 + value}, specs, mesh, shared())
    wrong = {"a": tree["a"][:2]} if mesh.rank == 2 else tree
    with pytest.raises(ValueError, match=r"is \(2, 4\)|raised") as error:
        programs.save_shards(wrong, specs, mesh, shared())
    with pytest.raises(ValueError, match=r"no checkpoint|raised"):
        programs.restore_shards(tree, specs, mesh, shared() / ("nowhere" if mesh.rank == 2 else ""))
    back = programs.restore_shards({"a": torch.zeros(3, 4)}, specs, mesh, shared())["a"]
    return str(error.value), torch.equal(back, tree["a"]), len(list(shared().glob("*.distcp")))


def test_what_one_rank_cannot_save_none_does(four):
    for rank, (said, same, files) in enumerate(four["saved"]):
        assert said.startswith("['a'] is (2, 4)" if rank == 2 else "save_shards: rank 2 raised")
        assert same
        assert files == 4


def killed():
    """The last scenario of rank 3, which is killed in a step of decode. The others call on."""
    mesh = gloo.mesh_of(dp=2, tp=2)
    program = ranks.build(ranks.made(ranks.CASES[0][2]), ranks.dense, mesh, compile=False)
    if mesh.rank == 3:
        strikes(program, lambda: os.kill(os.getpid(), signal.SIGKILL), 3)
    return waits(lambda: program.generate(ranks.PROMPTS, max_new_tokens=9))


def left_behind():
    """What else is called without rank 3: another call, a checkpoint over the one that is there, a step of training."""
    tree, specs, mesh = parts(9.0)
    specs = {"a": sh.ports.Sized(specs["a"], {"A": 12, "B": 4})}
    cfg, params = ranks.model(*ranks.CASES[0][2])
    model = sh.shard(F.next_token_loss, ranks.dense, mesh, S=8)
    mine, ids = sh.cut(params, model.specs(params, cfg), mesh), torch.ones(1, 8, dtype=torch.int64)
    calls = [
        lambda: ranks.build(ranks.made(ranks.CASES[0][2]), ranks.dense, mesh, compile=False),
        lambda: programs.save_shards(tree, specs, mesh, shared()),
        lambda: programs.restore_shards(tree, specs, mesh, shared()),
        lambda: sh.sum_gradients(F.tree.map(torch.ones_like, mine), model.specs(params, cfg), mesh),
        lambda: model(mine, ids, cfg, ids)[0].backward(),  # which reaches rank 3 from rank 2 alone
    ]
    return [waits(fn) for fn in (calls if mesh.rank == 2 else calls[:-1])]


def test_a_rank_that_is_killed(four):
    assert four.failure("killed", 3) == "ended with exit code -9, in killed"
    for rank in range(3):
        told, seconds = four.alone("killed", rank)
        assert "a peer is gone, was slower than the time limit" in told
        assert seconds < 40
    told, _ = four.alone("killed", 2)  # the one that shares its products
    assert "rank 2: all-reduce over tp with rank 3 failed: " in told
    assert told.endswith("during decode, step 3 after prefill")


def test_what_is_called_without_it(four):
    for rank in range(3):
        found = four.alone("left_behind", rank)
        assert all(f"rank {rank}: " in told for told, _ in found), found
        assert all(seconds < 40 for _, seconds in found)
    assert "during the agreement of ranks on what build was told" in found[0][0]
    assert "during the agreement of ranks on what save_shards was told" in found[1][0]
