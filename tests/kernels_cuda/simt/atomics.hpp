// Atomics, and loads and stores that say how they are cached, of what is aligned to its own size. Every atomic gives
// the other threads a turn first, so that what comes between two of them differs from order to order.
#pragma once
#include <cstring>
#include <type_traits>

#include "machine.hpp"

// TSan must see an atomic as one. Where the harness watches volatile accesses itself, nothing else is to be seen.
#if defined(SIMT_THREAD)
#define SIMT_ATOMIC
#else
#define SIMT_ATOMIC __attribute__((no_sanitize_thread))
#endif

namespace simt {

// Replace what is at p by what `with` makes of it, and return what was there.
template <class T, class F>
SIMT_ATOMIC T modify(const char* call, T* p, At at, F with) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8);
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
  access(call, p, sizeof(T), true, at);
  turn(call, at);
  auto bits = reinterpret_cast<Bits*>(p);
  Bits before = __atomic_load_n(bits, __ATOMIC_ACQUIRE), after;
  T old, made;
  do {
    std::memcpy(static_cast<void*>(&old), &before, sizeof old);
    made = with(old);
    std::memcpy(&after, static_cast<const void*>(&made), sizeof made);
  } while (!__atomic_compare_exchange_n(bits, &before, after, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  if (before != after) note_change();
  return old;
}

}  // namespace simt

#define SIMT_ATOMIC_OP(name, made)                                                 \
  template <class T>                                                               \
  T name(T* p, std::type_identity_t<T> value, simt::At at = simt::At::current()) { \
    return simt::modify(#name, p, at, [=](T old) -> T { return made; });           \
  }
SIMT_ATOMIC_OP(atomicAdd, old + value)
SIMT_ATOMIC_OP(atomicSub, old - value)
SIMT_ATOMIC_OP(atomicExch, value)
SIMT_ATOMIC_OP(atomicMin, value < old ? value : old)
SIMT_ATOMIC_OP(atomicMax, old < value ? value : old)
SIMT_ATOMIC_OP(atomicAnd, old & value)
SIMT_ATOMIC_OP(atomicOr, old | value)
SIMT_ATOMIC_OP(atomicXor, old ^ value)
SIMT_ATOMIC_OP(atomicInc, old >= value ? 0 : old + 1)
SIMT_ATOMIC_OP(atomicDec, old == 0 || old > value ? value : old - 1)
#undef SIMT_ATOMIC_OP

template <class T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> value, simt::At at = simt::At::current()) {
  return simt::modify("atomicCAS", p, at, [=](T old) { return old == expected ? value : old; });
}

#define SIMT_LOAD(name)                                   \
  template <class T>                                      \
  T name(const T* p, simt::At at = simt::At::current()) { \
    simt::access(#name, p, sizeof(T), false, at);         \
    return *p;                                            \
  }
SIMT_LOAD(__ldg)
SIMT_LOAD(__ldca)
SIMT_LOAD(__ldcg)
SIMT_LOAD(__ldcs)
SIMT_LOAD(__ldlu)
#undef SIMT_LOAD

#define SIMT_STORE(name)                                                              \
  template <class T>                                                                  \
  void name(T* p, std::type_identity_t<T> value, simt::At at = simt::At::current()) { \
    simt::access(#name, p, sizeof(T), true, at);                                      \
    *p = value;                                                                       \
  }
SIMT_STORE(__stcg)
SIMT_STORE(__stcs)
SIMT_STORE(__stwb)
SIMT_STORE(__stwt)
#undef SIMT_STORE
