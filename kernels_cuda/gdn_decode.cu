// One token of a gated delta net, between its projections: of each row, and of each value head h with key head h / G,
//
//   q, k, v = act(conv(q)), act(conv(k)), act(conv(v));  q, k of length 1;  g = -exp(a_log) softplus(a + dt_bias)
//   S <- exp(g) S;   S <- S + sigmoid(b) (v - S k) k^T;   o = S q / sqrt(E);   out = rms_norm(o) w act(z)
//
// with the state S `B H V E` in fp32 and the last W - 1 tokens of each convolution `B C W-1`, both written in place.
//
// A step is bound by reading and writing S, once. So LANES threads take a row of V, a part of its columns each, 16 bytes
// a load; a thread keeps its part of ROWS of them in registers from the load to the store; and a block takes as many
// rows as its threads do. Nothing between that and the end needs more of V than a row.
//
// What does is left to the block of a key head's value heads that arrives last: the norm, and the convolutions of
// q and k, whose old tokens the others have read by then. In which order a sum is taken depends on E and V alone.
#include "common.cuh"

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;

// Blocks that a multiprocessor's registers must hold at once.
template <int W, int COLUMNS, int ROWS>
constexpr int TOGETHER = W > 4 || COLUMNS > THREADS ? 2 : ROWS > 2 ? 3 : 4;

// W numbers of a channel: its weights, or its tokens, the latest last.
template <class T, int W> struct Taps {
  T at[W];
};

template <class T, int W> __device__ __forceinline__ Taps<T, W> weights_of(const T* weight, long long channel) {
  Taps<T, W> found;
#pragma unroll
  for (int i = 0; i < W; i++) found.at[i] = weight[channel * W + i];
  return found;
}

template <class T, int W>
__device__ __forceinline__ Taps<T, W> tokens_of(const T* kept, int tap, T now, bool begins) {
  Taps<T, W> found;
#pragma unroll
  for (int i = 0; i < W - 1; i++) {
    const T old = kept[i * tap];
    found.at[i] = begins ? narrow<T>(0.f) : old;  // of a row that begins it may be anything
  }
  found.at[W - 1] = now;
  return found;
}

template <class T, int W>
__device__ __forceinline__ void keep(T* kept, int tap, const Taps<T, W>& tokens) {
#pragma unroll
  for (int i = 0; i < W - 1; i++) kept[i * tap] = tokens.at[i + 1];
}

template <class T, int W>
__device__ __forceinline__ float convolved(const Taps<T, W>& tokens, const Taps<T, W>& weights, int activation) {
  float y = 0.f;
#pragma unroll
  for (int i = 0; i < W; i++) y = fmaf(wide(tokens.at[i]), wide(weights.at[i]), y);
  return activated<T>(y, activation);
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// log(1 + exp(x)) is exactly 0 below -17, this is not.
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

template <int LANES> __device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int lanes = LANES / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(ALL_LANES, x, lanes);
  return x;
}

// T: of activations, GATE: of a_log and dt_bias. VEC: numbers a load, of which E is a multiple. PER: loads of a thread
// for a row of V. A block's grid index: its rows of V, value head, row of the batch. *_row, *_head, *_channel,
// *_tap: from one to the next. positions: 0 where a row begins, below 0 where there is no token.
template <class T, class GATE, int W, int VEC, int PER, int LANES, int ROWS>
__global__ void __launch_bounds__(THREADS, (TOGETHER<W, LANES * PER * VEC, ROWS>))
    gdn_decode(const T* q, long long q_row, long long q_head, const T* k, long long k_row, long long k_head, const T* v,
               long long v_row, long long v_head, const T* z, long long z_row, long long z_head, const T* b,
               long long b_row, long long b_head, const T* a, long long a_row, long long a_head, const T* q_conv,
               const T* k_conv, const T* v_conv, const GATE* a_log, const GATE* dt_bias, const T* o_norm, T* cache_q,
               T* cache_k, long long qk_kept_row, int qk_channel, int qk_tap, T* cache_v, long long v_kept_row,
               int v_channel, int v_tap, float* state, const long long* positions, long long position_row, T* out,
               unsigned* arrived, int G, int E, int V, int by_channel, int activation, int gate_is_silu, float eps,
               int scale_in_fp32, float most_beta, float scale) {
  constexpr int COLUMNS = LANES * PER * VEC;  // E and, behind it, zeros
  constexpr int CHANNELS = (COLUMNS + THREADS - 1) / THREADS;
  constexpr int SIDE = THREADS / LANES;  // rows of V side by side
  static_assert(ROWS * SIDE <= THREADS, "a thread convolves one value");
  __shared__ Vec<float, VEC> key[LANES * PER], decay[LANES * PER], decayed_key[LANES * PER], decayed_query[LANES * PER];
  __shared__ float value[ROWS * SIDE], parts[WARPS][3];
  __shared__ bool last;
  griddep_launch();

  const int t = threadIdx.x, lane = t % LANES, side = t / LANES, first = blockIdx.x * ROWS * SIDE;
  const int row = blockIdx.z, head = blockIdx.y, heads = gridDim.y, key_head = head / G, key_heads = heads / G;
  const long long of_head = (long long)row * heads + head, of_key = (long long)row * key_heads + key_head;
  const int here = min(ROWS * SIDE, V - first);  // rows of V of this block
  float* S = state + (of_head * V + first) * E;
  out += of_head * V + first;
  const long long kept_at = row * qk_kept_row + key_head * E * qk_channel;

  // Before the kernel in front has ended: it writes no weight.
  for (int i = t * 32; i < here * E; i += THREADS * 32) prefetch(S + i);
  Taps<T, W> q_taps[CHANNELS], k_taps[CHANNELS], v_taps;
#pragma unroll
  for (int i = 0; i < CHANNELS; i++) {
    const int c = t + i * THREADS;
    if (c >= E) continue;
    q_taps[i] = weights_of<T, W>(q_conv, (long long)key_head * E + c);
    k_taps[i] = weights_of<T, W>(k_conv, (long long)key_head * E + c);
  }
  if (t < here) v_taps = weights_of<T, W>(v_conv, (long long)head * V + first + t);
  const float rate = -expf(wide(a_log[head]));
  griddep_wait();

  Vec<float, VEC> s[ROWS][PER];
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
#pragma unroll
    for (int p = 0; p < PER; p++) {
      const int r = side + i * SIDE, c = (lane + p * LANES) * VEC;
      if (r < here && c < E) s[i][p] = load_once<VEC>(S + (long long)r * E + c);
    }
  }
  const long long position = positions ? positions[row * position_row] : 1;
  if (position < 0) {  // so do all blocks of the row, and none of them arrives
    if (t < here) out[t] = narrow<T>(0.f);
    return;
  }
  const bool begins = position == 0;

  // q, k, decays and values into shared memory; the squares of q and of k, and their product.
  q += row * q_row + key_head * q_head, k += row * k_row + key_head * k_head;
  a += row * a_row + head * a_head, dt_bias += by_channel ? (long long)head * E : head;
  float sums[3] = {0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < CHANNELS; i++) {
    const int c = t + i * THREADS;
    if (c >= COLUMNS) continue;
    float q_c = 0.f, k_c = 0.f, decay_c = 0.f;
    if (c < E) {
      q_c = convolved(tokens_of<T, W>(cache_q + kept_at + c * qk_channel, qk_tap, q[c], begins), q_taps[i], activation);
      k_c = convolved(tokens_of<T, W>(cache_k + kept_at + c * qk_channel, qk_tap, k[c], begins), k_taps[i], activation);
      decay_c = expf(rate * softplus(wide(a[by_channel ? c : 0]) + wide(dt_bias[by_channel ? c : 0])));
    }
    sums[0] = fmaf(q_c, q_c, sums[0]), sums[1] = fmaf(k_c, k_c, sums[1]), sums[2] = fmaf(q_c, k_c, sums[2]);
    key[c / VEC].at[c % VEC] = k_c;
    decay[c / VEC].at[c % VEC] = decay_c;
    decayed_key[c / VEC].at[c % VEC] = decay_c * k_c;
    decayed_query[c / VEC].at[c % VEC] = decay_c * q_c;
  }
  if (t < here) {
    T* kept = cache_v + row * v_kept_row + (head * V + first + t) * v_channel;
    const Taps<T, W> tokens = tokens_of<T, W>(kept, v_tap, v[row * v_row + head * v_head + first + t], begins);
    value[t] = convolved(tokens, v_taps, activation);
    keep(kept, v_tap, tokens);
  }
  const float beta = most_beta * sigmoid(wide(b[row * b_row + head * b_head]));
  block_sum<3, WARPS>(sums, parts);
  const float q_by = rsqrtf(sums[0] + 1e-6f), k_by = rsqrtf(sums[1] + 1e-6f), qk = sums[2] * q_by * k_by;

  // One pass over S for what it says of the key and of the query, to which the query adds what the token writes.
  float of_k[ROWS], of_q[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; i++) of_k[i] = of_q[i] = 0.f;
#pragma unroll
  for (int p = 0; p < PER; p++) {
    const int at = lane + p * LANES;
    if (at * VEC >= E) continue;
    const Vec<float, VEC> by_k = decayed_key[at], by_q = decayed_query[at];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
      for (int j = 0; j < VEC; j++) {
        if (begins || side + i * SIDE >= here) s[i][p].at[j] = 0.f;
        of_k[i] = fmaf(s[i][p].at[j], by_k.at[j], of_k[i]);
        of_q[i] = fmaf(s[i][p].at[j], by_q.at[j], of_q[i]);
      }
    }
  }
  float written[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const int r = side + i * SIDE;
    const float said = lanes_sum<LANES>(of_k[i]) * k_by, asked = lanes_sum<LANES>(of_q[i]) * q_by;
    const float delta = r < here ? beta * (value[r] - said) : 0.f;
    written[i] = delta * k_by;
    if (lane == 0 && r < here) out[r] = narrow<T>(scale * fmaf(qk, delta, asked));
  }
#pragma unroll
  for (int p = 0; p < PER; p++) {
    const int at = lane + p * LANES;
    if (at * VEC >= E) continue;
    const Vec<float, VEC> by = decay[at], with = key[at];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
      for (int j = 0; j < VEC; j++) s[i][p].at[j] = fmaf(written[i], with.at[j], by.at[j] * s[i][p].at[j]);
      if (side + i * SIDE < here) store<VEC>(S + (long long)(side + i * SIDE) * E + at * VEC, s[i][p]);
    }
  }

  __threadfence();
  __syncthreads();
  if (t == 0) {
    last = atomicAdd(&arrived[of_key], 1u) == gridDim.x * G - 1;
    if (last) arrived[of_key] = 0;  // for the next launch
  }
  __syncthreads();
  if (!last) return;
  __threadfence();

  for (int c = t; c < E; c += THREADS) {
    keep(cache_q + kept_at + c * qk_channel, qk_tap, tokens_of<T, W>(cache_q + kept_at + c * qk_channel, qk_tap, q[c], begins));
    keep(cache_k + kept_at + c * qk_channel, qk_tap, tokens_of<T, W>(cache_k + kept_at + c * qk_channel, qk_tap, k[c], begins));
  }
  out -= of_head * V + first;
  for (int h = key_head * G + t / 32; h < (key_head + 1) * G; h += WARPS) {  // a warp takes a head
    T* o = out + ((long long)row * heads + h) * V;
    const T* gate = z + row * z_row + h * z_head;
    float squares = 0.f;
    for (int i = t % 32; i < V; i += 32) squares = fmaf(wide(__ldcg(o + i)), wide(__ldcg(o + i)), squares);
    const float inverse = rsqrtf(warp_sum(squares) / V + eps);
    for (int i = t % 32; i < V; i += 32) {
      const float x = wide(__ldcg(o + i)) * inverse, weight = wide(o_norm[i]), g = wide(gate[i]);
      const float scaled = scale_in_fp32 ? weight * x : rounded<T>(weight * rounded<T>(x));
      o[i] = narrow<T>(scaled * (gate_is_silu ? g * sigmoid(g) : sigmoid(g)));
    }
  }
}
