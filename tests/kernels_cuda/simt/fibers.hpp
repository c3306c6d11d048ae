// Fibers: several stacks in one thread of the operating system, and what the sanitizers must be told of them.
//
// A switch saves the registers that a callee must keep, changes the stack pointer and restores those of the other:
// about two nanoseconds on x86-64, where swapcontext would make two system calls to keep the signal mask.
#pragma once
#include <cstdlib>

#include "machine.hpp"
#if defined(SIMT_ADDRESS)
#include <sanitizer/common_interface_defs.h>
#elif defined(SIMT_THREAD)
#include <sanitizer/tsan_interface.h>
extern "C" void __tsan_java_init(uintptr_t heap, uintptr_t bytes);
extern "C" void __tsan_java_alloc(uintptr_t start, uintptr_t bytes);
extern "C" void __tsan_java_free(uintptr_t start, uintptr_t bytes);
#endif

#if defined(__x86_64__)
extern "C" void simt_switch(void** save, void* to);
asm(R"(
.text
.type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch, .-simt_switch
)");
#else
#include <ucontext.h>
#endif

namespace simt {

inline Fiber scheduler;  // the stack that the launch was called on

#if defined(SIMT_ADDRESS)
inline const void* scheduler_stack;  // learnt when the first fiber begins
inline size_t scheduler_bytes;
#endif

// Prepare a fiber to begin at `entry`, which never returns. Equal offsets of equal stacks would fight for equal lines
// of the cache: they are staggered by `rank`.
inline void prepare(Fiber& fiber, char* stack, unsigned rank, void (*entry)()) {
  fiber.stack = stack;
  *reinterpret_cast<uint64_t*>(stack) = 0x5afe5afe5afe5afe;  // what an overflow would write over
  char* top = stack + stack_bytes - 64 - rank % 64 * 192;
#if defined(__x86_64__)
  auto slot = reinterpret_cast<void**>(top);
  *--slot = nullptr;  // the return address of `entry`
  *--slot = reinterpret_cast<void*>(entry);
  fiber.registers = slot - 6;
#else
  if (!fiber.registers) fiber.registers = new ucontext_t;
  auto context = static_cast<ucontext_t*>(fiber.registers);
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = top - stack;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
#endif
}

inline bool overflowed(const Fiber& fiber) { return *static_cast<uint64_t*>(fiber.stack) != 0x5afe5afe5afe5afe; }

// The first thing on a new stack.
inline void arrived_first() {
#if defined(SIMT_ADDRESS)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_bytes);
#endif
}

inline void switch_fiber(Fiber& from, Fiber& to) {
#if defined(SIMT_THREAD)
  __tsan_switch_to_fiber(to.tsan, __tsan_switch_to_fiber_no_sync);
#elif defined(SIMT_ADDRESS)
  __sanitizer_start_switch_fiber(&from.fake, to.stack ? to.stack : scheduler_stack,
                                 to.stack ? stack_bytes : scheduler_bytes);
#endif
#if defined(__x86_64__)
  simt_switch(&from.registers, to.registers);
#else
  if (!from.registers) from.registers = new ucontext_t;
  swapcontext(static_cast<ucontext_t*>(from.registers), static_cast<ucontext_t*>(to.registers));
#endif
#if defined(SIMT_ADDRESS)
  __sanitizer_finish_switch_fiber(from.fake, nullptr, nullptr);
#endif
}

// What happened before `release(p)` happened before what follows `acquire(p)`. Only TSan listens.
inline void release([[maybe_unused]] void* p) {
#if defined(SIMT_THREAD)
  __tsan_release(p);
#endif
}
inline void acquire([[maybe_unused]] void* p) {
#if defined(SIMT_THREAD)
  __tsan_acquire(p);
#endif
}

// A new block uses this memory: what was done to it before is none of its races.
inline void forget([[maybe_unused]] char* start, [[maybe_unused]] size_t bytes) {
#if defined(SIMT_THREAD)
  static bool known = false;
  if (!bytes) return;
  if (known) __tsan_java_free(uintptr_t(start), bytes);
  else __tsan_java_init(uintptr_t(start), bytes);
  known = true;
  __tsan_java_alloc(uintptr_t(start), bytes);
#endif
}

// One thread of TSan's for a fiber.
inline void introduce([[maybe_unused]] Fiber& fiber) {
#if defined(SIMT_THREAD)
  if (!fiber.tsan) fiber.tsan = __tsan_create_fiber(0);
#endif
}

}  // namespace simt
