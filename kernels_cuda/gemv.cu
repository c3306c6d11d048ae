// A few tokens through up to six weights that lie where they lie:
//
//   y[n, f] = end( sum_d norm(x)[n, d] * w[f, d] )            x `N D`, w_i `F_i D`, out `N F_0 + .. + F_5`
//
// with an RMSNorm in front, or none, and one of these at the end: nothing, an activation, the activation of one weight's
// result times the other's, a residual. Each is rounded where the plain functions round.
//
// A step is bound by reading the weights, once. So a block of 128 threads takes ROWS rows of weights and all tokens; its
// threads share a row's columns, 16 bytes a load, several loads in flight, and the first of them leave before the kernel
// in front has ended. Where there are too few rows to keep all processors busy, blocks share a row's columns too
// (gridDim.y of them), and the last to arrive adds their sums, in order. In which order a sum is taken depends on the
// weight's shape alone: neither on how many tokens there are nor on which thread was first.
#include "common.cuh"

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;

enum End { PLAIN, ACT, GATED, RESIDUAL };

// The weights, stacked: row f of the stack is row f - first of one of them.
template <class T> struct Stack {
  const T* weight[6];
  const T* bias[6];
  int rows[6];
  long long stride[6];
};

// Row f and its bias; null where there is none.
template <class T> struct Row {
  const T* weight;
  const T* bias;
};

template <class T> __device__ __forceinline__ Row<T> row_of(const Stack<T>& stack, int f) {
#pragma unroll
  for (int i = 0; i < 6; i++) {
    if (f < stack.rows[i]) return {stack.weight[i] + f * stack.stride[i], stack.bias[i] ? stack.bias[i] + f : nullptr};
    f -= stack.rows[i];
  }
  return {nullptr, nullptr};
}

// T: of all tensors. VEC: numbers a load. TOKENS: as many as there are, or more. ROWS: of weights that a block takes.
// NORM: in front, by its options.
template <class T, int VEC, int TOKENS, int ROWS, Norm NORM>
__global__ void __launch_bounds__(THREADS)
    gemv(const T* x, long long x_stride, const T* norm_weight, const T* w0, const T* w1, const T* w2, const T* w3,
         const T* w4, const T* w5, const T* b0, const T* b1, const T* b2, const T* b3, const T* b4, const T* b5, int f0,
         int f1, int f2, int f3, int f4, int f5, long long s0, long long s1, long long s2, long long s3, long long s4,
         long long s5, const T* residual, long long residual_stride, T* out, float* partial, unsigned* arrived,
         int tokens, int width, int end, int activation, float eps) {
  constexpr int AHEAD = 8 / ROWS;  // loads of each row in flight
  __shared__ float parts[WARPS][TOKENS * ROWS];
  __shared__ float squares[WARPS][TOKENS];
  __shared__ float sum[TOKENS * ROWS];
  __shared__ bool last;
  griddep_launch();

  const Stack<T> stack = {
      {w0, w1, w2, w3, w4, w5}, {b0, b1, b2, b3, b4, b5}, {f0, f1, f2, f3, f4, f5}, {s0, s1, s2, s3, s4, s5}};
  const int outputs = end == GATED ? f0 : f0 + f1 + f2 + f3 + f4 + f5;
  const int taken = end == GATED ? ROWS / 2 : ROWS;  // outputs of this block
  const int first = blockIdx.x * taken;
  auto stacked = [&](int i) {  // the block's i-th row of the stack; gated: rows of gate and up in turn
    const int f = end == GATED ? first + i / 2 : first + i;
    return f < outputs ? row_of(stack, end == GATED && i % 2 ? f + f0 : f) : Row<T>{nullptr, nullptr};
  };
  const T* row[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; i++) row[i] = stacked(i).weight;

  // This block's columns, as vectors; the last of a row may be shorter than VEC.
  const int vectors = (width + VEC - 1) / VEC;
  const int share = (vectors + gridDim.y - 1) / gridDim.y;
  const int begin = blockIdx.y * share, stop = min(vectors, begin + share);
  auto part_of = [&](const T* p, int v, bool once) {  // the v-th vector, with zeros behind the end
    if ((v + 1) * VEC <= width) return once ? load_once<VEC>(p + v * VEC) : load<VEC>(p + v * VEC);
    Vec<T, VEC> found;
#pragma unroll
    for (int j = 0; j < VEC; j++) found.at[j] = v * VEC + j < width ? p[v * VEC + j] : narrow<T>(0.f);
    return found;
  };

  Vec<T, VEC> w[AHEAD][ROWS];
  auto fetch = [&](int from) {
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      const int v = from + a * THREADS;
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
        if (v < stop && row[i] != nullptr) w[a][i] = part_of(row[i], v, true);
      }
    }
  };

  fetch(begin + threadIdx.x);
  griddep_wait();

  float inverse[TOKENS];
  if constexpr (NORM != NO_NORM) {
#pragma unroll
    for (int n = 0; n < TOKENS; n++) {
      inverse[n] = 0.f;
      if (n >= tokens) continue;
      for (int v = threadIdx.x; v < vectors; v += THREADS) {
        const Vec<T, VEC> part = part_of(x + n * x_stride, v, false);
#pragma unroll
        for (int j = 0; j < VEC; j++) inverse[n] = fmaf(wide(part.at[j]), wide(part.at[j]), inverse[n]);
      }
    }
    block_sum<TOKENS, WARPS>(inverse, squares);
#pragma unroll
    for (int n = 0; n < TOKENS; n++) inverse[n] = rsqrtf(inverse[n] / width + eps);
  }

  float sums[TOKENS * ROWS];
#pragma unroll
  for (int i = 0; i < TOKENS * ROWS; i++) sums[i] = 0.f;
  for (int from = begin + threadIdx.x; from < stop; from += AHEAD * THREADS) {
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      const int v = from + a * THREADS;
      if (v >= stop) continue;
      Vec<T, VEC> scale;
      if constexpr (NORM != NO_NORM) scale = part_of(norm_weight, v, false);
#pragma unroll
      for (int n = 0; n < TOKENS; n++) {
        if (n >= tokens) continue;
        const Vec<T, VEC> part = part_of(x + n * x_stride, v, false);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
          float value = wide(part.at[j]);
          if constexpr (NORM != NO_NORM) value = normed<T>(value, inverse[n], wide(scale.at[j]), NORM & 1, NORM & 2);
#pragma unroll
          for (int i = 0; i < ROWS; i++)  // of a row that is not there, whatever: nobody reads it
            sums[n * ROWS + i] = fmaf(value, wide(w[a][i].at[j]), sums[n * ROWS + i]);
        }
      }
    }
    fetch(from + AHEAD * THREADS);
  }

  // Thread t takes the t-th sum: of its warps, then of its blocks.
  const int t = threadIdx.x, lane = t % 32;
#pragma unroll
  for (int i = 0; i < TOKENS * ROWS; i++) sums[i] = warp_sum(sums[i]);
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < TOKENS * ROWS; i++) parts[t / 32][i] = sums[i];
  }
  __syncthreads();
  float mine = 0.f;
  if (t < TOKENS * ROWS) {
    for (int warp = 0; warp < WARPS; warp++) mine += parts[warp][t];
  }
  if (gridDim.y > 1) {
    float* here = partial + (long long)blockIdx.x * gridDim.y * (TOKENS * ROWS);
    if (t < TOKENS * ROWS) here[blockIdx.y * (TOKENS * ROWS) + t] = mine;
    __threadfence();
    __syncthreads();
    if (t == 0) {
      last = atomicAdd(&arrived[blockIdx.x], 1u) == gridDim.y - 1;
      if (last) arrived[blockIdx.x] = 0;  // for the next launch
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    mine = 0.f;
    if (t < TOKENS * ROWS) {
      for (int y = 0; y < gridDim.y; y++) mine += __ldcg(&here[y * (TOKENS * ROWS) + t]);
    }
  }

  // And the t-th output.
  if (t < TOKENS * ROWS) {
    const T* bias = stacked(t % ROWS).bias;
    const float b = bias ? wide(*bias) : 0.f;
    // A bias in front of a residual stands behind an edge of its own, and is rounded by itself.
    sum[t] = end == RESIDUAL ? rounded<T>(rounded<T>(mine) + b) : rounded<T>(mine + b);
  }
  __syncthreads();
  const int n = t / taken, f = first + t % taken;
  if (n >= tokens || f >= outputs) return;
  const float* y = sum + n * ROWS + (t % taken) * (ROWS / taken);
  float value = y[0];
  if (end == ACT) value = activated<T>(value, activation);
  if (end == GATED) value = activated<T>(value, activation) * y[1];
  if (end == RESIDUAL) value += wide(residual[n * residual_stride + f]);
  out[(long long)n * outputs + f] = narrow<T>(value);
}
