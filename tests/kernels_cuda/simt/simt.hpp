// CUDA C++ on a CPU: what kernel text finds where nvcc's or NVRTC's own definitions would be.
//
// The text is compiled as C++20 by g++ with -fno-strict-aliasing (vector loads reinterpret pointers). bf16 and fp16 are
// those of the CUDA toolkit's own headers. Arithmetic is the host's: exp, rsqrt and the like differ from a GPU's in the
// last places, and nothing is contracted into an fma.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "machine.hpp"

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __grid_constant__
#undef __forceinline__
#undef __noinline__
#define __global__
#define __device__
#define __host__
#define __shared__ static  // shared.ld gathers them
#define __constant__ static const
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))

// Dynamic shared memory, exactly as long as the launch says.
#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(simt::dynamic_shared)

#define threadIdx (simt::thread_index)
#define blockIdx (simt::block_index)
#define blockDim (simt::block_dim)
#define gridDim (simt::grid_dim)
constexpr int warpSize = 32;

#undef assert
#define assert(what) \
  ((what) ? void() : simt::fault("assert", simt::At::current(), "what made it false", "%s does not hold", #what))
inline void __trap(simt::At at = simt::At::current()) {
  simt::fault("__trap", at, "what led here", "the kernel gave up");
}

#include "atomics.hpp"
#include "barriers.hpp"
#include "mathematics.hpp"
#include "warps.hpp"
