// sum = x + residual;  out = rms_norm(sum) * weight          x, residual `N D`, weight `D`
//
// A block takes a row, and each thread keeps its part of the sum in registers, so that x and residual are read once and
// the sum not at all. Of a row too wide for that a thread reads the rest of its own sums again.
#include "common.cuh"

template <class T, int VEC> __device__ __forceinline__ Vec<T, VEC> added(Vec<T, VEC> x, const Vec<T, VEC>& y) {
#pragma unroll
  for (int i = 0; i < VEC; i++) x.at[i] = narrow<T>(wide(x.at[i]) + wide(y.at[i]));
  return x;
}

// T: of all tensors. VEC: numbers a load, of which the width is a multiple. KEPT: vectors that a thread keeps.
template <class T, int VEC, int KEPT, int THREADS>
__global__ void __launch_bounds__(THREADS, 1)
    add_rms_norm(const T* x, long long x_stride, const T* residual, long long residual_stride, const T* weight, T* sum,
                 T* out, int width, float eps, int zero_centered, int scale_in_fp32) {
  __shared__ float parts[THREADS / 32][1];
  griddep_launch();
  const int vectors = width / VEC;
  x += blockIdx.x * x_stride;
  residual += blockIdx.x * residual_stride;
  sum += (long long)blockIdx.x * width;
  out += (long long)blockIdx.x * width;

  Bits<T, VEC> scale[KEPT], one[KEPT], two[KEPT];
#pragma unroll
  for (int k = 0; k < KEPT; k++) {  // before the kernel in front has ended: it writes no weight
    const int v = threadIdx.x + k * THREADS;
    if (v < vectors) scale[k] = load_bits<VEC>(weight + v * VEC);
  }
  griddep_wait();

#pragma unroll
  for (int k = 0; k < KEPT; k++) {  // all of them asked for before the first sum is stored
    const int v = threadIdx.x + k * THREADS;
    if (v >= vectors) continue;
    one[k] = load_bits<VEC>(x + v * VEC);
    two[k] = load_bits<VEC>(residual + v * VEC);
  }
  Vec<T, VEC> kept[KEPT];
  float squares[1] = {0.f};
#pragma unroll
  for (int k = 0; k < KEPT; k++) {
    const int v = threadIdx.x + k * THREADS;
    if (v >= vectors) continue;
    kept[k] = added(numbers_of<T, VEC>(one[k]), numbers_of<T, VEC>(two[k]));
    squares[0] = add_squares(squares[0], kept[k]);
    store<VEC>(sum + v * VEC, kept[k]);
  }
  for (int v = threadIdx.x + KEPT * THREADS; v < vectors; v += THREADS) {
    const Vec<T, VEC> total = added(load<VEC>(x + v * VEC), load<VEC>(residual + v * VEC));
    squares[0] = add_squares(squares[0], total);
    store<VEC>(sum + v * VEC, total);
  }
  block_sum<1, THREADS / 32>(squares, parts);
  const float inverse = rsqrtf(squares[0] / width + eps);

  auto write = [&](int v, Vec<T, VEC> total, const Vec<T, VEC>& by) {
#pragma unroll
    for (int i = 0; i < VEC; i++)
      total.at[i] = narrow<T>(normed<T>(wide(total.at[i]), inverse, wide(by.at[i]), zero_centered, scale_in_fp32));
    store<VEC>(out + v * VEC, total);
  };
#pragma unroll
  for (int k = 0; k < KEPT; k++) {
    const int v = threadIdx.x + k * THREADS;
    if (v < vectors) write(v, kept[k], numbers_of<T, VEC>(scale[k]));
  }
  for (int v = threadIdx.x + KEPT * THREADS; v < vectors; v += THREADS)
    write(v, load<VEC>(sum + v * VEC), load<VEC>(weight + v * VEC));
}
