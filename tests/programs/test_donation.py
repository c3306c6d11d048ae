"""A step writes its tokens into the cache in place: nothing as large as a cache is made or copied."""

from __future__ import annotations

import torch
from meshfn import programs

from ..tiny import llama, ours


def largest_allocation(fn) -> int:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True, profile_memory=True
    ) as profile:
        fn()
    return max(e.cpu_memory_usage for e in profile.events())


def test_nothing_of_a_cache_s_size_is_allocated(tiny):
    state = tiny.program.prefill([[1, 2, 3]])
    whole = tiny.program.cache[0].k.numel() * 4
    assert whole == 3 * tiny.program.sizes.slots * 2 * 8 * 4
    addresses = [t.data_ptr() for c in tiny.program.cache for t in (c.k, c.v)]
    assert largest_allocation(lambda: tiny.program.decode(state)) < whole / 8
    assert largest_allocation(lambda: tiny.program.prefill([[1, 2, 3]])) < whole / 8
    assert addresses == [t.data_ptr() for c in tiny.program.cache for t in (c.k, c.v)]


def test_a_step_writes_one_slot_of_each_layer(tiny):
    state = tiny.program.prefill([[1, 2, 3]])
    for cache in tiny.program.cache:
        for t in (cache.k, cache.v):
            t[:, 3:] = torch.arange(t[:, 3:].numel()).view_as(t[:, 3:])
    before = [t.view(torch.int32).clone() for c in tiny.program.cache for t in (c.k, c.v)]
    tiny.program.decode(state)
    for old, new in zip(before, (t for c in tiny.program.cache for t in (c.k, c.v)), strict=True):
        changed = (old != new.view(torch.int32)).flatten(2).any(-1).any(0).nonzero()[:, 0].tolist()
        assert changed == [3]


def test_depth_adds_calls_and_no_regions():
    """What is traced and compiled for 12 layers is what is for the two of the golden graph."""
    program = programs.build(ours(llama(2, 1, layers=12)), max_len=32, chunk=8, compile=False)
    text = str(program.decode.graph)
    assert "layer_0   called 12 times" in text
    assert "layer_1" not in text
