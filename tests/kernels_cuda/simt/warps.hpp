// Operations of a warp: shuffles, votes, reductions, matches. The mask names every lane that makes the call.
#pragma once
#include <cstring>
#include <type_traits>

#include "machine.hpp"

#define SIMT_AT simt::At at = simt::At::current()

namespace simt {

template <class T>
uint64_t bits(T value) {
  static_assert(sizeof(T) <= 8, "a lane gives at most eight bytes");
  uint64_t result = 0;
  std::memcpy(&result, static_cast<const void*>(&value), sizeof value);
  return result;
}

template <class T>
T shuffle(const char* call, unsigned mask, T value, int source, int width, At at) {
  if (width < 1 || width > 32 || width & (width - 1))
    fault(call, at, "1, 2, 4, 8, 16 or 32", "a width of %d lanes", width);
  uint64_t taken = meet(Op::shuffle, call, mask, bits(value), source, at);
  std::memcpy(static_cast<void*>(&value), &taken, sizeof value);
  return value;
}

}  // namespace simt

inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_AT) {
  simt::meet(simt::Op::sync, "__syncwarp", mask, 0, 0, at);
}

// A lane beyond its own section of `width` lanes reads itself.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_AT) {
  return simt::shuffle("__shfl_sync", mask, value, (static_cast<int>(simt::lane) & -width) | (source & (width - 1)),
                       width, at);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_AT) {
  const int lane = static_cast<int>(simt::lane), source = lane - static_cast<int>(delta);
  return simt::shuffle("__shfl_up_sync", mask, value, source < (lane & -width) ? lane : source, width, at);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_AT) {
  const int lane = static_cast<int>(simt::lane), source = lane + static_cast<int>(delta);
  return simt::shuffle("__shfl_down_sync", mask, value, source >= (lane & -width) + width ? lane : source, width, at);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32, SIMT_AT) {
  const int lane = static_cast<int>(simt::lane), source = lane ^ with;
  return simt::shuffle("__shfl_xor_sync", mask, value, source >= (lane & -width) + width ? lane : source, width, at);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_AT) {
  return static_cast<unsigned>(simt::meet(simt::Op::ballot, "__ballot_sync", mask, predicate != 0, 0, at));
}
inline int __any_sync(unsigned mask, int predicate, SIMT_AT) {
  return static_cast<int>(simt::meet(simt::Op::any, "__any_sync", mask, predicate != 0, 0, at));
}
inline int __all_sync(unsigned mask, int predicate, SIMT_AT) {
  return static_cast<int>(simt::meet(simt::Op::all, "__all_sync", mask, predicate != 0, 0, at));
}
// Which lanes run together is promised to nobody: here it is none but the caller.
inline unsigned __activemask() { return 1u << simt::lane; }

template <class T>
unsigned __match_any_sync(unsigned mask, T value, SIMT_AT) {
  return static_cast<unsigned>(simt::meet(simt::Op::match_any, "__match_any_sync", mask, simt::bits(value), 0, at));
}

#define SIMT_REDUCE(name, T, op)                                                            \
  inline T name(unsigned mask, T value, SIMT_AT) {                                          \
    return static_cast<T>(simt::meet(simt::Op::op, #name, mask, simt::bits(value), 0, at)); \
  }
SIMT_REDUCE(__reduce_add_sync, unsigned, add)
SIMT_REDUCE(__reduce_add_sync, int, add)
SIMT_REDUCE(__reduce_min_sync, unsigned, min)
SIMT_REDUCE(__reduce_min_sync, int, min_signed)
SIMT_REDUCE(__reduce_max_sync, unsigned, max)
SIMT_REDUCE(__reduce_max_sync, int, max_signed)
SIMT_REDUCE(__reduce_and_sync, unsigned, band)
SIMT_REDUCE(__reduce_or_sync, unsigned, bor)
SIMT_REDUCE(__reduce_xor_sync, unsigned, bxor)
#undef SIMT_REDUCE
