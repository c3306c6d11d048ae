// What lies between a projection and attention, of a few tokens a row:
//
//   q = rope(norm(q));   k_cache[slot] = rope(norm(k));   v_cache[slot] = v;   k_positions[t] = whose token slot t holds
//
// q `B S H E`, k `B S K E`, v `B S K V`, caches `B T K E` and `B T K V`. The slot is the token's position, in a ring that
// modulo the ring. A token without a position writes nothing.
//
// A warp takes a head of a token, and a lane every 32nd of its numbers, in fp32 from the norm on: they are rounded once
// turned. The blocks behind the heads' write `k_positions`, which attention asks for.
#include "common.cuh"

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int SLOTS = 4 * THREADS;  // of a block that writes positions

// T: of all tensors. EACH: numbers of a head that a lane takes. NORM: of queries and keys, by its options.
template <class T, int EACH, Norm NORM>
__global__ void __launch_bounds__(THREADS, 8)
    qkv_rope_cache(const T* q, long long q_row, long long q_token, long long q_head, const T* k, long long k_row,
                   long long k_token, long long k_head, const T* v, long long v_row, long long v_token,
                   long long v_head, T* k_cache, long long k_cache_row, long long k_cache_slot, long long k_cache_head,
                   T* v_cache, long long v_cache_row, long long v_cache_slot, long long v_cache_head, const T* cos,
                   long long cos_row, long long cos_token, const T* sin, long long sin_row, long long sin_token,
                   const long long* positions, long long positions_row, long long positions_token, const T* q_norm,
                   const T* k_norm, const long long* slots, T* turned, long long* k_positions, int heads, int kv_heads,
                   int k_width, int v_width, int rotary, int interleaved, int room, int ring, int asked, float eps) {
  __shared__ float shared[WARPS][EACH * 32];
  griddep_launch();
  const int row = blockIdx.z, token = blockIdx.y, tokens = gridDim.y;
  const int of_heads = (heads + 2 * kv_heads + WARPS - 1) / WARPS;  // blocks

  if (blockIdx.x >= of_heads) {
    if (token > 0) return;
    griddep_wait();
    long long latest = -1;
    for (int s = 0; s < tokens; s++) latest = max(latest, positions[row * positions_row + s * positions_token]);
    const int first = (blockIdx.x - of_heads) * SLOTS + threadIdx.x;
    for (int n = first; n < min(asked, first + SLOTS); n += THREADS) {
      const long long slot = slots[n];
      long long held = slot <= latest ? slot : -1;
      if (ring > 0 && latest >= 0) held = latest - ((latest - slot) % ring + ring) % ring;
      k_positions[(long long)row * asked + n] = max(-1ll, held);
    }
    return;
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int head = blockIdx.x * WARPS + warp;
  if (head >= heads + 2 * kv_heads) return;
  const bool is_q = head < heads, is_k = !is_q && head < heads + kv_heads;
  if (!is_q) head -= is_k ? heads : heads + kv_heads;
  const int width = is_q || is_k ? k_width : v_width;
  float x[EACH], scale[EACH];
  if constexpr (NORM != NO_NORM) {
    const T* weight = is_q ? q_norm : k_norm;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int c = i * 32 + lane;
      scale[i] = (is_q || is_k) && c < width ? wide(weight[c]) : 0.f;
    }
  }
  griddep_wait();

  const long long position = positions[row * positions_row + token * positions_token];
  if (!is_q && position < 0) return;
  const T* from = is_q   ? q + row * q_row + token * q_token + head * q_head
                  : is_k ? k + row * k_row + token * k_token + head * k_head
                         : v + row * v_row + token * v_token + head * v_head;
#pragma unroll
  for (int i = 0; i < EACH; i++) x[i] = i * 32 + lane < width ? wide(from[i * 32 + lane]) : 0.f;

  if (is_q || is_k) {
    if constexpr (NORM != NO_NORM) {
      float squares = 0.f;
#pragma unroll
      for (int i = 0; i < EACH; i++) squares = fmaf(x[i], x[i], squares);
      const float inverse = rsqrtf(warp_sum(squares) / width + eps);
#pragma unroll
      for (int i = 0; i < EACH; i++) x[i] = normed<T>(x[i], inverse, scale[i], NORM & 1, NORM & 2);
    }
    if (rotary > 0) {
#pragma unroll
      for (int i = 0; i < EACH; i++) shared[warp][i * 32 + lane] = x[i];
      __syncwarp();
      cos += row * cos_row + token * cos_token;
      sin += row * sin_row + token * sin_token;
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int c = i * 32 + lane, half = rotary / 2;
        if (c >= rotary) continue;
        const bool real = interleaved ? c % 2 == 0 : c < half;  // of a pair that turns
        const int pair = interleaved ? c / 2 : c % half, apart = interleaved ? 1 : half;
        const float other = shared[warp][real ? c + apart : c - apart];
        x[i] = x[i] * wide(cos[pair]) + (real ? -other : other) * wide(sin[pair]);
      }
    }
  }

  T* to = turned + (((long long)row * tokens + token) * heads + head) * k_width;
  if (!is_q) {
    const long long slot = ring > 0 ? position % ring : position;
    if (slot >= room) return;  // a program has refused such a prompt
    to = is_k ? k_cache + row * k_cache_row + slot * k_cache_slot + head * k_cache_head
              : v_cache + row * v_cache_row + slot * v_cache_slot + head * v_cache_head;
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    if (i * 32 + lane < width) to[i * 32 + lane] = narrow<T>(x[i]);
  }
}
