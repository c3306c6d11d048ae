// A launch: its limits, its blocks, and whose turn it is.
//
// Blocks run one after another, or all at once where the launch is cooperative. Threads of a block take turns in one of
// three orders: forward, reversed, or shuffled anew each round. A right kernel gives the same bits in each.
#include <sys/mman.h>

#include <cstdlib>

#include "runtime.hpp"

extern char simt_shared_start[] __attribute__((visibility("hidden")));  // shared.ld
extern char simt_shared_used[] __attribute__((visibility("hidden")));
extern char simt_shared_end[] __attribute__((visibility("hidden")));

namespace simt {

Thread* current = nullptr;
uint3 thread_index, block_index;
dim3 grid_dim, block_dim;
unsigned lane = 0;
char* dynamic_shared = nullptr;
bool changed = false;
Launch launch;

namespace {

std::vector<Block*> blocks;  // kept from launch to launch, with their stacks
std::vector<void*> spent;    // dynamic shared memory of blocks that have ended
uint64_t dice;
long long ticks = 0;

// Steele, Lea and Flood's splitmix64, and Fisher and Yates' shuffle.
uint64_t throw_dice() {
  uint64_t z = dice += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}
template <class T>
void shuffle(std::vector<T>& list) {
  for (size_t i = list.size(); i > 1; i--) std::swap(list[i - 1], list[throw_dice() % i]);
}

// Neither becomes memset or memcpy (building.py says so to the compiler), which the sanitizers watch: red zones lie
// between the variables.
void fill(char* start, const char* end) {
  for (char* p = start; p != end; ++p) *p = char(0xff);
}
void copy(char* to, const char* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) to[i] = from[i];
}

void live() {  // a thread's life, block after block
  arrived_first();
  for (;;) {
    acquire(&launch.memory[2]);
    if (char* line = current->block->line) acquire(line);
    simt_entry.call(current->block->args);
    Thread& me = *current;
    me.state = State::exited;
    me.warp->exited |= 1u << me.lane;
    me.block->live--;
    changed = true;
    release(&launch.memory[3]);
    if (char* line = me.block->line) release(line + 1);
    switch_fiber(me.fiber, scheduler);
  }
}

void discard(Block& block) {
  if (block.stacks) munmap(block.stacks, (block.threads.size() + 1) * stack_bytes);
}

// As many threads as the launch has, each on a stack of its own, with room below the first.
void populate(Block& block, unsigned count) {
  if (block.threads.size() != count) {
    discard(block);
    block.threads = std::vector<Thread>(count);
    block.warps = std::vector<Warp>((count + 31) / 32);
    block.order.resize(count);
    block.stacks = static_cast<char*>(mmap(nullptr, (count + 1) * stack_bytes, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (block.stacks == MAP_FAILED) abort();
  }
  for (unsigned rank = 0; rank < count; rank++) {
    Thread& t = block.threads[rank];
    t.index = {rank % block_dim.x, rank / block_dim.x % block_dim.y, rank / block_dim.x / block_dim.y};
    t.block = &block;
    t.warp = &block.warps[rank / 32];
    t.rank = rank;
    t.lane = rank % 32;
    introduce(t.fiber);
    prepare(t.fiber, block.stacks + (rank + 1) * stack_bytes, rank, live);
    block.order[rank] = launch.request.order == 1 ? count - 1 - rank : rank;
  }
}

void begin(Block& block, uint64_t number) {
  block.index = {unsigned(number % grid_dim.x), unsigned(number / grid_dim.x % grid_dim.y),
                 unsigned(number / grid_dim.x / grid_dim.y)};
  block.live = unsigned(block.threads.size());
  block.waiting = 0;
  block.args = launch.args;
  block.line = nullptr;
  for (Warp& warp : block.warps) {
    warp.groups.clear();
    warp.exited = 0;
  }
  for (Thread& t : block.threads) {
    t.state = State::ready;
    t.call = nullptr;
    t.code = nullptr;
    t.mask = 0;
  }
  void* dynamic = nullptr;
  if (posix_memalign(&dynamic, 128, launch.request.shared_bytes)) abort();
  spent.push_back(dynamic);
  block.dynamic = static_cast<char*>(dynamic);
  fill(block.dynamic, block.dynamic + launch.request.shared_bytes);
  fill(simt_shared_start, simt_shared_end);
  if (launch.alive.size() > 1) block.kept.assign(simt_shared_end - simt_shared_start, char(0xff));
  forget(simt_shared_start, simt_shared_end - simt_shared_start);
  release(&launch.memory[2]);
}

void bury() {
  for (void* dynamic : spent) free(dynamic);
  spent.clear();
}

// Give each thread of the block that can run one turn. True where one could. Static shared memory has one place: each of
// several blocks finds there what it left.
bool turns(Block& block) {
  bool moved = false;
  size_t bytes = simt_shared_end - simt_shared_start;
  bool several = launch.alive.size() > 1;
  if (several) {
    forget(simt_shared_start, bytes);
    copy(simt_shared_start, block.kept.data(), bytes);
  }
  block_index = block.index;
  dynamic_shared = block.dynamic;
  if (launch.request.order == 2) shuffle(block.order);
  for (unsigned rank : block.order) {
    Thread& t = block.threads[rank];
    if (t.state != State::ready) continue;
    moved = true;
    current = &t;
    thread_index = t.index;
    lane = t.lane;
    switch_fiber(scheduler, t.fiber);
    if (t.state == State::exited && overflowed(t.fiber))
      launch.fault = report("a thread used more than 128 KiB of stack", block, "smaller arrays in the kernel's frame");
    if (!launch.fault.empty()) return false;
  }
  if (several) copy(block.kept.data(), simt_shared_start, bytes);
  return moved;
}

// Run the blocks that are alive, in turn, until all have exited or one has a fault.
void run() {
  for (long idle = 0; launch.fault.empty();) {
    bool moved = false, left = false;
    changed = false;
    if (launch.request.order == 2) shuffle(launch.alive);
    for (Block* block : launch.alive) {
      if (!block->live) continue;
      moved |= turns(*block);
      if (!launch.fault.empty()) return;
      left |= block->live != 0;
    }
    if (!left) return;
    idle = changed ? 0 : idle + 1;
    if (!moved) launch.fault = stalled();
    else if (idle == max_idle_rounds) launch.fault = spinning();
  }
}

std::string refused(const Request& r) {
  auto text = [](auto... parts) { return (std::string() + ... + parts); };
  auto number = [](uint64_t n) { return std::to_string(n); };
  auto three = [&](const unsigned* n) { return text("(", number(n[0]), ", ", number(n[1]), ", ", number(n[2]), ")"); };
  std::string kernel = text("\n    kernel ", simt_entry.name, "\n    fix: ");
  for (int i = 0; i < 3; i++) {
    if (!r.grid[i] || !r.block[i])
      return text("grid ", three(r.grid), " of blocks ", three(r.block), " is empty", kernel,
                  "launch nothing where there is nothing to do");
  }
  if (r.grid[0] > 0x7fffffffu || r.grid[1] > 65535 || r.grid[2] > 65535)
    return text("grid ", three(r.grid), " is over the limit (2147483647, 65535, 65535)", kernel,
                "put the largest number first");
  uint64_t threads = uint64_t(r.block[0]) * r.block[1] * r.block[2];
  if (r.block[0] > 1024 || r.block[1] > 1024 || r.block[2] > 64 || threads > max_threads)
    return text("block ", three(r.block), " has ", number(threads),
                " threads, over the limit of 1024 (at most 1024, 1024, 64 a dimension)", kernel, "smaller blocks");
#if defined(SIMT_ADDRESS)
  uint64_t declared = 0;  // red zones, and variables of other kernels of the text, stand between these addresses
#else
  uint64_t declared = simt_shared_used - simt_shared_start;
#endif
  if (declared > max_static_bytes)
    return text(number(declared), " bytes of __shared__ variables are over the limit of ", number(max_static_bytes),
                kernel, "dynamic shared memory, which may be larger");
  if (declared + r.shared_bytes > max_shared_bytes)
    return text("shared memory of ", number(r.shared_bytes), " bytes, and ", number(declared),
                " declared, is over the limit of ", number(max_shared_bytes), kernel, "smaller tiles");
  return {};
}

}  // namespace

void turn(const char* call, At at) {
  current->call = call;
  current->at = at;
  current->code = nullptr;
  switch_fiber(current->fiber, scheduler);
}

void note_change() { changed = true; }
long long tick() { return ++ticks; }

}  // namespace simt

namespace simt {
namespace {

// Forget the last launch. False where this one is refused.
bool prepare_launch(const Request* request) {
  launch = Launch{};
  launch.request = *request;
  grid_dim = dim3(request->grid[0], request->grid[1], request->grid[2]);
  block_dim = dim3(request->block[0], request->block[1], request->block[2]);
  launch.fault = refused(*request);
  ticks = 0;
  dice = request->seed;
  return launch.fault.empty();
}

void give_stacks_back() {  // of blocks that ran at once, which few launches need
  for (size_t i = 8; i < blocks.size(); i++) {
    discard(*blocks[i]);
    delete blocks[i];
  }
  if (blocks.size() > 8) blocks.resize(8);
}

}  // namespace
}  // namespace simt

// Run a kernel. Returns null, or what was wrong; that text lives until the next launch.
SIMT_EXPORT const char* simt_launch(const simt::Request* request, void** args) {
  using namespace simt;
  if (!prepare_launch(request)) return launch.fault.c_str();
  launch.args = args;
  unsigned count = block_dim.x * block_dim.y * block_dim.z;
  uint64_t total = uint64_t(grid_dim.x) * grid_dim.y * grid_dim.z;
  launch.total = total * count;
  size_t together = request->cooperative ? total : 1, kept = together;
#if defined(SIMT_THREAD)
  scheduler.tsan = __tsan_get_current_fiber();
  if (together == 1)
    kept = 2;  // a block is not run by the threads of the one before it: between them TSan would see no race
#endif
  while (blocks.size() < kept) blocks.push_back(new Block);
  for (size_t i = 0; i < kept; i++) populate(*blocks[i], count);
  std::vector<uint64_t> numbers;  // of the blocks, in the order in which they begin
  if (request->order == 2) {
    for (uint64_t i = 0; i < total; i++) numbers.push_back(i);
    shuffle(numbers);
  }
  auto number = [&](uint64_t i) { return request->order == 2 ? numbers[i] : request->order == 1 ? total - 1 - i : i; };
  auto take = [&] { return uint64_t(__atomic_fetch_add(request->next, int64_t(together), __ATOMIC_RELAXED)); };
  for (uint64_t i; launch.fault.empty() && (i = take()) < total;) {
    auto first = blocks.begin() + i % kept;
    launch.alive.assign(first, first + together);
    for (size_t j = 0; j < together; j++) begin(*launch.alive[j], number(i + j));
    run();
#if !defined(SIMT_THREAD)
    bury();
#endif
  }
  acquire(&launch.memory[3]);
  bury();  // under TSan not before: whoever frees must have waited, and then so would have the blocks that follow
  give_stacks_back();
  return launch.fault.empty() ? nullptr : launch.fault.c_str();
}

SIMT_EXPORT const char* simt_signature() { return simt_entry.signature; }
