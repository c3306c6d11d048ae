// The most likely of many logits, and the sum that makes a probability of it, put together from parts in any way.
#pragma once
#include "common.cuh"

constexpr float LOWEST = -3.402823466e38f;

// value: the largest. token: the lowest that has it. sum: of exp(x - value), or of exp(x - LOWEST) where the value is
// -inf, so 0 then. A NaN or +inf among the logits makes the sum a NaN, whatever the value.
struct Best {
  float value;
  int token;
  float sum;
};

__device__ __forceinline__ Best no_best() { return {-infinity(), 0x7fffffff, 0.f}; }

__device__ __forceinline__ void see(Best& best, float x, int token) {
  if (x > best.value) {
    best.sum *= expf(fmaxf(best.value, LOWEST) - x);
    best.value = x, best.token = token;
  } else if (x == best.value && token < best.token) {
    best.token = token;
  }
  best.sum += expf(x - fmaxf(best.value, LOWEST));
}

__device__ __forceinline__ Best merged(const Best& a, const Best& b) {
  const bool second = b.value > a.value || (b.value == a.value && b.token < a.token);
  const float value = second ? b.value : a.value, by = fmaxf(value, LOWEST);
  const float sum = a.sum * expf(fmaxf(a.value, LOWEST) - by) + b.sum * expf(fmaxf(b.value, LOWEST) - by);
  return {value, second ? b.token : a.token, sum};
}

// Of a warp, in every lane: both lanes of a pair compute the same sum.
__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const Best other = {__shfl_xor_sync(ALL_LANES, best.value, lanes), __shfl_xor_sync(ALL_LANES, best.token, lanes),
                        __shfl_xor_sync(ALL_LANES, best.sum, lanes)};
    best = merged(best, other);
  }
  return best;
}

// Of a block of WARPS warps, in every thread. `parts` may be used again after the next barrier.
template <int WARPS> __device__ __forceinline__ Best block_best(Best best, Best (&parts)[WARPS]) {
  best = warp_best(best);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = best;
  __syncthreads();
  best = parts[0];
#pragma unroll
  for (int w = 1; w < WARPS; w++) best = merged(best, parts[w]);
  return best;
}

// The log-probability of a token with a logit x; a NaN where the row is no distribution.
__device__ __forceinline__ float chance_of(float x, const Best& all) { return x - all.value - logf(all.sum); }

// Whether a token ends a row; of a whole warp.
__device__ __forceinline__ bool is_among(long long token, const long long* ends, int count) {
  bool found = false;
  for (int i = threadIdx.x % 32; i < count; i += 32) found |= ends[i] == token;
  return __any_sync(ALL_LANES, found);
}
