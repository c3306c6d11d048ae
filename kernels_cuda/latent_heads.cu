// The two products of absorbed attention with kv_b, whose head h has N rows for keys and V for values, of L columns:
//
//   queries_in:   out[b, h, :L] = sum_n q[b, h, n] kv_b[h, n, :],  out[b, h, L:] = q[b, h, N:]        `B H LR`, fp32
//   values_out:   out[b, h, v] = o[b, h] . kv_b[h, N + v],  o = the shares of `mla_decode` added up   `B H V`
//
// Each is bound by reading its half of kv_b once, for TOKENS rows of the batch; its first loads leave before the kernel
// in front has ended. Sums are taken in one order, and fp32 until the end, as the plain function has it.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// The vector at p whose first number is the column-th of width, with zeros behind the end.
template <int VEC, class T> __device__ __forceinline__ Bits<T, VEC> part_of(const T* p, int column, int width) {
  if (column + VEC <= width) return load_bits_once<VEC>(p + column);
  Vec<T, VEC> found;
#pragma unroll
  for (int j = 0; j < VEC; j++) found.at[j] = column + j < width ? p[column + j] : narrow<T>(0.f);
  return bits_of(found);
}

// 16 threads share a row of 16 VEC columns; the block's 16 groups of them share a head's rows.
template <class T, int VEC, int TOKENS>
__global__ void __launch_bounds__(THREADS, 2)
    queries_in(const T* q, long long q_row, long long q_head, const T* kv_b, long long kv_b_row, float* out, int tokens,
               int nope, int rows, int rotary, int values) {
  constexpr int ACROSS = 16, GROUPS = THREADS / ACROSS, AHEAD = 8, COLUMNS = ACROSS * VEC;
  __shared__ float parts[WARPS][TOKENS][COLUMNS];
  griddep_launch();
  const int tid = threadIdx.x, heads = gridDim.x, head = blockIdx.x, first = blockIdx.z * TOKENS;
  const int width = values + rotary;
  const int column = blockIdx.y * COLUMNS + tid % ACROSS * VEC;
  kv_b += (long long)head * rows * kv_b_row;
  q += first * q_row + head * q_head;
  out += ((long long)first * heads + head) * width;
  tokens = min(tokens - first, TOKENS);

  Bits<T, VEC> w[AHEAD];
  auto fetch = [&](int from) {
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      const int n = from + a * GROUPS;
      if (n < nope) w[a] = part_of<VEC>(kv_b + n * kv_b_row, column, values);
    }
  };
  fetch(tid / ACROSS);
  griddep_wait();

  float sums[TOKENS][VEC] = {};
  for (int from = tid / ACROSS; from < nope; from += AHEAD * GROUPS) {
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      const int n = from + a * GROUPS;
      if (n >= nope) continue;
      const Vec<T, VEC> part = numbers_of<T, VEC>(w[a]);
#pragma unroll
      for (int b = 0; b < TOKENS; b++) {
        if (b >= tokens) continue;
        const float x = wide(q[b * q_row + n]);
#pragma unroll
        for (int j = 0; j < VEC; j++) sums[b][j] = fmaf(x, wide(part.at[j]), sums[b][j]);
      }
    }
    fetch(from + AHEAD * GROUPS);
  }
#pragma unroll
  for (int i = 0; i < TOKENS * VEC; i++) {
    float& sum = sums[i / VEC][i % VEC];
    sum += __shfl_xor_sync(ALL_LANES, sum, ACROSS);
    if (tid % 32 < ACROSS) parts[tid / 32][i / VEC][tid % ACROSS * VEC + i % VEC] = sum;
  }
  __syncthreads();
  for (int i = tid; i < tokens * COLUMNS; i += THREADS) {
    const int b = i / COLUMNS, c = i % COLUMNS, at = blockIdx.y * COLUMNS + c;
    float sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sum += parts[warp][b][c];
    if (at < values) out[(long long)b * heads * width + at] = sum;
  }
  if (blockIdx.y) return;
  for (int i = tid; i < tokens * rotary; i += THREADS) {
    const int b = i / rotary, r = i % rotary;
    out[(long long)b * heads * width + values + r] = wide(q[b * q_row + nope + r]);
  }
}

// A warp takes ROWS of a head's rows, a block 8 ROWS of them.
template <class T, int VEC, int TOKENS>
__global__ void __launch_bounds__(THREADS, 2)
    values_out(const float* partial, const float* stats, const T* kv_b, long long kv_b_row, T* out, int tokens,
               int nope, int rows, int values, int shares) {
  constexpr int ROWS = 8;
  DYNAMIC_SHARED(float, o);  // `TOKENS L`
  griddep_launch();
  const int tid = threadIdx.x, lane = tid % 32, heads = gridDim.x, head = blockIdx.x, first = blockIdx.z * TOKENS;
  const int wide_of_v = rows - nope, row = (blockIdx.y * WARPS + tid / 32) * ROWS;
  kv_b += ((long long)head * rows + nope + row) * kv_b_row;
  tokens = min(tokens - first, TOKENS);

  Bits<T, VEC> w[ROWS];
  auto fetch = [&](int column) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      if (column < values && row + i < wide_of_v) w[i] = part_of<VEC>(kv_b + i * kv_b_row, column, values);
    }
  };
  fetch(lane * VEC);
  griddep_wait();

  for (int b = 0; b < tokens; b++) {
    const long long here = ((long long)(first + b) * heads + head) * shares;
    float most = -infinity(), total = 0.f;
    for (int s = 0; s < shares; s++) {
      const Vec<float, 2> each = load<2>(stats + 2 * (here + s));
      if (each.at[1] != 0.f) most = fmaxf(most, each.at[0]);
    }
    for (int s = 0; s < shares; s++) {
      const Vec<float, 2> each = load<2>(stats + 2 * (here + s));
      if (each.at[1] != 0.f) total = fmaf(expf(each.at[0] - most), each.at[1], total);
    }
    for (int column = tid; column < values; column += THREADS) {
      float sum = 0.f;
#pragma unroll 4
      for (int s = 0; s < shares; s++) {
        const Vec<float, 2> each = load<2>(stats + 2 * (here + s));
        if (each.at[1] != 0.f) sum = fmaf(expf(each.at[0] - most), partial[(here + s) * values + column], sum);
      }
      o[b * values + column] = total != 0.f ? sum / total : 0.f;  // a query that sees nothing
    }
  }
  __syncthreads();

  float sums[TOKENS][ROWS] = {};
  for (int column = lane * VEC; column < values; column += 32 * VEC) {
    Vec<T, VEC> part[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) part[i] = numbers_of<T, VEC>(w[i]);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
      if (column + j >= values) continue;
#pragma unroll
      for (int b = 0; b < TOKENS; b++) {
        if (b >= tokens) continue;
        const float x = o[b * values + column + j];
#pragma unroll
        for (int i = 0; i < ROWS; i++)  // of a row that is not there, whatever: nobody reads it
          sums[b][i] = fmaf(x, wide(part[i].at[j]), sums[b][i]);
      }
    }
    fetch(column + 32 * VEC);
  }
#pragma unroll
  for (int i = 0; i < TOKENS * ROWS; i++) {
    const int b = i / ROWS, v = row + i % ROWS;
    const float sum = warp_sum(sums[b][i % ROWS]);
    if (lane == 0 && b < tokens && v < wide_of_v)
      out[((long long)(first + b) * heads + head) * wide_of_v + v] = narrow<T>(sum);
  }
}
