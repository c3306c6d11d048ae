// out = x of rank 0 + x of rank 1, on both of them                                                          x, out `N`
//
// Each rank writes its x into memory of its peer, raises a mark behind it, waits for the peer's mark in memory of its own
// and adds. The sum is taken in fp32, rank 0's number first, and rounded once: both ranks get the same bits.
//
// A block is a channel: it speaks to the same block of the peer, and nothing it touches is touched by another. Messages
// of a channel are numbered from 1, and lie by turns in one of two slots, so that nobody waits until a message was read:
// a rank writes message s where s - 2 lay, in a kernel that began when that of s - 1 had ended, which had seen the peer's
// mark s - 1; and the peer raised that in a kernel that began when its own of s - 2, with all its reads, had ended. So
// the one can be a message ahead of the other, never two. The number lives on the device, so a captured graph replays it.
//
// A wait ends at a limit. Then the parts of `out` that did not come are NaN, `Control` says why, and from there on
// every launch gives up at once and writes nothing to the peer: what it still has to read must not change, and it waits
// in vain for a later message, up to its own limit. So neither rank takes a wrong sum for a right one.
#include "peers.cuh"

enum Failure : unsigned long long { FINE, LATE, OTHER_LENGTH };

// bytes: of the message.
struct Mark {
  unsigned long long sequence, bytes;
};

// Memory of a rank that its peer writes.
template <int CHANNELS, int PART> struct alignas(16) Exchange {
  unsigned char parts[2][CHANNELS][PART];
  Mark marks[2][CHANNELS];
};

// What a rank keeps for itself. sent: messages, of each channel. bytes: of a message of another length than one's own,
// and of that.
template <int CHANNELS> struct Control {
  unsigned long long sent[CHANNELS], failure, channel, sequence, bytes[2];
};

// Copy a part of x into a message.
template <int VEC, int THREADS, class T> __device__ __forceinline__ void send(const T* x, T* message, int count) {
  const int vectors = count / VEC;
  for (int v = threadIdx.x; v < vectors; v += THREADS) store<VEC>(message + v * VEC, load<VEC>(x + v * VEC));
  for (int i = vectors * VEC + threadIdx.x; i < count; i += THREADS) message[i] = x[i];
}

template <class T> __device__ __forceinline__ T summed(T mine, T others, int rank) {
  return narrow<T>(rank == 0 ? wide(mine) + wide(others) : wide(others) + wide(mine));
}

template <int VEC, int THREADS, class T>
__device__ __forceinline__ void add(const T* x, const T* message, T* out, int count, int rank) {
  const int vectors = count / VEC;
  for (int v = threadIdx.x; v < vectors; v += THREADS) {
    Vec<T, VEC> sum = load<VEC>(x + v * VEC);
    const Vec<T, VEC> others = load<VEC>(message + v * VEC);
#pragma unroll
    for (int i = 0; i < VEC; i++) sum.at[i] = summed(sum.at[i], others.at[i], rank);
    store<VEC>(out + v * VEC, sum);
  }
  for (int i = vectors * VEC + threadIdx.x; i < count; i += THREADS) out[i] = summed(x[i], message[i], rank);
}

// One thread's: wait for a message of so many bytes, `limit` nanoseconds at most. What was wrong with it.
__device__ __forceinline__ Failure awaited(const Mark& mark, unsigned long long sequence, unsigned long long bytes,
                                           long long limit) {
  const long long begin = nanoseconds();
  while (load_acquire(&mark.sequence) != sequence) {
    if (nanoseconds() - begin > limit) return LATE;
  }
  return mark.bytes == bytes ? FINE : OTHER_LENGTH;
}

// THREADS: of a block. CHANNELS: blocks at most. PART: bytes that a channel carries at most. share: elements of a block.
// aligned: x and out begin at a multiple of 16 bytes, and so do all shares. rank: 0 or 1.
template <class T, int THREADS, int CHANNELS, int PART>
__global__ void __launch_bounds__(THREADS, 1)
    one_shot_all_reduce(const T* x, T* out, unsigned char* inbox, unsigned char* outbox, unsigned long long* control,
                        int length, int share, int aligned, int rank, long long limit) {
  constexpr int WHOLE = 16 / sizeof(T);
  griddep_launch();
  griddep_wait();
  auto& here = *reinterpret_cast<Exchange<CHANNELS, PART>*>(inbox);
  auto& there = *reinterpret_cast<Exchange<CHANNELS, PART>*>(outbox);
  auto& kept = *reinterpret_cast<Control<CHANNELS>*>(control);

  const int channel = blockIdx.x, from = channel * share, count = min(share, length - from);
  const unsigned long long sequence = kept.sent[channel] + 1, bytes = count * sizeof(T);
  const int slot = sequence % 2;
  x += from;
  out += from;
  // Another block of this launch may be the one that gives up; so one thread of each looks, and all of it agree.
  bool failed = __syncthreads_or(threadIdx.x == 0 && load_acquire(&kept.failure) != FINE);

  if (!failed) {
    T* const message = reinterpret_cast<T*>(there.parts[slot][channel]);
    if (aligned) send<WHOLE, THREADS>(x, message, count);
    else send<1, THREADS>(x, message, count);
    __syncthreads();
    if (threadIdx.x == 0) {
      kept.sent[channel] = sequence;
      there.marks[slot][channel].bytes = bytes;
      store_release(&there.marks[slot][channel].sequence, sequence);
      const Mark& mark = here.marks[slot][channel];
      const Failure failure = awaited(mark, sequence, bytes, limit);
      failed = failure != FINE;
      if (failed && atomicCAS(&kept.failure, (unsigned long long)FINE, (unsigned long long)failure) == FINE) {
        kept.channel = channel;
        kept.sequence = sequence;
        kept.bytes[0] = failure == OTHER_LENGTH ? mark.bytes : 0;
        kept.bytes[1] = bytes;
      }
    }
    failed = __syncthreads_or(failed);
  }

  if (failed) {
    const T nan = narrow<T>(__int_as_float(0x7fffffff));
    for (int i = threadIdx.x; i < count; i += THREADS) out[i] = nan;
    return;
  }
  const T* const message = reinterpret_cast<const T*>(here.parts[slot][channel]);
  if (aligned) add<WHOLE, THREADS>(x, message, out, count, rank);
  else add<1, THREADS>(x, message, out, count, rank);
}
