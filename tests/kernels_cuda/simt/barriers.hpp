// Barriers of a block and of a grid, fences, clocks.
#pragma once
#include "machine.hpp"

inline void __syncthreads(simt::At at = simt::At::current()) {
  simt::barrier(simt::Vote::none, "__syncthreads", 0, at);
}
inline int __syncthreads_count(int predicate, simt::At at = simt::At::current()) {
  return simt::barrier(simt::Vote::count, "__syncthreads_count", predicate, at);
}
inline int __syncthreads_and(int predicate, simt::At at = simt::At::current()) {
  return simt::barrier(simt::Vote::all, "__syncthreads_and", predicate, at);
}
inline int __syncthreads_or(int predicate, simt::At at = simt::At::current()) {
  return simt::barrier(simt::Vote::any, "__syncthreads_or", predicate, at);
}

// Atomics and volatile accesses are in order here, so a fence has nothing to do: a missing one is not seen.
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

// A wait lets the others run. Clocks count what was asked of them: the same in every run.
inline void __nanosleep(unsigned, simt::At at = simt::At::current()) { simt::turn("__nanosleep", at); }
inline long long clock64() { return simt::tick(); }
