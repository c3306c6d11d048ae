// Right kernels: each shows one part of the machine, and gives the same bits in every order of threads and blocks.
#include <cooperative_groups.h>

#include "simt.hpp"

constexpr unsigned every_lane = 0xffffffffu;

// Every warp operation of every lane, a row each. The last warp need not be full.
__global__ void warp_operations(const int* x, int* y) {
  int n = blockDim.x, i = threadIdx.x, value = x[i], row = 0;
  auto put = [&](long long result) { y[row++ * n + i] = static_cast<int>(result); };
  put(__shfl_sync(every_lane, value, 3));
  put(__shfl_sync(every_lane, value, 13, 8));
  put(__shfl_up_sync(every_lane, value, 3));
  put(__shfl_up_sync(every_lane, value, 1, 4));
  put(__shfl_down_sync(every_lane, value, 1, 4));
  put(__shfl_xor_sync(every_lane, value, 2, 8));
  put(__ballot_sync(every_lane, value > 0));
  put(__any_sync(every_lane, value == 5));
  put(__all_sync(every_lane, value < 9));
  put(__reduce_add_sync(every_lane, value));
  put(__reduce_min_sync(every_lane, value));
  put(__reduce_max_sync(every_lane, value));
  put(__reduce_min_sync(every_lane, static_cast<unsigned>(value)));
  put(__reduce_and_sync(every_lane, static_cast<unsigned>(value)));
  put(__reduce_or_sync(every_lane, static_cast<unsigned>(value)));
  put(__reduce_xor_sync(every_lane, static_cast<unsigned>(value)));
  put(__match_any_sync(every_lane, value));
  put(__float2int_rz(__shfl_xor_sync(every_lane, value + 0.5, 1)));
  if (i % 32 < 8) value = __shfl_xor_sync(0x000000ffu, value, 1);  // some meet alone, then all meet
  put(__shfl_xor_sync(every_lane, value, 4));
}

// What the threads of a block learn of each other, over barriers in a loop. y: 3 rows of rounds.
__global__ void block_operations(const int* x, int* y, int rounds) {
  for (int round = 0; round < rounds; round++) {
    int value = x[round * blockDim.x + threadIdx.x];
    int count = __syncthreads_count(value > 0), all = __syncthreads_and(value > -9), any = __syncthreads_or(value > 8);
    if (threadIdx.x == round) y[round] = count, y[rounds + round] = all, y[2 * rounds + round] = any;
  }
}

// Each atomic on a word of its own, by every thread of every block.
__global__ void atomics(const int* x, int* i, unsigned* u, float* f, double* d, unsigned long long* l, __half2* h,
                        __nv_bfloat16* b) {
  int value = x[blockIdx.x * blockDim.x + threadIdx.x];
  atomicAdd(&i[0], value), atomicSub(&i[1], value), atomicMin(&i[2], value), atomicMax(&i[3], value);
  atomicAnd(&u[0], ~(1u << (value & 7))), atomicOr(&u[1], 1u << (value & 7)), atomicXor(&u[2], 1u << (value & 7));
  atomicInc(&u[3], 6u), atomicDec(&u[4], 6u), atomicMin(&u[5], value & 15u), atomicMax(&u[6], value & 15u);
  atomicAdd(&f[0], 1.0f), atomicAdd(&d[0], 0.5), atomicAdd(&l[0], 1ull << 33),
      atomicMax(&l[1], static_cast<unsigned long long>(value + 16));
  atomicAdd(h, __floats2half2_rn(1.0f, 2.0f)), atomicAdd(b, __float2bfloat16(1.0f));
  while (atomicCAS(&i[4], 0, 1) != 0) __nanosleep(20);  // a lock
  i[5] += value;
  __threadfence();
  atomicExch(&i[4], 0);
}

// A row's sum in 16-byte loads through shuffles, static and dynamic shared memory. NO_BARRIER plants the fault.
template <class T>
__global__ void __launch_bounds__(128) row_sum(const T* __restrict__ x, float* y, int n) {
  __shared__ float part[4];
  DYNAMIC_SHARED(float, total);
  constexpr int width = 16 / sizeof(T);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < n / width; i += blockDim.x) {
    uint4 loaded = reinterpret_cast<const uint4*>(x + static_cast<size_t>(blockIdx.x) * n)[i];
    const T* values = reinterpret_cast<const T*>(&loaded);
#pragma unroll
    for (int j = 0; j < width; j++) sum += static_cast<float>(values[j]);
  }
#pragma unroll
  for (int with = 16; with; with >>= 1) sum += __shfl_xor_sync(every_lane, sum, with);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
#ifndef NO_BARRIER
  __syncthreads();
#endif
  if (threadIdx.x == 0) total[0] = part[0] + part[1] + part[2] + part[3];
  __syncthreads();
  if (threadIdx.x == 96) y[blockIdx.x] = total[0];
}

// Whether a block finds its shared memory filled with NaN: it must, whatever the block before it left.
__global__ void poisoned(int* y, int n) {
  __shared__ float declared[33];
  DYNAMIC_SHARED(float, dynamic);
  if (threadIdx.x < 33) atomicAdd(&y[0], isnan(declared[threadIdx.x]));
  for (int i = threadIdx.x; i < n; i += blockDim.x) atomicAdd(&y[1], isnan(dynamic[i]));
  __syncthreads();
  if (threadIdx.x < 33) declared[threadIdx.x] = 0.0f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) dynamic[i] = 0.0f;
}

// The last block to come adds up what all have written. EARLY has each block count before it has written.
__global__ void last_block(const float* x, float* parts, unsigned* done, float* y) {
  __shared__ bool last;
#ifdef EARLY
  if (threadIdx.x == 0) last = atomicAdd(done, 1u) == gridDim.x - 1;
#endif
  float sum = x[blockIdx.x * 32 + threadIdx.x];
  for (int with = 16; with; with >>= 1) sum += __shfl_xor_sync(every_lane, sum, with);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
  __threadfence();
#ifndef EARLY
  if (threadIdx.x == 0) last = atomicAdd(done, 1u) == gridDim.x - 1;
#endif
  __syncthreads();
  if (!last || threadIdx.x) return;
  float total = 0.0f;
  for (int i = 0; i < gridDim.x; i++) total += __ldcg(&parts[i]);
  *y = total;
}

// Blocks that wait for each other: a token goes round, then all meet. Each has shared memory of its own.
__global__ void ring(volatile int* token, const int* x, int* y, int* sums) {
  __shared__ int mine[32];
  mine[threadIdx.x] = x[blockIdx.x * 32 + threadIdx.x];
  if (threadIdx.x == 0)
    while (*token != blockIdx.x) {
    }
  __syncthreads();
  y[blockIdx.x * 32 + threadIdx.x] = mine[threadIdx.x ^ 1] + (blockIdx.x ? y[(blockIdx.x - 1) * 32 + threadIdx.x] : 0);
  __syncthreads();
  if (threadIdx.x == 0) *token = blockIdx.x + 1;
  cooperative_groups::this_grid().sync();
  int sum = 0;
  for (int block = 0; block < gridDim.x; block++) sum += y[block * 32 + threadIdx.x];
  sums[blockIdx.x * 32 + threadIdx.x] = sum + mine[threadIdx.x];
}

// Two blocks write one word.
__global__ void blocks_race(int* y) {
  if (threadIdx.x == 0) *y = blockIdx.x;
}

// Functions of one number, a row each; then of bits.
__global__ void functions(const float* x, float* y, int* bits, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, row = 0;
  if (i >= n) return;
  float a = x[i];
  auto put = [&](float result) { y[row++ * n + i] = result; };
  put(rsqrtf(a)), put(__expf(a)), put(__logf(a)), put(exp2f(a)), put(log1pf(a)), put(tanhf(a)), put(erff(a));
  put(__frcp_rn(a)), put(__fdividef(1.0f, a)), put(__fsqrt_rn(a)), put(__powf(a, 1.5f)), put(__saturatef(a));
  put(fmaf(a, a, -2.0f)), put(max(a, 1)), put(min(a, 1.0f)), put(max(a, nanf(""))),
      put(__bfloat162float(__float2bfloat16(a)));
  put(__half2float(__float2half(a)));
  int b = __float_as_int(a);
  bits[i] = __popc(b), bits[n + i] = __ffs(b), bits[2 * n + i] = __clz(b), bits[3 * n + i] = __brev(b) == 0;
  bits[4 * n + i] = static_cast<int>(__umulhi(b, b)), bits[5 * n + i] = __float2int_rn(a),
               bits[6 * n + i] = __int_as_float(b) == a;
}

// Loads and stores that say how they are cached.
__global__ void cached(const float4* x, float4* y) {
  int i = threadIdx.x;
  __stcs(&y[4 * i], __ldg(&x[4 * i])), __stcg(&y[4 * i + 1], __ldcg(&x[4 * i + 1]));
  __stwb(&y[4 * i + 2], __ldcs(&x[4 * i + 2])), __stwt(&y[4 * i + 3], __ldca(&x[4 * i + 3]));
}

// One word over the end of shared memory.
__global__ void shared_overrun(float* y) {
  __shared__ float part[32];
  part[threadIdx.x + 1] = 1.0f;
  __syncthreads();
  y[threadIdx.x] = part[threadIdx.x];
}

__global__ void overflow(int* y) { y[0] = y[0] + 1; }
