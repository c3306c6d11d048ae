// A warp multiplies two small matrices: c `16 8` += a `16 16` b `16 8`, each spread over its lanes as
// mma.sync.m16n8k16 has it (PTX ISA, "Matrix Fragments for mma.m16n8k16").
//
// Half precision goes to the tensor cores, whose sums are fp32. fp32 does not: they would round its factors. Its lanes
// hand one another what they need, as all lanes do on a CPU.
#pragma once
#include "common.cuh"

// Lane 4 g + t has a[g, 2t..], a[g + 8, 2t..], a[g, 2t + 8..], a[g + 8, 2t + 8..], two numbers each;
template <class T> struct Left {
  Vec<T, 2> at[4];
};
// b[2t.., g] and b[2t + 8.., g]; and c[g, 2t], c[g, 2t + 1], c[g + 8, 2t], c[g + 8, 2t + 1].
template <class T> struct Right {
  Vec<T, 2> at[2];
};

template <class T> __device__ __forceinline__ Vec<T, 2> of_lane(Vec<T, 2> x, int lane) {
  union {
    Vec<T, 2> value;
    unsigned words[sizeof(Vec<T, 2>) / 4];
  } given = {x};
#pragma unroll
  for (unsigned& word : given.words) word = __shfl_sync(ALL_LANES, word, lane);
  return given.value;
}

template <class T> __device__ __forceinline__ float dot(Vec<T, 2> a, Vec<T, 2> b, float sum) {
  return fmaf(wide(a.at[1]), wide(b.at[1]), fmaf(wide(a.at[0]), wide(b.at[0]), sum));
}

template <class T> __device__ __forceinline__ void by_lanes(float (&c)[4], const Left<T>& a, const Right<T>& b) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const Vec<T, 2> upper = of_lane(a.at[2 * half], 4 * g + j), lower = of_lane(a.at[2 * half + 1], 4 * g + j);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const Vec<T, 2> column = of_lane(b.at[half], 4 * (2 * t + i) + j);
        c[i] = dot(upper, column, c[i]);
        c[2 + i] = dot(lower, column, c[2 + i]);
      }
    }
  }
}

#ifdef __CUDACC__
#define MULTIPLY(T, type)                                                                                          \
  __device__ __forceinline__ void multiply(float (&c)[4], const Left<T>& a, const Right<T>& b) {                   \
    const unsigned* x = reinterpret_cast<const unsigned*>(&a);                                                     \
    const unsigned* y = reinterpret_cast<const unsigned*>(&b);                                                     \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                                             \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                          \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                           \
        : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));                                       \
  }
MULTIPLY(bf16, "bf16")
MULTIPLY(fp16, "f16")
#undef MULTIPLY
#else
inline void multiply(float (&c)[4], const Left<bf16>& a, const Right<bf16>& b) { by_lanes(c, a, b); }
inline void multiply(float (&c)[4], const Left<fp16>& a, const Right<fp16>& b) { by_lanes(c, a, b); }
#endif
__device__ __forceinline__ void multiply(float (&c)[4], const Left<float>& a, const Right<float>& b) {
  by_lanes(c, a, b);
}

// --- fp32 as a sum of two numbers in half precision, so that a product of it is nearly that of fp32 --------------

template <class T> constexpr int PARTS = sizeof(T) == 4 ? 1 : 2;

template <class T> __device__ __forceinline__ void split(float x, T (&parts)[PARTS<T>]) {
  parts[0] = narrow<T>(x);
  if constexpr (PARTS<T> == 2) parts[1] = narrow<T>(x - wide(parts[0]));
}
