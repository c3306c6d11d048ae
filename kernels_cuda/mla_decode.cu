// One token of each row against the row's latents, all heads at once:
//
//   o[b, h] = softmax_t( scale * q[b, h] . c[b, t] ) c[b, t, :L]      q `B H LR` in fp32, c `B T LR`, o `B H L`
//
// All heads multiply the same latents, so arithmetic is the bound before memory is: tensor cores do it. A query is a
// sum of two numbers in half precision, and so is a weight: twice the products, and nearly the accuracy of fp32.
//
// A block takes 16 heads, or 32, of a row and a share of the slots, 16 at a time. Its warps share the columns: a warp
// reads its columns of a latent once, for its part of the scores and for its part of the sums. Sums are corrected as
// the highest score grows (Milakov and Gimelshein 2018, arXiv:1805.02867) and left with that score and the total of
// weights; `values_out` puts the shares together. Slots that a query does not see are not read.
#include "multiply.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int SLOTS = 16;
constexpr int SCORES = SLOTS + 8;  // pitch, against conflicts of banks

// Blocks that a multiprocessor holds at once, of PIECES times 16 heads and 16 columns a warp. Two, with 128 registers a
// thread, where it fits. Of DeepSeek's 32 heads and 576 columns 80 registers hold queries, 80 sums and 20 the next
// latents, and in shared memory two blocks' queries do not fit either. The host makes about as many blocks as there are
// multiprocessors, so a second one would come in large batches alone.
template <class T, int PIECES> constexpr int TOGETHER = sizeof(T) == 2 && PIECES <= 3 ? 2 : 1;

// Shared memory, in bytes that the host counts too: scores of each warp, weights, latents.
template <class T, int TILES, int STEPS> struct Shared {
  float scores[WARPS][16 * TILES][SCORES];
  T weights[PARTS<T>][16 * TILES][SLOTS + 8];
  T latents[WARPS][SLOTS][16 * STEPS + 8];
  float unit[16 * TILES], shrink[16 * TILES];
};

// Whether the next latents fly while these are computed. Of narrower loads there are more, and no registers left for
// where they go.
template <class T, int VEC> constexpr bool AHEAD = VEC * sizeof(T) == 16;

// T: of the latents. VEC: numbers a load, of which their width is a multiple. TILES: of 16 heads. STEPS: of 16 columns,
// a warp.
template <class T, int VEC, int TILES, int STEPS>
__global__ void __launch_bounds__(THREADS, (TOGETHER<T, TILES * STEPS>))
    mla_decode(const float* q, const T* latent, long long latent_row, long long latent_slot,
               const long long* q_positions, long long q_row, const long long* k_positions, long long k_row,
               float* partial, float* stats, int heads, int slots, int width, int values, int share, int causal,
               int window, float scale) {
  constexpr int HEADS = 16 * TILES, LOADS = SLOTS * 16 / (32 * VEC);
  DYNAMIC_SHARED(unsigned char, memory);
  Shared<T, TILES, STEPS>& shared = *reinterpret_cast<Shared<T, TILES, STEPS>*>(memory);
  griddep_launch();
  griddep_wait();
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
  const int row = blockIdx.z, first_head = blockIdx.x * HEADS;
  auto column_of = [&](int step) { return (step * WARPS + warp) * 16; };

  // Queries, over a power of two near their largest number, so that none is too large or too small for half precision.
  q += ((long long)row * heads + first_head) * width;
  for (int h = warp; h < HEADS; h += WARPS) {
    float most = 0.f;
    if (first_head + h < heads) {
      for (int e = lane; e < width; e += 32) most = fmaxf(most, fabsf(q[h * width + e]));
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, lanes));
    if (lane == 0) shared.unit[h] = most > 1e-30f ? __uint_as_float(__float_as_uint(most) & 0x7f800000u) : 1.f;
  }
  __syncthreads();
  Left<T> query[TILES][STEPS][PARTS<T>];
#pragma unroll
  for (int i = 0; i < TILES * STEPS * 8; i++) {
    const int tile = i / (STEPS * 8), step = i / 8 % STEPS, part = i / 2 % 4;
    const int h = 16 * tile + g + part % 2 * 8, column = column_of(step) + 2 * t + part / 2 * 8 + i % 2;
    const bool there = first_head + h < heads && column < width;
    T parts[PARTS<T>];
    split<T>(there ? q[h * width + column] / shared.unit[h] : 0.f, parts);
#pragma unroll
    for (int p = 0; p < PARTS<T>; p++) query[tile][step][p].at[part].at[i % 2] = parts[p];
  }

  // Which of 16 slots the query sees, and this warp's columns of those.
  const int begin = blockIdx.y * share, stop = min(slots, begin + share);
  const long long position = q_positions[row * q_row];
  latent += row * latent_row;
  k_positions += row * k_row;
  auto held_at = [&](int from) { return lane < SLOTS && from + lane < stop ? k_positions[from + lane] : -1; };
  auto seen = [&](long long held) {
    const long long back = position - held;
    return __ballot_sync(ALL_LANES, position >= 0 && held >= 0 && !(causal && back < 0) &&
                                        !(window && (back >= window || -back >= window)));
  };
  auto fetched = [&](int from, unsigned mask, int step, int v) {
    const int slot = v / (16 / VEC), column = column_of(step) + v % (16 / VEC) * VEC;
    if (mask >> slot & 1 && column < width) return load<VEC>(latent + (from + slot) * latent_slot + column);
    Vec<T, VEC> none;
#pragma unroll
    for (int j = 0; j < VEC; j++) none.at[j] = narrow<T>(0.f);
    return none;
  };
  Vec<T, VEC> next[STEPS][LOADS];
  auto fetch = [&](int from, unsigned mask) {
#pragma unroll
    for (int i = 0; i < STEPS * LOADS; i++)
      next[i / LOADS][i % LOADS] = fetched(from, mask, i / LOADS, lane + 32 * (i % LOADS));
  };

  float sums[TILES][STEPS][2][4] = {};
  float most = -infinity(), total = 0.f;  // of head tid / 8: the highest score, this thread's part of the weights
  T(*mine)[16 * STEPS + 8] = shared.latents[warp];
  unsigned mask = seen(held_at(begin)), all = 0;
  long long held = held_at(begin + SLOTS);
  if (AHEAD<T, VEC>) fetch(begin, mask);
  for (int from = begin; from < stop; from += SLOTS) {
    const unsigned now = mask;
    __syncwarp();
#pragma unroll(AHEAD<T, VEC> ? STEPS * LOADS : 1)
    for (int i = 0; i < STEPS * LOADS; i++) {
      const int v = lane + 32 * (i % LOADS);
      store<VEC>(&mine[v / (16 / VEC)][i / LOADS * 16 + v % (16 / VEC) * VEC],
                 AHEAD<T, VEC> ? next[i / LOADS][i % LOADS] : fetched(from, now, i / LOADS, v));
    }
    __syncwarp();
    mask = seen(held);
    held = held_at(from + 2 * SLOTS);
    if (AHEAD<T, VEC> && mask) fetch(from + SLOTS, mask);
    if (!now) continue;  // as all threads of the block find
    all |= now;

    // This warp's part of the scores: of its columns.
    float scores[TILES][2][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      if (column_of(step) >= width) continue;
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const T* c = &mine[n * 8 + g][step * 16 + 2 * t];
        const Right<T> right = {load<2>(c), load<2>(c + 8)};
#pragma unroll
        for (int i = 0; i < TILES * PARTS<T>; i++)
          multiply(scores[i / PARTS<T>][n], query[i / PARTS<T>][step][i % PARTS<T>], right);
      }
    }
#pragma unroll
    for (int i = 0; i < TILES * 4; i++) {
      const int tile = i / 4, n = i / 2 % 2, lower = i % 2;
      float* to = &shared.scores[warp][16 * tile + g + 8 * lower][n * 8 + 2 * t];
      store<2>(to, Vec<float, 2>{scores[tile][n][2 * lower], scores[tile][n][2 * lower + 1]});
    }
    __syncthreads();

    // Eight threads a head, two slots each.
    float shrink = 1.f;
    if (tid < HEADS * 8) {
      const int h = tid / 8, slot = tid % 8 * 2;
      float x[2] = {0.f, 0.f};
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const Vec<float, 2> part = load<2>(&shared.scores[w][h][slot]);
        x[0] += part.at[0], x[1] += part.at[1];
      }
#pragma unroll
      for (int i = 0; i < 2; i++) x[i] = now >> (slot + i) & 1 ? x[i] * (scale * shared.unit[h]) : -infinity();
      float higher = fmaxf(most, fmaxf(x[0], x[1]));
#pragma unroll
      for (int lanes = 4; lanes > 0; lanes /= 2) higher = fmaxf(higher, __shfl_xor_sync(ALL_LANES, higher, lanes));
      shrink = expf(most - higher);
      most = higher;
      const float weight[2] = {expf(x[0] - most), expf(x[1] - most)};
      total = fmaf(total, shrink, weight[0] + weight[1]);
      if (slot == 0) shared.shrink[h] = shrink;
      T parts[2][PARTS<T>];
      split<T>(weight[0], parts[0]), split<T>(weight[1], parts[1]);
#pragma unroll
      for (int p = 0; p < PARTS<T>; p++) store<2>(&shared.weights[p][h][slot], Vec<T, 2>{parts[0][p], parts[1][p]});
    }
    if (__syncthreads_or(shrink != 1.f)) {
#pragma unroll
      for (int i = 0; i < TILES * STEPS * 8; i++) {
        const int tile = i / (STEPS * 8), step = i / 8 % STEPS, n = i / 4 % 2, part = i % 4;
        sums[tile][step][n][part] *= shared.shrink[16 * tile + g + part / 2 * 8];
      }
    }

    // Weights times latents, of this warp's columns.
    Left<T> weights[TILES][PARTS<T>];
#pragma unroll
    for (int i = 0; i < TILES * PARTS<T> * 4; i++) {
      const int tile = i / (PARTS<T> * 4), p = i / 4 % PARTS<T>, part = i % 4;
      weights[tile][p].at[part] = load<2>(&shared.weights[p][16 * tile + g + part % 2 * 8][2 * t + part / 2 * 8]);
    }
#pragma unroll
    for (int i = 0; i < STEPS * 2; i++) {
      const int step = i / 2, n = i % 2, column = step * 16 + n * 8 + g;
      if (column_of(step) >= values) continue;
      const Right<T> right = {Vec<T, 2>{mine[2 * t][column], mine[2 * t + 1][column]},
                              Vec<T, 2>{mine[2 * t + 8][column], mine[2 * t + 9][column]}};
#pragma unroll
      for (int j = 0; j < TILES * PARTS<T>; j++)
        multiply(sums[j / PARTS<T>][step][n], weights[j / PARTS<T>][j % PARTS<T>], right);
    }
  }

  // What this share gives: `B H shares L`, and `B H shares` pairs of its highest score and its total, 0 of no slot.
  const long long shares = gridDim.y, here = ((long long)row * heads + first_head) * shares + blockIdx.y;
  if (tid < HEADS * 8) {
#pragma unroll
    for (int lanes = 4; lanes > 0; lanes /= 2) total += __shfl_xor_sync(ALL_LANES, total, lanes);
    const int h = tid / 8;
    if (tid % 8 == 0 && first_head + h < heads) store<2>(stats + 2 * (here + h * shares), Vec<float, 2>{most, total});
  }
  if (!all) return;
#pragma unroll
  for (int i = 0; i < TILES * STEPS * 8; i++) {
    const int tile = i / (STEPS * 8), step = i / 8 % STEPS, n = i / 4 % 2, part = i % 4;
    const int h = 16 * tile + g + part / 2 * 8, column = column_of(step) + n * 8 + 2 * t + part % 2;
    if (first_head + h < heads && column < values)
      partial[(here + h * shares) * values + column] = sums[tile][step][n][part];
  }
}
