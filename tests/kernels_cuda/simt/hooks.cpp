// What the compiler calls in kernel text: at an address that is not aligned, and before every access to memory.
//
// -fsanitize=alignment,null has every access checked in line, vector loads too, and -fsanitize=thread has a function
// called before each; without the sanitizers' own libraries both are ours. So a kernel that leaves its arguments is
// stopped before it writes into the memory of the process that tests it, and a thread that reads a volatile flag in a
// loop lets the others run. Under TSan itself the plain accesses are the library's, and a volatile one orders memory, as
// it does on a GPU with fences around it.
#include <cstring>

#include "runtime.hpp"

namespace {

const char* const aligned = "a narrower access, or a base and a stride that are multiples of it";

std::string past_multiple(uintptr_t address, size_t bytes) {
  return ": the address is " + std::to_string(address % bytes) + " bytes past a multiple of " + std::to_string(bytes);
}

}  // namespace

#if defined(SIMT_PLAIN)
namespace {

extern "C" char __ehdr_start[] __attribute__((visibility("hidden")));  // this library: its constants and variables
extern "C" char _end[] __attribute__((visibility("hidden")));

bool holds(uintptr_t start, uintptr_t end, uintptr_t p, size_t bytes) { return p >= start && p + bytes <= end; }

// Which end of what is nearest to an address that lies in nothing which a kernel may touch.
std::string nearest(uintptr_t p, size_t bytes) {
  const simt::Request& request = simt::launch.request;
  if (p < 4096) return " at a null pointer";
  uint64_t least = 1 << 20;
  std::string text = ", far from every argument";
  auto look = [&](uintptr_t start, uintptr_t end, const std::string& name) {
    bool behind = p + bytes > end;
    uint64_t distance = behind ? p + bytes - end : start - p;
    if (distance >= least) return;
    least = distance;
    text =
        ", " + std::to_string(distance) + (behind ? " bytes over the end of " : " bytes before the start of ") + name;
  };
  for (uint64_t i = 0; i < request.region_count; i++) {
    const simt::Region& region = request.regions[i];
    look(region.start, region.end, "argument " + std::to_string(region.argument));
  }
  auto dynamic = uintptr_t(simt::dynamic_shared);
  look(dynamic, dynamic + request.shared_bytes, "dynamic shared memory");
  return text;
}

// What is wrong with an access, and how it may be mended; empty where it is right.
std::pair<std::string, const char*> judged(uintptr_t p, size_t bytes, bool write) {
  auto stack = uintptr_t(simt::current->fiber.stack), dynamic = uintptr_t(simt::dynamic_shared);
  if (holds(uintptr_t(__ehdr_start), uintptr_t(_end), p, bytes) || holds(stack, stack + simt::stack_bytes, p, bytes) ||
      holds(dynamic, dynamic + simt::launch.request.shared_bytes, p, bytes))
    return {};
  std::string what = (write ? "write of " : "read of ") + std::to_string(bytes) + " bytes";
  for (uint64_t i = 0; i < simt::launch.request.region_count; i++) {
    simt::Region& region = simt::launch.request.regions[i];
    if (!holds(region.start, region.end, p, bytes)) continue;
    if (write && region.constant)
      return {what + " into argument " + std::to_string(region.argument) + ", which is const",
              "a parameter without const"};
    auto& last = simt::launch.last[write];
    last[1] = last[0];
    last[0] = region;
    return {};
  }
  return {what + nearest(p, bytes), "a bound on the index, or a longer tensor"};
}

inline void touch(const void* address, size_t bytes, bool write, const void* code) {
  auto p = uintptr_t(address);
  if (p - uintptr_t(simt::current->fiber.stack) < simt::stack_bytes - 16) return;
  for (const simt::Region& last : simt::launch.last[write])  // most accesses are to an argument that was just used
    if (holds(last.start, last.end, p, bytes)) return;
  auto [what, fix] = judged(p, bytes, write);
  if (what.empty()) return;
  simt::current->code = code;
  simt::stop(simt::place(*simt::current), what, fix);
}

// What -fsanitize=alignment and null hand over.
struct Mismatch {
  const char* file;
  uint32_t line, column;
  struct Type {
    uint16_t kind, info;
    char name[1];
  } const* type;
  unsigned char log_alignment, kind;
};

}  // namespace

extern "C" void __ubsan_handle_type_mismatch_v1_abort(Mismatch* found, uintptr_t address) {
  const char* slash = std::strrchr(found->file, '/');
  std::string where = std::string(slash ? slash + 1 : found->file) + ":" + std::to_string(found->line);
  std::string what = std::string("access to ") + found->type->name;
  if (!address)
    simt::stop(where, what + " at a null pointer", "a tensor for this argument, or a test before the access");
  simt::stop(where, what + past_multiple(address, size_t{1} << found->log_alignment), aligned);
}
#endif

// What atomics and cached accesses ask: the compiler would ask it of templates of ours, not of the kernel's line.
void simt::access(const char* call, const void* p, size_t bytes, bool write, At at) {
  auto address = uintptr_t(p);
  if (address % bytes) fault(call, at, aligned, "%s", past_multiple(address, bytes).c_str() + 2);
#if defined(SIMT_PLAIN)
  auto [what, fix] = judged(address, bytes, write);
  if (!what.empty()) fault(call, at, fix, "%s", what.c_str());
#endif
}

#if defined(SIMT_ADDRESS)
// ASan cannot tell volatile accesses: a thread that has read this often without a turn of the others may wait for them.
#define SIMT_LOAD(bytes)                                                                \
  extern "C" void __real___asan_load##bytes(void* p);                                   \
  extern "C" void __wrap___asan_load##bytes(void* p) {                                  \
    static unsigned loads = 0;                                                          \
    if (++loads % 4096 == 0) simt::switch_fiber(simt::current->fiber, simt::scheduler); \
    __real___asan_load##bytes(p);                                                       \
  }
SIMT_LOAD(1)
SIMT_LOAD(2)
SIMT_LOAD(4)
SIMT_LOAD(8)
SIMT_LOAD(16)
#else
namespace {

void before(const char* call, const void* code, void* p, bool write) {
  simt::Thread& me = *simt::current;
  me.call = call;
  me.code = code;
  simt::switch_fiber(me.fiber, simt::scheduler);
  simt::changed |= write;
  if (write) simt::release(p);
  else simt::acquire(p);
}

}  // namespace

#if defined(SIMT_PLAIN)
#define SIMT_TOUCH(p, bytes, write) touch(p, bytes, write, __builtin_return_address(0))
#else
#define SIMT_TOUCH(p, bytes, write)
#endif

#define SIMT_VOLATILE_ACCESS(name, bytes, write)                                               \
  extern "C" void __tsan_##name##bytes([[maybe_unused]] void* p) {                             \
    SIMT_TOUCH(p, bytes, write);                                                               \
    before(write ? "volatile write" : "volatile read", __builtin_return_address(0), p, write); \
  }
#define SIMT_VOLATILE(bytes)                                  \
  SIMT_VOLATILE_ACCESS(volatile_read, bytes, false)           \
  SIMT_VOLATILE_ACCESS(volatile_write, bytes, true)           \
  SIMT_VOLATILE_ACCESS(unaligned_volatile_read, bytes, false) \
  SIMT_VOLATILE_ACCESS(unaligned_volatile_write, bytes, true)
SIMT_VOLATILE(1)
SIMT_VOLATILE(2)
SIMT_VOLATILE(4)
SIMT_VOLATILE(8)
SIMT_VOLATILE(16)

#if !defined(SIMT_THREAD)
#define SIMT_ACCESS(bytes)                                                                                \
  extern "C" void __tsan_read##bytes([[maybe_unused]] void* p) { SIMT_TOUCH(p, bytes, false); }           \
  extern "C" void __tsan_write##bytes([[maybe_unused]] void* p) { SIMT_TOUCH(p, bytes, true); }           \
  extern "C" void __tsan_unaligned_read##bytes([[maybe_unused]] void* p) { SIMT_TOUCH(p, bytes, false); } \
  extern "C" void __tsan_unaligned_write##bytes([[maybe_unused]] void* p) { SIMT_TOUCH(p, bytes, true); }
SIMT_ACCESS(1)
SIMT_ACCESS(2)
SIMT_ACCESS(4)
SIMT_ACCESS(8)
SIMT_ACCESS(16)
extern "C" void __tsan_read_range([[maybe_unused]] void* p, [[maybe_unused]] size_t bytes) {
  SIMT_TOUCH(p, bytes, false);
}
extern "C" void __tsan_write_range([[maybe_unused]] void* p, [[maybe_unused]] size_t bytes) {
  SIMT_TOUCH(p, bytes, true);
}
extern "C" void __tsan_vptr_read(void**) {}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_init() {}
#endif
#endif
