// A few tokens through up to six weights that lie where they lie:
//
//   y[n, f] = end( sum_d norm(x)[n, d] * w[f, d] )            x `N D`, w_i `F_i D`, out `N F_0 + .. + F_5`
//
// with an RMSNorm in front, or none, and one of these at the end: nothing, an activation, the activation of one weight's
// result times the other's, a residual. Each is rounded where the plain functions round.
//
// A step is bound by reading the weights, once. So a block of 128 threads takes ROWS rows of weights and all tokens; its
// threads share a row's columns, 16 bytes a load, eight loads in flight: the first of them, the norm's weight and the
// biases are asked for before the kernel in front has ended, and each that is used up makes room for the next at once.
// Where there are too few rows to keep all processors busy, blocks share a row's columns too (gridDim.y of them), and
// the last to arrive adds their sums, in order. In which order a sum is taken depends on the weight's shape alone:
// neither on how many tokens there are nor on which thread was first.
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
// NORM: in front, by its options. A processor has registers for at least so many blocks as the bounds say.
template <class T, int VEC, int TOKENS, int ROWS, Norm NORM>
__global__ void __launch_bounds__(THREADS, TOKENS <= 2 ? 4 : 3)
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
  const T* row[ROWS];  // instead of one that is not there the first, so that no load hangs on a condition of its own
#pragma unroll
  for (int i = 0; i < ROWS; i++) row[i] = stacked(stacked(i).weight == nullptr ? 0 : i).weight;

  // This block's columns, as vectors. Of the few behind the last vector the last block's threads take one each.
  const int vectors = width / VEC, rest = width - vectors * VEC;
  const int share = (vectors + gridDim.y - 1) / gridDim.y;
  const int begin = blockIdx.y * share, stop = min(vectors, begin + share);

  const int t = threadIdx.x, lane = t % 32;
  Bits<T, VEC> w[AHEAD][ROWS], scale[AHEAD];
  auto fetch = [&](int a, int v) {  // the v-th vector of every row, and of the norm's weight
    if (v >= stop) return;
#pragma unroll
    for (int i = 0; i < ROWS; i++) w[a][i] = load_bits_once<VEC>(row[i] + v * VEC);
    if constexpr (NORM != NO_NORM) scale[a] = load_bits<VEC>(norm_weight + v * VEC);
  };

#pragma unroll
  for (int a = 0; a < AHEAD; a++) fetch(a, begin + t + a * THREADS);
  // At the end thread t takes the t-th sum, of token t / ROWS and row t % ROWS.
  const T* bias = t < TOKENS * ROWS ? stacked(t % ROWS).bias : nullptr;
  const T b = bias ? *bias : narrow<T>(0.f);
  griddep_wait();

  auto token = [&](int n) { return x + min(n, tokens - 1) * x_stride; };  // as of rows: instead of none, the last
  float inverse[TOKENS];
  if constexpr (NORM != NO_NORM) {
#pragma unroll
    for (int n = 0; n < TOKENS; n++) inverse[n] = 0.f;
    for (int v = t; v < vectors; v += THREADS) {
      Bits<T, VEC> part[TOKENS];
#pragma unroll
      for (int n = 0; n < TOKENS; n++) part[n] = load_bits<VEC>(token(n) + v * VEC);
#pragma unroll
      for (int n = 0; n < TOKENS; n++) inverse[n] = add_squares(inverse[n], numbers_of<T, VEC>(part[n]));
    }
    if (t < rest) {
#pragma unroll
      for (int n = 0; n < TOKENS; n++) inverse[n] = add_squares(inverse[n], load<1>(token(n) + vectors * VEC + t));
    }
    block_sum<TOKENS, WARPS>(inverse, squares);
#pragma unroll
    for (int n = 0; n < TOKENS; n++) inverse[n] = rsqrtf(inverse[n] / width + eps);
  }

  float sums[TOKENS * ROWS];
#pragma unroll
  for (int i = 0; i < TOKENS * ROWS; i++) sums[i] = 0.f;
  auto add = [&](int d, const auto& by, const auto(&columns)[ROWS]) {  // the products of the columns from d on
    constexpr int N = sizeof(by) / sizeof(T);
    Bits<T, N> part[TOKENS];
#pragma unroll
    for (int n = 0; n < TOKENS; n++) part[n] = load_bits<N>(token(n) + d);
#pragma unroll
    for (int n = 0; n < TOKENS; n++) {
      if (n >= tokens) continue;
      const Vec<T, N> numbers = numbers_of<T, N>(part[n]);
#pragma unroll
      for (int j = 0; j < N; j++) {
        float value = wide(numbers.at[j]);
        if constexpr (NORM != NO_NORM) value = normed<T>(value, inverse[n], wide(by.at[j]), NORM & 1, NORM & 2);
#pragma unroll
        for (int i = 0; i < ROWS; i++)
          sums[n * ROWS + i] = fmaf(value, wide(columns[i].at[j]), sums[n * ROWS + i]);
      }
    }
  };
  for (int from = begin + t; from < stop; from += AHEAD * THREADS) {
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      const int v = from + a * THREADS;
      if (v >= stop) continue;
      Vec<T, VEC> by, columns[ROWS];
      if constexpr (NORM != NO_NORM) by = numbers_of<T, VEC>(scale[a]);
#pragma unroll
      for (int i = 0; i < ROWS; i++) columns[i] = numbers_of<T, VEC>(w[a][i]);
      add(v * VEC, by, columns);
      fetch(a, v + AHEAD * THREADS);
    }
  }
  if (t < rest && blockIdx.y == gridDim.y - 1) {
    const int d = vectors * VEC + t;
    Vec<T, 1> by, columns[ROWS];
    if constexpr (NORM != NO_NORM) by = load<1>(norm_weight + d);
#pragma unroll
    for (int i = 0; i < ROWS; i++) columns[i] = load<1>(row[i] + d);
    add(d, by, columns);
  }

  // Thread t takes the t-th sum: of its warps, then of its blocks.
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
  // A bias in front of a residual stands behind an edge of its own, and is rounded by itself.
  if (t < TOKENS * ROWS) sum[t] = end == RESIDUAL ? rounded<T>(rounded<T>(mine) + wide(b)) : rounded<T>(mine + wide(b));
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
