// What the compiler calls in kernel text: at an address that is not aligned, and before a volatile access.
//
// -fsanitize=alignment,null has every access checked in line, vector loads too; without the sanitizer's own library the
// report is ours. -fsanitize=thread with tsan-distinguish-volatile calls a function before each access, and of these only
// the volatile ones mean something here: a thread that reads a flag in a loop lets the others run. Under TSan itself the
// plain ones are the library's, and a volatile access orders memory, as a GPU's atomics with fences around them do.
#include <cstdio>
#include <cstring>

#include "runtime.hpp"

#if defined(SIMT_PLAIN)
namespace {

struct Location {
  const char* file;
  uint32_t line, column;
};
struct Type {
  uint16_t kind, info;
  char name[1];
};
struct Mismatch {
  Location at;
  const Type* type;
  unsigned char log_alignment, kind;
};

}  // namespace

extern "C" void __ubsan_handle_type_mismatch_v1_abort(Mismatch* found, uintptr_t address) {
  const char* slash = std::strrchr(found->at.file, '/');
  std::string where = std::string(slash ? slash + 1 : found->at.file) + ":" + std::to_string(found->at.line);
  std::string what = std::string("access to ") + found->type->name;
  if (!address) simt::stop(where, what + " at a null pointer", "a tensor for this argument, or a test before the access");
  char low[64];
  snprintf(low, sizeof low, ": address ...%03zx is no multiple of %d bytes", size_t(address & 0xfff), 1 << found->log_alignment);
  simt::stop(where, what + low, "a narrower access, or a base and a stride that are multiples of it");
}
#endif

#if defined(SIMT_PLAIN) || defined(SIMT_THREAD)
namespace {

void before(const char* call, const void* code, void* p, bool write) {
  simt::Thread& me = *simt::current;
  me.call = call;
  me.code = code;
  simt::switch_fiber(me.fiber, simt::scheduler);
  if (write) {
    simt::release(p);
    simt::changed = true;
  } else {
    simt::acquire(p);
  }
}

}  // namespace

#define SIMT_VOLATILE(bytes)                                                                            \
  extern "C" void __tsan_volatile_read##bytes(void* p) {                                                \
    before("volatile read", __builtin_return_address(0), p, false);                                     \
  }                                                                                                     \
  extern "C" void __tsan_volatile_write##bytes(void* p) {                                               \
    before("volatile write", __builtin_return_address(0), p, true);                                     \
  }                                                                                                     \
  extern "C" void __tsan_unaligned_volatile_read##bytes(void* p) { __tsan_volatile_read##bytes(p); }    \
  extern "C" void __tsan_unaligned_volatile_write##bytes(void* p) { __tsan_volatile_write##bytes(p); }
SIMT_VOLATILE(1)
SIMT_VOLATILE(2)
SIMT_VOLATILE(4)
SIMT_VOLATILE(8)
SIMT_VOLATILE(16)
#endif

#if defined(SIMT_PLAIN)
#define SIMT_UNSEEN(bytes)                               \
  extern "C" void __tsan_read##bytes(void*) {}           \
  extern "C" void __tsan_write##bytes(void*) {}          \
  extern "C" void __tsan_unaligned_read##bytes(void*) {} \
  extern "C" void __tsan_unaligned_write##bytes(void*) {}
SIMT_UNSEEN(1)
SIMT_UNSEEN(2)
SIMT_UNSEEN(4)
SIMT_UNSEEN(8)
SIMT_UNSEEN(16)
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_read_range(void*, size_t) {}
extern "C" void __tsan_write_range(void*, size_t) {}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}
#endif
