// A threshold among a row's scores, without sorting them: digit by digit, from how much each value of a digit has.
#pragma once
#include "common.cuh"

typedef unsigned long long u64;

constexpr int BINS = 2048;

// Integers in the order of the numbers, both zeros being one.
__device__ __forceinline__ unsigned key_of(float x) {
  const unsigned bits = __float_as_uint(x + 0.f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float of_key(unsigned key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// In shared memory: how much each value of a digit has; the digit that was found, and what lies below it.
struct Digits {
  u64 bins[BINS], below;
  unsigned digit;
};

// The key at which the sum of `amount` over keys, from the lowest on, first exceeds `limit`, which is below the whole;
// and the sum below it.
template <int THREADS, class Amount>
__device__ __forceinline__ unsigned threshold(Digits& digits, const float* scores, int begin, int stop, u64 limit,
                                              u64& below, const Amount& amount) {
  const int tid = threadIdx.x, lane = tid % 32;
  unsigned prefix = 0;
  below = 0;
#pragma unroll
  for (int digit = 0; digit < 3; digit++) {
    const int shift = digit ? 20 - 10 * digit : 21;
    const int width = shift ? 11 : 10;
    for (int i = tid; i < BINS; i += THREADS) digits.bins[i] = 0;
    __syncthreads();
    for (int z = begin + lane; z < stop; z += 32) {
      const float x = scores[z];
      const unsigned key = key_of(x);
      if (shift == 21 || key >> (shift + width) == prefix) {
        const u64 n = amount(x, key);
        if (n) atomicAdd(&digits.bins[key >> shift & ((1u << width) - 1)], n);
      }
    }
    __syncthreads();
    if (tid < 32) {
      constexpr int EACH = BINS / 32;
      u64 mine = 0;
      for (int i = 0; i < EACH; i++) mine += digits.bins[lane * EACH + i];
      u64 up_to = mine;
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const u64 other = __shfl_up_sync(ALL_LANES, up_to, lanes);
        if (lane >= lanes) up_to += other;
      }
      const unsigned over = __ballot_sync(ALL_LANES, below + up_to > limit);
      if (lane == __ffs(over) - 1) {
        u64 sum = below + up_to - mine;
        int bin = lane * EACH;
        while (sum + digits.bins[bin] <= limit) sum += digits.bins[bin++];
        digits.digit = bin, digits.below = sum;
      }
    }
    __syncthreads();
    prefix = prefix << width | digits.digit;
    below = digits.below;
  }
  return prefix;
}
