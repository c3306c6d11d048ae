// What every kernel of this folder begins with. The same text is compiled for a GPU and, by the tests, for a CPU, where
// `simt.hpp` gives each thread a fiber.
#pragma once
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define DYNAMIC_SHARED(T, name)                                     \
  extern __shared__ __align__(16) unsigned char name##_bytes[];     \
  T* name = reinterpret_cast<T*>(name##_bytes)

// Programmatic dependent launch: wait until what the kernel before wrote can be read; allow the next kernel to begin.
__device__ __forceinline__ void griddep_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void griddep_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Begin to bring what lies at p from memory. What another kernel still writes there is not read too early by that: all
// of them read and write through the cache it is brought to.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
#else
#include "simt.hpp"

// A launch begins when the one before it has ended.
__device__ inline void griddep_wait() {}
__device__ inline void griddep_launch() {}
#endif

typedef __nv_bfloat16 bf16;
typedef __half fp16;

constexpr unsigned ALL_LANES = 0xffffffffu;

// --- numbers -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ float wide(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float wide(fp16 x) { return __half2float(x); }

template <class T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ fp16 narrow<fp16>(float x) { return __float2half_rn(x); }

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// x as T would hold it.
template <class T> __device__ __forceinline__ float rounded(float x) { return wide(narrow<T>(x)); }

// --- vectors of 2 to 16 bytes ------------------------------------------------------------------------------------

template <class T, int N> struct alignas(sizeof(T) * N) Vec {
  T at[N];
};

template <int N, class T> __device__ __forceinline__ Vec<T, N> load(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}

// The bytes of a vector, as one load brings them. To take them apart is to wait for them, and a compiler does that
// where the load stands: so of what is asked for ahead the bytes are kept, and taken apart where numbers are needed.
template <int BYTES> struct BitsOf;
template <> struct BitsOf<2> { using type = unsigned short; };
template <> struct BitsOf<4> { using type = unsigned; };
template <> struct BitsOf<8> { using type = uint2; };
template <> struct BitsOf<16> { using type = uint4; };
template <class T, int N> using Bits = typename BitsOf<sizeof(T) * N>::type;

template <int N, class T> __device__ __forceinline__ Bits<T, N> load_bits(const T* p) {
  return *reinterpret_cast<const Bits<T, N>*>(p);
}

// Of what nobody reads again, so that it takes no place in the caches: the weights.
template <int N, class T> __device__ __forceinline__ Bits<T, N> load_bits_once(const T* p) {
  return __ldcs(reinterpret_cast<const Bits<T, N>*>(p));
}

template <class T, int N> __device__ __forceinline__ Vec<T, N> numbers_of(Bits<T, N> bits) {
  union {
    Bits<T, N> bits;
    Vec<T, N> numbers;
  } both = {bits};
  return both.numbers;
}

template <class T, int N> __device__ __forceinline__ Bits<T, N> bits_of(const Vec<T, N>& numbers) {
  union {
    Vec<T, N> numbers;
    Bits<T, N> bits;
  } both = {numbers};
  return both.bits;
}

template <int N, class T> __device__ __forceinline__ Vec<T, N> load_once(const T* p) {
  return numbers_of<T, N>(load_bits_once<N>(p));
}

template <int N, class T> __device__ __forceinline__ void store(T* p, const Vec<T, N>& value) {
  *reinterpret_cast<Vec<T, N>*>(p) = value;
}

// sum + the squares of a vector, one after another.
template <class T, int N> __device__ __forceinline__ float add_squares(float sum, const Vec<T, N>& x) {
#pragma unroll
  for (int i = 0; i < N; i++) sum = fmaf(wide(x.at[i]), wide(x.at[i]), sum);
  return sum;
}

// --- sums over threads, always in the same order -----------------------------------------------------------------

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(ALL_LANES, x, lanes);
  return x;
}

// The sums of N numbers of each thread over a block of WARPS warps, in every thread. `parts` may be used again after
// the next barrier.
template <int N, int WARPS> __device__ __forceinline__ void block_sum(float (&x)[N], float (&parts)[WARPS][N]) {
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = warp_sum(x[i]);
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < N; i++) parts[threadIdx.x / 32][i] = x[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; i++) {
    x[i] = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) x[i] += parts[w][i];
  }
}

// --- RMSNorm, rounded where functional/norm.py rounds ------------------------------------------------------------

// A kernel's template takes one of these; its lowest bits are the options of `normed`.
enum Norm { NO_NORM, RMS = 4, RMS_ZERO_CENTERED = 5, RMS_IN_FP32 = 6, RMS_ZERO_CENTERED_IN_FP32 = 7 };

// inverse: 1 / sqrt(mean(x^2) + eps) of the row.
template <class T>
__device__ __forceinline__ float normed(float x, float inverse, float weight, bool zero_centered, bool scale_in_fp32) {
  if (scale_in_fp32) return rounded<T>((zero_centered ? 1.f + weight : weight) * (x * inverse));
  return rounded<T>((zero_centered ? rounded<T>(1.f + weight) : weight) * rounded<T>(x * inverse));
}

// --- activations, of a T and rounded to a T ----------------------------------------------------------------------

enum Activation { NONE, SILU, GELU, GELU_TANH, RELU2 };

template <class T> __device__ __forceinline__ float activated(float x, int activation) {
  switch (activation) {
    case SILU:
      return rounded<T>(x / (1.f + expf(-x)));
    case GELU:
      return rounded<T>(0.5f * x * (1.f + erff(x * 0.70710678118654752f)));
    case GELU_TANH:
      return rounded<T>(0.5f * x * (1.f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x))));
    case RELU2:
      return x <= 0.f ? 0.f : rounded<T>(x * x);  // of NaN, NaN
    default:
      return x;
  }
}
