// A launch in a process of its own, under a sanitizer, or those of several GPUs: read from a file, its buffers with red
// zones on both sides, and what became of them written to another. harness.py writes the one and reads the other.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "machine.hpp"
#if defined(SIMT_ADDRESS)
#include <sanitizer/asan_interface.h>
#endif

SIMT_EXPORT const char* simt_launch(const simt::Request* request, void** args);
SIMT_EXPORT const char* simt_devices(const simt::Request* request, const simt::Device* devices, uint64_t count);

namespace {

struct Buffer {
  uint64_t bytes, offset;  // offset: of the address from a multiple of 256
  char* start;
};

std::FILE* input;

template <class T>
T take() {
  T value;
  if (std::fread(&value, sizeof value, 1, input) != 1) std::exit(3);
  return value;
}

// Exactly as long as the tensor, at an address that is aligned just as the tensor's was.
Buffer read_buffer() {
  Buffer buffer{take<uint64_t>(), take<uint64_t>(), nullptr};
  void* raw = nullptr;
  if (posix_memalign(&raw, 256, buffer.offset + buffer.bytes)) std::exit(3);
#if defined(SIMT_ADDRESS)
  __asan_poison_memory_region(raw, buffer.offset);
#endif
  buffer.start = static_cast<char*>(raw) + buffer.offset;
  if (std::fread(buffer.start, 1, buffer.bytes, input) != buffer.bytes) std::exit(3);
  return buffer;
}

// A call's arguments, as cuLaunchKernel gets them.
void** read_arguments(const std::vector<Buffer>& buffers) {
  auto values = new std::vector<uint64_t>(take<uint64_t>());
  auto args = new std::vector<void*>;
  for (uint64_t& value : *values) {
    auto buffer = take<int64_t>();  // -1: no pointer into one
    value = take<uint64_t>();
    if (buffer >= 0) value += reinterpret_cast<uint64_t>(buffers[buffer].start);
    args->push_back(&value);
  }
  return args->data();
}

}  // namespace

int main(int count, char** names) {
  if (count == 1) return std::puts(simt_entry.signature) < 0;
  input = std::fopen(names[1], "rb");
  auto request = take<simt::Request>();
  int64_t next = 0;
  request.next = &next;
  std::vector<Buffer> buffers(take<uint64_t>());
  for (Buffer& buffer : buffers) buffer = read_buffer();
  const char* fault;
  if (auto count = take<uint64_t>()) {
    std::vector<simt::Device> devices(count);
    for (simt::Device& device : devices) {
      device = {take<int64_t>(), take<int64_t>(), take<int64_t>(), nullptr, nullptr, 0};
      device.args = new void**[device.calls];
      for (int64_t call = 0; call < device.calls; call++) device.args[call] = read_arguments(buffers);
    }
    fault = simt_devices(&request, devices.data(), count);
  } else {
    fault = simt_launch(&request, read_arguments(buffers));
  }
  std::FILE* output = std::fopen(names[2], "wb");
  uint64_t length = fault ? std::strlen(fault) : 0;
  std::fwrite(&length, sizeof length, 1, output);
  std::fwrite(fault ? fault : "", 1, length, output);
  for (Buffer& buffer : buffers) std::fwrite(buffer.start, 1, buffer.bytes, output);
  return std::fclose(output);
}
