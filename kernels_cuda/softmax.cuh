// Softmaxes that are taken part by part (Milakov and Gimelshein 2018, arXiv:1805.02867), and sums that lanes share.
#pragma once
#include "common.cuh"

constexpr float LOWEST = -3.402823466e38f;  // of a softmax that saw nothing

// Sums of N numbers over LANES neighbouring lanes, dealt out to these as far as they go: a lane keeps the sums
// first .. first + max(1, N / LANES) - 1 of those numbers. Each step sends half of what is left.
template <int N, int LANES> __device__ __forceinline__ void deal_sums(float (&x)[N], int& first) {
  const int lane = threadIdx.x % LANES;
  int left = N;
  first = 0;
#pragma unroll
  for (int apart = LANES / 2; apart > 0; apart /= 2) {
    const bool upper = lane & apart;
    if (left > 1) {
      left /= 2;
      if (upper) first += left;
#pragma unroll
      for (int i = 0; i < N / 2; i++) {
        if (i >= left) continue;
        const float sent = upper ? x[i] : x[i + left], kept = upper ? x[i + left] : x[i];
        x[i] = kept + __shfl_xor_sync(ALL_LANES, sent, apart);
      }
    } else {
      x[0] += __shfl_xor_sync(ALL_LANES, x[0], apart);
    }
  }
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, lanes));
  return x;
}

// A softmax so far: its highest score, and the sum of exp(score - highest).
struct Softmax {
  float highest, sum;
};

// Joins `count` softmaxes of each query, a warp a query: writes what each of them counts in the whole, and the whole.
template <int QUERIES, int WARPS, class Part>
__device__ __forceinline__ void join(int count, Part part, float* counts, Softmax* whole) {
  for (int i = threadIdx.x / 32; i < QUERIES; i += WARPS) {
    float highest = LOWEST, sum = 0.f;
    for (int p = threadIdx.x % 32; p < count; p += 32) highest = fmaxf(highest, part(p, i).highest);
    highest = warp_max(highest);
    for (int p = threadIdx.x % 32; p < count; p += 32) {
      const Softmax one = part(p, i);
      const float by = one.sum == 0.f ? 0.f : expf(one.highest - highest);
      counts[p * QUERIES + i] = by;
      sum = fmaf(by, one.sum, sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) whole[i] = {highest, sum};
  }
}
