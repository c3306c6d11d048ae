// A few queries a row against a cache, keys and values read once (flash-decoding, Dao et al. 2023):
//
//   o[i] = sum_t softmax_t(scale * q[i].k[t]) v[t]            q `B S H E`, k `B T K E`, v `B T K V`, out `B S H V`
//
// times sigmoid(gate), where there is one.
//
// A block takes a row, a key/value head and up to QUERIES of the queries that read it (the heads of a group, times S), so
// that a key is read once for all of them. Slots come in tiles of 32. The tiles are dealt out, one by one, to the warps of
// gridDim.x blocks, whatever the context is; a warp keeps a softmax of its own as it goes. At the end those of a block
// are joined in shared memory, those of several blocks by the last to arrive, always in the same order.
//
// A tile in which no query sees a slot is not read. Of the others no slot is read that none of them sees.
#include "softmax.cuh"

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int TILE = 32;        // slots, one a lane where a softmax is taken
constexpr int MOST_SPLITS = 128;

// Blocks that a multiprocessor holds at once, by the registers of a thread: 128 for 4 blocks, 168 for 3, 255 for 2, of
// which queries and sums take 16 a query. More blocks hide what a tile takes beside its loads: sums over lanes, exp.
template <int QUERIES> constexpr int TOGETHER = QUERIES > 4 ? 2 : QUERIES > 2 ? 3 : 4;

// Of how many steps the loads are in flight: of so many loads as those registers hold beside, 4 each. At 512 bytes a
// warp's load, of keys and values a multiprocessor has 128 KiB under way with 4 blocks, 72 with 3 and 32 with 2; an
// H200's memory brings it 36 KB in a microsecond, and answers in less.
__device__ constexpr int steps_ahead(int lanes, int each, int loads) {
  const int steps = loads / each;
  return steps < 1 ? 1 : steps < lanes ? steps : lanes;
}

// T: of all tensors. VEC: numbers a load. QUERIES: that read a key, or more. A key is read by K_LANES lanes, K_EACH loads
// each, a value by V_LANES and V_EACH.
template <class T, int VEC, int QUERIES, int K_LANES, int K_EACH, int V_LANES, int V_EACH>
__global__ void __launch_bounds__(THREADS, TOGETHER<QUERIES>)
    decode_attention(const T* q, long long q_row, long long q_token, long long q_head, const T* k, long long k_row,
                     long long k_slot, long long k_head, const T* v, long long v_row, long long v_slot, long long v_head,
                     const long long* q_positions, long long q_positions_row, long long q_positions_token,
                     const long long* k_positions, long long k_positions_row, long long k_positions_slot, const T* gate,
                     long long gate_row, long long gate_token, long long gate_head, const T* sinks, T* out, float2* partial_softmax, float* partial, unsigned* arrived, int slots, int tokens,
                     int groups, int k_width, int v_width, int causal, int window, float scale, float softcap) {
  constexpr int K_AHEAD = steps_ahead(K_LANES, K_EACH, QUERIES > 4 ? 4 : 8),
                V_AHEAD = steps_ahead(V_LANES, V_EACH, QUERIES > 2 ? 4 : 8);
  constexpr int K_STEP = 32 / K_LANES, V_STEP = 32 / V_LANES;  // slots a step
  // Scores that a lane holds once they are dealt out, and how many lanes hold the same.
  constexpr int DEALT = QUERIES > K_LANES ? QUERIES / K_LANES : 1, ALIKE = K_LANES / (QUERIES / DEALT);
  __shared__ float weights[WARPS][QUERIES][TILE];
  __shared__ Softmax softmaxes[WARPS][QUERIES];
  __shared__ float counts[MOST_SPLITS * QUERIES];
  __shared__ Softmax whole[QUERIES];
  __shared__ bool last;
  DYNAMIC_SHARED(float, sums);  // WARPS QUERIES V
  griddep_launch();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = blockIdx.z, chunks = (groups * tokens + QUERIES - 1) / QUERIES;
  const int head = blockIdx.y / chunks, begin = blockIdx.y % chunks * QUERIES;
  const int queries = min(QUERIES, groups * tokens - begin);
  // Query i of this block: which token, and which of all query heads.
  auto token_of = [&](int i) { return (begin + i) / groups; };
  auto head_of = [&](int i) { return head * groups + (begin + i) % groups; };
  griddep_wait();

  const int k_lane = lane % K_LANES, v_lane = lane % V_LANES;
  Vec<T, VEC> zeros;
#pragma unroll
  for (int j = 0; j < VEC; j++) zeros.at[j] = narrow<T>(0.f);
  float query[QUERIES][K_EACH * VEC];
  int at[QUERIES];  // positions; -1 sees nothing
  bool present = false;
#pragma unroll
  for (int i = 0; i < QUERIES; i++) {
    at[i] = -1;
    if (i < queries) at[i] = max(-1ll, q_positions[row * q_positions_row + token_of(i) * q_positions_token]);
    present |= at[i] >= 0;
#pragma unroll
    for (int e = 0; e < K_EACH; e++) {
      const int channel = (e * K_LANES + k_lane) * VEC;
      Vec<T, VEC> part = zeros;
      if (at[i] >= 0 && channel < k_width)
        part = load<VEC>(q + row * q_row + token_of(i) * q_token + head_of(i) * q_head + channel);
#pragma unroll
      for (int j = 0; j < VEC; j++) query[i][e * VEC + j] = wide(part.at[j]);
    }
  }

  Softmax mine[QUERIES];  // of the warp; the sum is of the lane's own slots
  float sum[QUERIES][V_EACH * VEC];
#pragma unroll
  for (int i = 0; i < QUERIES; i++) {
    mine[i] = {LOWEST, 0.f};
#pragma unroll
    for (int j = 0; j < V_EACH * VEC; j++) sum[i][j] = 0.f;
  }
  k += row * k_row + head * k_head;
  v += row * v_row + head * v_head;
  k_positions += row * k_positions_row;
  auto sees = [&](int i, int position) {
    const int back = at[i] - position;
    return at[i] >= 0 && position >= 0 && (!causal || back >= 0) &&
           (window == 0 || (back < window && (causal || -back < window)));
  };

  auto position_of = [&](int tile) {  // of the slot whose softmax this lane takes
    const int slot = tile * TILE + lane;
    return slot < slots ? static_cast<int>(max(-1ll, k_positions[slot * k_positions_slot])) : -1;
  };

  const int first_tile = warp * gridDim.x + blockIdx.x, apart_tiles = WARPS * gridDim.x;
  int next = present ? position_of(first_tile) : -1;
  for (int tile = first_tile; present && tile * TILE < slots; tile += apart_tiles) {
    const int position = next;
    next = position_of(tile + apart_tiles);  // on its way while this tile is read
    bool seen = false;
#pragma unroll
    for (int i = 0; i < QUERIES; i++) seen |= sees(i, position);
    const unsigned there = __ballot_sync(ALL_LANES, seen);
    if (there == 0) continue;

    Bits<T, VEC> found[V_AHEAD][V_EACH];
    auto fetch_values = [&](int from) {
#pragma unroll
      for (int a = 0; a < V_AHEAD; a++) {
        const int t = (from + a) * V_STEP + lane / V_LANES;
#pragma unroll
        for (int e = 0; e < V_EACH; e++) {
          const int channel = (e * V_LANES + v_lane) * VEC;
          found[a][e] = {};
          if (there >> t & 1 && channel < v_width)
            found[a][e] = load_bits_once<VEC>(v + (tile * TILE + t) * v_slot + channel);
        }
      }
    };

    fetch_values(0);  // on their way while scores are taken
#pragma unroll 1
    for (int from = 0; from < K_LANES; from += K_AHEAD) {
      Bits<T, VEC> keys[K_AHEAD][K_EACH];
#pragma unroll
      for (int a = 0; a < K_AHEAD; a++) {
        const int t = (from + a) * K_STEP + lane / K_LANES;
#pragma unroll
        for (int e = 0; e < K_EACH; e++) {
          const int channel = (e * K_LANES + k_lane) * VEC;
          keys[a][e] = {};
          if (there >> t & 1 && channel < k_width)
            keys[a][e] = load_bits_once<VEC>(k + (tile * TILE + t) * k_slot + channel);
        }
      }
#pragma unroll
      for (int a = 0; a < K_AHEAD; a++) {
        Vec<T, VEC> key[K_EACH];
#pragma unroll
        for (int e = 0; e < K_EACH; e++) key[e] = numbers_of<T, VEC>(keys[a][e]);
        float score[QUERIES];
        int first;
#pragma unroll
        for (int i = 0; i < QUERIES; i++) {
          score[i] = 0.f;
#pragma unroll
          for (int e = 0; e < K_EACH; e++) {
#pragma unroll
            for (int j = 0; j < VEC; j++)
              score[i] = fmaf(query[i][e * VEC + j], wide(key[e].at[j]), score[i]);
          }
        }
        deal_sums<QUERIES, K_LANES>(score, first);
        if (k_lane % ALIKE != 0) continue;
#pragma unroll
        for (int i = 0; i < DEALT; i++)
          weights[warp][first + i][(from + a) * K_STEP + lane / K_LANES] = score[i];
      }
    }
    __syncwarp();

#pragma unroll
    for (int i = 0; i < QUERIES; i++) {
      const bool counts_here = sees(i, position);
      float score = weights[warp][i][lane] * scale;
      if (softcap > 0.f) score = softcap * tanhf(score / softcap);
      const float highest = fmaxf(mine[i].highest, warp_max(counts_here ? score : LOWEST));
      const float older = expf(mine[i].highest - highest), weight = counts_here ? expf(score - highest) : 0.f;
      mine[i] = {highest, mine[i].sum * older + weight};
      weights[warp][i][lane] = weight;
#pragma unroll
      for (int j = 0; j < V_EACH * VEC; j++) sum[i][j] *= older;
    }
    __syncwarp();

#pragma unroll 1
    for (int from = 0; from < V_LANES; from += V_AHEAD) {
      if (from > 0) fetch_values(from);
#pragma unroll
      for (int a = 0; a < V_AHEAD; a++) {
        const int t = (from + a) * V_STEP + lane / V_LANES;
        Vec<T, VEC> value[V_EACH];
#pragma unroll
        for (int e = 0; e < V_EACH; e++) value[e] = numbers_of<T, VEC>(found[a][e]);
#pragma unroll
        for (int i = 0; i < QUERIES; i++) {
          const float weight = weights[warp][i][t];
#pragma unroll
          for (int e = 0; e < V_EACH; e++) {
#pragma unroll
            for (int j = 0; j < VEC; j++)
              sum[i][e * VEC + j] = fmaf(weight, wide(value[e].at[j]), sum[i][e * VEC + j]);
          }
        }
      }
    }
    __syncwarp();  // before the next tile's scores
  }

  // The block's warps, joined.
#pragma unroll
  for (int i = 0; i < QUERIES; i++) {
    const float total = warp_sum(mine[i].sum);
    if (lane == 0) softmaxes[warp][i] = {mine[i].highest, total};
#pragma unroll
    for (int e = 0; e < V_EACH; e++) {
#pragma unroll
      for (int j = 0; j < VEC; j++) {
        float value = sum[i][e * VEC + j];
#pragma unroll
        for (int apart = V_LANES; apart < 32; apart *= 2) value += __shfl_xor_sync(ALL_LANES, value, apart);
        const int channel = (e * V_LANES + v_lane) * VEC + j;
        if (lane < V_LANES && channel < v_width) sums[(warp * QUERIES + i) * v_width + channel] = value;
      }
    }
  }
  __syncthreads();
  join<QUERIES, WARPS>(WARPS, [&](int p, int i) { return softmaxes[p][i]; }, counts, whole);
  __syncthreads();
  const int numbers = queries * v_width;
  const long long apart = (long long)QUERIES * v_width;
  auto joined = [&](int count, int n, auto part) {
    float value = 0.f;
#pragma unroll 4
    for (int p = 0; p < count; p++) {
      const float by = counts[p * QUERIES + n / v_width];
      if (by != 0.f) value = fmaf(by, part(p * apart + n), value);
    }
    return value;
  };
  auto of_warps = [&](int n) { return joined(WARPS, n, [&](long long at) { return sums[at]; }); };
  auto of_blocks = [&](int n) { return joined(gridDim.x, n, [&](long long at) { return __ldcg(&partial[at]); }); };

  // And the row's blocks, by the last of them.
  if (gridDim.x > 1) {
    const long long group = (long long)blockIdx.z * gridDim.y + blockIdx.y;
    partial += group * gridDim.x * apart;
    partial_softmax += group * gridDim.x * QUERIES;
    if (threadIdx.x < QUERIES)
      partial_softmax[blockIdx.x * QUERIES + threadIdx.x] = {whole[threadIdx.x].highest, whole[threadIdx.x].sum};
    for (int n = threadIdx.x; n < numbers; n += THREADS) {
      if (whole[n / v_width].sum != 0.f) partial[blockIdx.x * apart + n] = of_warps(n);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      last = atomicAdd(&arrived[group], 1u) == gridDim.x - 1;
      if (last) arrived[group] = 0;  // for the next launch
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    auto of_block = [&](int p, int i) {
      const float2 found = __ldcg(&partial_softmax[p * QUERIES + i]);
      return Softmax{found.x, found.y};
    };
    join<QUERIES, WARPS>(gridDim.x, of_block, counts, whole);
    __syncthreads();
  }
  const int heads = gridDim.y / chunks * groups;
  for (int n = threadIdx.x; n < numbers; n += THREADS) {
    const int i = n / v_width;
    const float value = gridDim.x > 1 ? of_blocks(n) : of_warps(n);
    float total = whole[i].sum, by = 1.f;
    if (sinks != nullptr && total != 0.f) {  // a sink takes part and has no value
      const float sink = wide(sinks[head_of(i)]), highest = fmaxf(sink, whole[i].highest);
      by = expf(whole[i].highest - highest);
      total = total * by + expf(sink - highest);
    }
    float o = total == 0.f ? 0.f : value * by / total;
    const int token = token_of(i), channel = n % v_width;
    if (gate != nullptr)
      o /= 1.f + expf(-wide(gate[row * gate_row + token * gate_token + head_of(i) * gate_head + channel]));
    out[(((long long)row * tokens + token) * heads + head_of(i)) * v_width + channel] = narrow<T>(o);
  }
}
