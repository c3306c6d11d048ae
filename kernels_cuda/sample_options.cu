// The end of a step with options: penalize, warp and draw, or take the largest; functional/sampling.py's `sample` says
// what each does.                                                              logits and counts `B Z`, all else `B`
//
// A block takes a row. Nothing is sorted: top_k and top_p each leave out the tokens below a threshold, which is found
// digit by digit from how many tokens, or how much probability, each value of a digit has. Probabilities are integers
// there, in units of 2^-40 of the largest, so that their sums are the same in any order. A warp has a stretch of the
// vocabulary, and reads only scores that it wrote. What is drawn is the first token at which the sum of weights, in the
// order of the vocabulary and in fp64, exceeds u of the whole.
#include "best.cuh"
#include "threshold.cuh"

constexpr float UNIT = 1099511627776.f;

// Philox4x32-10 (Salmon et al. 2011), of which two words make a number in [0, 1), as `uniform` does.
__device__ __forceinline__ double uniform(u64 seed, u64 counter) {
  unsigned a = counter, b = counter >> 32, c = 0, d = 0, k = seed, l = seed >> 32;
  for (int round = 0; round < 10; round++) {
    const unsigned a_high = __umulhi(a, 0xD2511F53u), a_low = a * 0xD2511F53u;
    const unsigned c_high = __umulhi(c, 0xCD9E8D57u), c_low = c * 0xCD9E8D57u;
    a = c_high ^ b ^ k, b = c_low, c = a_high ^ d ^ l, d = a_low;
    k += 0x9E3779B9u, l += 0xBB67AE85u;
  }
  return ((u64)(a >> 5) * (1u << 26) + (b >> 6)) * 0x1p-53;
}

__device__ __forceinline__ float below_top(float x, float top) { return x == top ? 1.f : expf(x - top); }
__device__ __forceinline__ double weight_of(float x, float top) { return x == top ? 1. : exp((double)x - (double)top); }

template <class N> __device__ __forceinline__ N lanes_sum(N x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(ALL_LANES, x, lanes);
  return x;
}

template <int WARPS> struct Row {
  Digits digits;
  Best bests[WARPS], largest[WARPS];
  double above[WARPS];
  int ties[WARPS];
  int warp, dropped, token;  // the stretch that the token is in, and how many ties of it are left out
  double before, target;
};

// T: of the logits. counts: null where nothing is penalized. scores: room for them.
template <class T, int THREADS>
__global__ void __launch_bounds__(THREADS, 1)
    sample_options(const T* logits, long long logits_row, const long long* positions, long long positions_row,
                   const int* counts, const bool* do_sample, const float* temperatures, const long long* top_ks,
                   const double* top_ps, const float* min_ps, const float* repetitions, const float* presences,
                   const float* frequencies, const long long* seeds, const long long* ends, float* scores,
                   long long* token, float* logprob, long long* after, int vocabulary, int end_count) {
  constexpr int WARPS = THREADS / 32;
  __shared__ Row<WARPS> row;
  griddep_launch();
  griddep_wait();
  const int b = blockIdx.x, tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int stretch = (vocabulary + WARPS - 1) / WARPS, begin = min(vocabulary, warp * stretch);
  const int stop = min(vocabulary, begin + stretch);
  logits += b * logits_row;
  scores += (long long)b * vocabulary;
  if (counts) counts += (long long)b * vocabulary;
  const bool drawn = do_sample[b];
  const float temperature = temperatures[b], repetition = repetitions[b];
  const float presence = presences[b], frequency = frequencies[b];

  // The model's own probabilities, and the scores: each step is rounded, as the plain function's operations are.
  Best own = no_best(), best = no_best();
  for (int z = begin + lane; z < stop; z += 32) {
    float x = wide(logits[z]);
    see(own, x, z);
    if (counts) {
      const int count = counts[z];
      if (count > 0) x = __fsub_rn(x < 0.f ? __fmul_rn(x, repetition) : x / repetition, presence);
      x = __fsub_rn(x, __fmul_rn(frequency, (float)count));
    }
    if (drawn) x = x / temperature;
    if (x > best.value || (x == best.value && z < best.token)) best.value = x, best.token = z;
    scores[z] = x;
  }
  own = block_best<WARPS>(own, row.bests);
  best = block_best<WARPS>(best, row.largest);
  const bool none = !(own.sum > 0.f);
  long long chosen = best.token;
  const float top = best.value;
  if (drawn && !none && top > -infinity()) {
    const bool finite = top < infinity();
    unsigned least = 0;
    int dropped = 0;  // of those that equal the least
    const long long top_k = top_ks[b];
    u64 below;
    if (top_k < vocabulary) {
      auto one = [](float x, unsigned key) -> u64 { return 1; };
      least = threshold<THREADS>(row.digits, scores, begin, stop, vocabulary - (top_k > 1 ? top_k : 1), below, one);
    }
    const double top_p = top_ps[b];
    if (top_p < 1. && finite) {
      auto part = [=](float x, unsigned key) -> u64 { return key < least ? 0 : (u64)(below_top(x, top) * UNIT); };
      u64 mine = 0;
      for (int z = begin + lane; z < stop; z += 32) mine += part(scores[z], key_of(scores[z]));
      mine = lanes_sum(mine);
      if (lane == 0) row.digits.bins[warp] = mine;
      __syncthreads();
      u64 whole = 0;
      for (int w = 0; w < WARPS; w++) whole += row.digits.bins[w];
      __syncthreads();
      const u64 share = (u64)((double)(float)(1. - top_p) * (double)whole);
      const u64 limit = share < whole ? share : whole - 1;  // the most likely token stays
      least = threshold<THREADS>(row.digits, scores, begin, stop, limit, below, part);
      const u64 each = below_top(of_key(least), top) * UNIT;
      dropped = (double)(limit - below) / (double)each;
      while (dropped * each > limit - below) dropped--;  // where the quotient was rounded up
    }
    const float min_p = finite ? min_ps[b] : 0.f;

    // Weights of each stretch: of what is above the least, and how many equal it.
    auto stays = [=](float x) { return !(below_top(x, top) < min_p); };
    double above = 0.;
    int ties = 0;
    for (int z = begin + lane; z < stop; z += 32) {
      const float x = scores[z];
      const unsigned key = key_of(x);
      if (key > least && stays(x)) above += weight_of(x, top);
      ties += key == least;
    }
    above = lanes_sum(above), ties = lanes_sum(ties);
    if (lane == 0) row.above[warp] = above, row.ties[warp] = ties;
    __syncthreads();
    if (tid == 0) {
      const float x = of_key(least);
      const double each = least && stays(x) ? weight_of(x, top) : 0.;
      double whole = 0., sum = 0.;
      for (int w = 0, left = dropped; w < WARPS; w++) {
        const int out = min(left, row.ties[w]);
        left -= out;
        row.above[w] += (row.ties[w] - out) * each;
        whole += row.above[w];
      }
      row.target = uniform(seeds[b], positions[b * positions_row]) * whole;
      row.warp = -1, row.token = 0;
      for (int w = 0, left = dropped; w < WARPS; w++) {  // the first stretch that reaches the target, or the last
        const int out = min(left, row.ties[w]);
        left -= out;
        if (row.above[w] > 0.) {
          row.warp = w, row.before = sum, row.dropped = out;
          sum += row.above[w];
          if (sum > row.target) break;
        }
      }
    }
    __syncthreads();
    if (warp == row.warp) {
      double sum = row.before;
      int met = 0, found = 0;
      for (int from = begin; from < stop; from += 32) {
        const int z = from + lane;
        const float x = z < stop ? scores[z] : -infinity();
        const unsigned key = key_of(x), equal = __ballot_sync(ALL_LANES, z < stop && key == least);
        const int rank = met + __popc(equal & ((1u << lane) - 1));
        const bool in = z < stop && (key > least || (key == least && rank >= row.dropped)) && stays(x);
        const double weight = in ? weight_of(x, top) : 0.;
        double up_to = weight;
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
          const double other = __shfl_up_sync(ALL_LANES, up_to, lanes);
          if (lane >= lanes) up_to += other;
        }
        const unsigned possible = __ballot_sync(ALL_LANES, weight > 0.);
        const unsigned over = possible & __ballot_sync(ALL_LANES, sum + up_to > row.target);
        if (possible) found = from + 31 - __clz(possible);
        if (over) {
          found = from + __ffs(over) - 1;
          break;
        }
        sum += __shfl_sync(ALL_LANES, up_to, 31);
        met += __popc(equal);
      }
      if (lane == 0) row.token = found;
    }
    __syncthreads();
    chosen = row.token;
  }
  if (none || !(top > -infinity())) chosen = 0;
  if (tid >= 32) return;
  const float chance = none ? __int_as_float(0x7fffffff) : chance_of(wide(logits[chosen]), own);
  const bool ended = is_among(chosen, ends, end_count) || none;
  if (tid == 0) {
    token[b] = chosen;
    logprob[b] = chance;
    after[b] = ended ? -1 : positions[b * positions_row];
  }
}
