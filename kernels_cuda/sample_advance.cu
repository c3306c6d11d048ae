// The end of a step: the most likely token of each row, the lowest among equals, its log-probability, and whether the
// row goes on.                                                                            logits `B Z`, all else `B`
//
// Blocks share a row's vocabulary, as many of them as its size says, so that a row is the same in every batch; the last
// to arrive puts their parts together, in order. A row that is no distribution (a NaN or +inf in it, or nothing but
// -inf) gives token 0 and a NaN.
#include "best.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// VEC: numbers a load, at which every row begins.
template <class T, int VEC>
__global__ void __launch_bounds__(THREADS)
    sample_advance(const T* logits, long long logits_row, const long long* positions, long long positions_row,
                   const long long* ends, float* partial, unsigned* arrived, long long* token, float* logprob,
                   long long* after, int vocabulary, int share, int end_count) {
  constexpr int AHEAD = 4;
  __shared__ Best parts[WARPS];
  __shared__ bool last;
  griddep_launch();
  griddep_wait();
  const int row = blockIdx.y, tid = threadIdx.x, shares = gridDim.x;
  logits += row * logits_row;

  Best best = no_best();
  const int stop = min(vocabulary, (int)(blockIdx.x + 1) * share);
  for (int from = blockIdx.x * share + tid * VEC; from < stop; from += AHEAD * THREADS * VEC) {
    Vec<T, VEC> x[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      const int z = from + a * THREADS * VEC;
      if (z + VEC <= stop) {
        x[a] = load<VEC>(logits + z);
      } else {
#pragma unroll
        for (int j = 0; j < VEC; j++) x[a].at[j] = z + j < stop ? logits[z + j] : narrow<T>(0.f);
      }
    }
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      const int z = from + a * THREADS * VEC;
#pragma unroll
      for (int j = 0; j < VEC; j++) {
        if (z + j < stop) see(best, wide(x[a].at[j]), z + j);
      }
    }
  }
  best = block_best(best, parts);

  if (shares > 1) {
    float* here = partial + (long long)row * shares * 4;
    if (tid == 0) {
      store<4>(here + 4 * blockIdx.x, Vec<float, 4>{best.value, __int_as_float(best.token), best.sum, 0.f});
      __threadfence();
      last = atomicAdd(&arrived[row], 1u) == shares - 1;
      if (last) arrived[row] = 0;  // for the next launch
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    best = no_best();
    for (int s = tid % 32; s < shares; s += 32) {
      const float* part = here + 4 * s;
      best = merged(best, Best{__ldcg(part), __float_as_int(__ldcg(part + 1)), __ldcg(part + 2)});
    }
    best = warp_best(best);
  }
  if (tid >= 32) return;
  const float chance = chance_of(best.value, best);
  const bool none = chance != chance;
  const long long chosen = none ? 0 : best.token;
  const bool ended = is_among(chosen, ends, end_count) || none;
  if (tid == 0) {
    token[row] = chosen;
    logprob[row] = chance;
    after[row] = ended ? -1 : positions[row * positions_row];
  }
}
