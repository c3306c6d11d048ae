// What two GPUs say to each other through memory of one that the other has mapped.
#pragma once
#include "common.cuh"

#ifdef __CUDACC__
// A store that whoever sees it sees everything before it too, on whatever device: what this thread wrote, and what
// others of its block wrote in front of their last barrier. And the load that sees it so.
__device__ __forceinline__ void store_release(unsigned long long* p, unsigned long long value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* p) {
  unsigned long long value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}

// A clock that runs at the same pace whatever the device does.
__device__ __forceinline__ long long nanoseconds() {
  long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
#else
// Volatile accesses are in order here, let the others run, and tell TSan what they order.
__device__ inline void store_release(unsigned long long* p, unsigned long long value) {
  *static_cast<volatile unsigned long long*>(p) = value;
}
__device__ inline unsigned long long load_acquire(const unsigned long long* p) {
  return *static_cast<const volatile unsigned long long*>(p);
}

// Counts how often it was asked.
__device__ inline long long nanoseconds() { return clock64(); }
#endif
