// Faults, each in a function of its own: test_simt.py has them run and sees them caught at the line where they stand.
#include <cooperative_groups.h>

#include "simt.hpp"

constexpr unsigned all_lanes = 0xffffffffu;

__device__ void some_exit() {
  if (threadIdx.x < 40) __syncthreads();
}
__device__ void other_barrier() {
  if (threadIdx.x < 40)
    __syncthreads();
  else
    __syncthreads();
}
__device__ void barrier_in_a_shuffle(float* y) {
  if (threadIdx.x == 7) __syncthreads();
  y[threadIdx.x] = __shfl_xor_sync(all_lanes, 1.0f, 1);
}
__device__ void not_in_mask(float* y) { y[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, 1.0f, 1); }
__device__ void lane_outside_mask(float* y) {
  if (threadIdx.x < 16) y[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, 20);
}
__device__ void lane_beyond_block(float* y) { y[threadIdx.x] = __shfl_down_sync(all_lanes, 1.0f, 1); }
__device__ void lanes_exited(float* y) {
  if (threadIdx.x % 32 >= 16) return;
  y[threadIdx.x] = __shfl_xor_sync(all_lanes, 1.0f, 1);
}
__device__ void masks_overlap() {
  if (threadIdx.x < 16)
    __syncwarp(0x000fffffu);
  else if (threadIdx.x < 32)
    __syncwarp(0xffff8000u);
}
__device__ void other_vote(float* y) {
  if (threadIdx.x >= 32) return;
  if (threadIdx.x % 2)
    y[0] = __any_sync(all_lanes, 1);
  else
    y[1] = __all_sync(all_lanes, 1);
}
__device__ void odd_width(float* y) { y[threadIdx.x] = __shfl_xor_sync(all_lanes, 1.0f, 1, 12); }
__device__ void misaligned_vector(float* y) { *reinterpret_cast<float4*>(y + 2) = make_float4(1, 2, 3, 4); }
__device__ void misaligned_load(float* y) { y[0] = __ldcs(reinterpret_cast<const float4*>(y + 1)).x; }
__device__ void misaligned_atomic(float* y) {
  atomicAdd(reinterpret_cast<unsigned*>(reinterpret_cast<char*>(y) + 2), 1u);
}
__device__ void null_pointer(float* nothing) { nothing[threadIdx.x] = 1.0f; }
__device__ void endless_atomic(float* y) {
  if (threadIdx.x == 3)
    while (atomicAdd(y, 0.0f) == 0.0f) {
    }
  __syncthreads();
}
__device__ void endless_volatile(volatile float* y) {
  while (y[1] == 0.0f) {
  }
}
__device__ void grid_sync_alone() { cooperative_groups::this_grid().sync(); }
__device__ void wrong_assertion(float* y) { assert(y[0] == 1.0f); }
__device__ void past_the_end(float* y, int n) { y[n + 3] = y[0]; }
__device__ void atomic_before_the_start(float* y) { atomicAdd(y - 2, 1.0f); }
__device__ void cached_past_the_end(float* y, int n) { y[0] = __ldg(y + n); }
__device__ void past_shared(int n) {
  DYNAMIC_SHARED(float, tile);
  tile[n] = 1.0f;
}
__device__ void large_frame(float* y, int n) {
  float values[40000];
  for (int i = 0; i < 40000; i++) values[i] = y[i % n];
  y[0] = values[static_cast<int>(y[1])];
}

__global__ void faulty(int which, float* y, float* nothing, int n) {
  switch (which) {
    case 0: return some_exit();
    case 1: return other_barrier();
    case 2: return barrier_in_a_shuffle(y);
    case 3: return not_in_mask(y);
    case 4: return lane_outside_mask(y);
    case 5: return lane_beyond_block(y);
    case 6: return lanes_exited(y);
    case 7: return masks_overlap();
    case 8: return other_vote(y);
    case 9: return odd_width(y);
    case 10: return misaligned_vector(y);
    case 11: return misaligned_load(y);
    case 12: return misaligned_atomic(y);
    case 13: return null_pointer(nothing);
    case 14: return endless_atomic(y);
    case 15: return endless_volatile(y);
    case 16: return grid_sync_alone();
    case 17: return wrong_assertion(y);
    case 18: return past_the_end(y, n);
    case 19: return atomic_before_the_start(y);
    case 20: return cached_past_the_end(y, n);
    case 21: return past_shared(n);
    case 22: return large_frame(y, n);
  }
  y[threadIdx.x] += 1.0f;
}

__global__ void too_much_declared(float* y) {
  __shared__ float tile[48 * 256 + 1];
  tile[threadIdx.x] = 1.0f;
  __syncthreads();
  y[threadIdx.x] = tile[0];
}

__global__ void writes_const(const float* x, float* y) { const_cast<float*>(x)[threadIdx.x] = y[threadIdx.x]; }
