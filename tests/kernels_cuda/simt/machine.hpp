// The machine that kernels run on: threads, warps and blocks, and what they wait for.
//
// A CUDA thread is a fiber: it runs until it waits (a barrier, a warp operation, an atomic); then the scheduler goes on
// with another. All of it is one thread of the operating system, so nothing here needs a lock. Kernel text reads
// `current` alone; the rest belongs to the runtime (scheduler.cpp, collectives.cpp, faults.cpp), which is compiled by
// itself and never instrumented, so that a sanitizer sees what a kernel does and nothing of how it is scheduled.
#pragma once
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <vector>

#define SIMT_EXPORT extern "C" __attribute__((visibility("default")))

namespace simt {

using At = std::source_location;  // as a default argument it is where the call stands: a kernel's own line

constexpr unsigned max_threads = 1024;          // of a block
constexpr size_t max_shared_bytes = 227 << 10;  // of a block, static and dynamic, sm_90
constexpr size_t max_static_bytes = 48 << 10;   // of a block, declared by __shared__
constexpr long max_idle_rounds = 20000;         // turns of every thread in which nothing changes
constexpr size_t stack_bytes = 128 << 10;       // of a thread

enum class State : uint8_t { ready, barrier, grid, warp, exited };

// What the lanes of a mask do together.
enum class Op : uint8_t {
  sync, shuffle, ballot, any, all, match_any, add, min, max, min_signed, max_signed, band, bor, bxor
};

// What the threads of a block find out at a barrier.
enum class Vote : uint8_t { none, count, all, any };

// Where a thread's registers and stack are while another runs. `tsan`, `fake`: what the sanitizers keep for it.
struct Fiber {
  void* stack = nullptr;  // its lowest address; of the scheduler, null
  void* registers = nullptr;
  void* tsan = nullptr;
  void* fake = nullptr;
};

struct Block;
struct Warp;

struct Thread {
  uint3 index{};  // threadIdx
  Block* block = nullptr;
  Warp* warp = nullptr;
  unsigned rank = 0, lane = 0;
  State state = State::ready;
  // Where it last called something of the machine. `code`: an address instead, where the compiler made the call.
  At at;
  const char* call = nullptr;
  const void* code = nullptr;
  // A warp operation: its mask, what this lane gives, which lane it reads, what it gets.
  unsigned mask = 0;
  int source = 0;
  uint64_t given = 0, taken = 0;
  Fiber fiber;
};

// Lanes of one warp on their way to one operation.
struct Group {
  unsigned mask, arrived;
  Op op;
  At at;
  const char* call;
  void* memory;  // what TSan orders by
};

struct Warp {
  std::vector<Group> groups;
  unsigned exited = 0, met = 0;
  char memory[64];  // one byte an operation, used in turn
};

struct Block {
  uint3 index{};  // blockIdx
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<unsigned> order;  // of the threads' turns
  char* stacks = nullptr;
  char* dynamic = nullptr;         // dynamic shared memory
  std::vector<char> kept;          // static shared memory, while another block runs
  unsigned live = 0, waiting = 0;  // threads that have not exited; that stand at a barrier
  unsigned phase = 0;              // barriers passed, in earlier blocks too
  void** args = nullptr;           // of the call that it runs
  char* line = nullptr;            // of calls that follow one another, what TSan orders them by; else null
  int votes = 0, voted = 0;        // for this barrier so far; the result of the last
  char memory[256];                // one byte a barrier, used in turn
};

// Memory that a kernel may touch: an argument of the launch. Mirrored in harness.py, as is Request.
struct Region {
  uint64_t start, end;
  int32_t argument, constant;
};

// One launch, as a caller writes it.
struct Request {
  unsigned grid[3], block[3];
  uint64_t shared_bytes;
  int32_t cooperative;
  int32_t order;  // 0 forward, 1 reversed, 2 shuffled by seed
  uint32_t seed;
  int64_t* next;    // which block comes next, counted by all who run blocks of this launch
  Region* regions;  // the arguments' memory, those first that may be written
  uint64_t region_count;
};

// A GPU among several that run one kernel at once, over memory that they share. It makes its calls one after the other,
// and stands still in some of the scheduler's rounds. args: of each call.
struct Device {
  int64_t calls, sleeps_from, sleeps_to;
  void*** args;
  Region* regions;
  uint64_t region_count;
};

// A kernel as its text gives it: the call with cuLaunchKernel's arguments, its parameters as the compiler prints them.
struct Entry {
  void (*call)(void** args);
  const char* signature;
  const char* name;
};

extern Thread* current;  // the thread that runs, and what kernel text asks of it
extern uint3 thread_index, block_index;
extern dim3 grid_dim, block_dim;
extern unsigned lane;
extern char* dynamic_shared;

void turn(const char* call, At at);  // let the others run
void note_change();                  // of memory: what a spin wait may wait for
long long tick();                    // clock64
int barrier(Vote vote, const char* call, int predicate, At at);
void grid_barrier(At at);
uint64_t meet(Op op, const char* call, unsigned mask, uint64_t given, int source, At at);
void access(const char* call, const void* p, size_t bytes, bool write, At at);  // a fault where it is wrong
[[noreturn]] void fault(const char* call, At at, const char* fix, const char* text, ...)
    __attribute__((format(printf, 4, 5)));

}  // namespace simt

extern "C" const simt::Entry simt_entry;  // what the kernel's own object file defines
