// What threads do together: barriers of a block and of the grid, and operations of a warp.
//
// A barrier opens when every thread of the block stands at the same one, the same line of text. A warp operation comes
// when every lane of its mask stands at the same call. Threads that can never meet are left standing, until nothing
// moves: then it is known who waits where, in whichever order the threads ran.
#include <cstring>

#include "runtime.hpp"

namespace simt {
namespace {

bool same(const At& a, const At& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || !std::strcmp(a.file_name(), b.file_name()));
}

void stand(const char* call, At at) {
  current->call = call;
  current->at = at;
  current->code = nullptr;
}

}  // namespace

int barrier(Vote vote, const char* call, int predicate, At at) {
  Block& block = *current->block;
  stand(call, at);
  if (!block.waiting) block.votes = vote == Vote::all;
  if (vote == Vote::count) block.votes += predicate != 0;
  if (vote == Vote::all) block.votes &= predicate != 0;
  if (vote == Vote::any) block.votes |= predicate != 0;
  char* memory = &block.memory[block.phase % sizeof block.memory];
  release(memory);
  current->state = State::barrier;
  block.waiting++;
  bool open = block.waiting == block.threads.size();
  for (size_t i = 0; open && i < block.threads.size(); i++) open = same(block.threads[i].at, at);
  if (open) {
    for (Thread& t : block.threads) t.state = State::ready;
    block.voted = block.votes;
    block.waiting = 0;
    block.phase++;
    changed = true;
  } else {
    wait(State::barrier);
  }
  acquire(memory);
  return block.voted;
}

void grid_barrier(At at) {
  if (!launch.request.cooperative)
    fault("grid.sync", at, "Launch(..., cooperative=True)", "the launch is not cooperative");
  stand("grid.sync", at);
  char* memory = &launch.memory[launch.phase & 1];
  release(memory);
  if (++launch.arrived == launch.total) {
    for (Block* block : launch.alive)
      for (Thread& t : block->threads) t.state = State::ready;
    launch.arrived = 0;
    launch.phase++;
    changed = true;
  } else {
    wait(State::grid);
  }
  acquire(memory);
}

namespace {

template <class T>
uint64_t folded(const Group& group, const Thread* lanes, T (*with)(T, T)) {
  bool first = true;
  T result{};
  for (int lane = 0; lane < 32; lane++) {
    if (!(group.mask >> lane & 1)) continue;
    T given = T(lanes[lane].given);
    result = first ? given : with(result, given);
    first = false;
  }
  return uint32_t(result);
}

// Which lanes of the group gave what `is` says.
template <class F>
uint32_t lanes_where(const Group& group, const Thread* lanes, F is) {
  uint32_t found = 0;
  for (int lane = 0; lane < 32; lane++)
    if (group.mask >> lane & 1 && is(lanes[lane].given)) found |= uint32_t{1} << lane;
  return found;
}

// What a lane gets, once all lanes of the group have given.
uint64_t result(const Group& group, const Thread* lanes, const Thread& me) {
  auto set = [](uint64_t given) { return given != 0; };
  using U = uint32_t;
  using I = int32_t;
  switch (group.op) {
    case Op::sync: return 0;
    case Op::shuffle: return lanes[me.source].given;
    case Op::ballot: return lanes_where(group, lanes, set);
    case Op::any: return lanes_where(group, lanes, set) != 0;
    case Op::all: return lanes_where(group, lanes, set) == group.mask;
    case Op::match_any: return lanes_where(group, lanes, [&](uint64_t given) { return given == me.given; });
    case Op::add: return folded<U>(group, lanes, [](U a, U b) { return a + b; });
    case Op::min: return folded<U>(group, lanes, [](U a, U b) { return b < a ? b : a; });
    case Op::max: return folded<U>(group, lanes, [](U a, U b) { return a < b ? b : a; });
    case Op::min_signed: return folded<I>(group, lanes, [](I a, I b) { return b < a ? b : a; });
    case Op::max_signed: return folded<I>(group, lanes, [](I a, I b) { return a < b ? b : a; });
    case Op::band: return folded<U>(group, lanes, [](U a, U b) { return a & b; });
    case Op::bor: return folded<U>(group, lanes, [](U a, U b) { return a | b; });
    case Op::bxor: return folded<U>(group, lanes, [](U a, U b) { return a ^ b; });
  }
  __builtin_unreachable();
}

}  // namespace

uint64_t meet(Op op, const char* call, unsigned mask, uint64_t given, int source, At at) {
  Thread& me = *current;
  Warp& warp = *me.warp;
  Thread* lanes = &me - me.lane;
  unsigned count = unsigned(me.block->threads.size()) - (me.rank - me.lane);
  if (count > 32) count = 32;
  if (count < 32) mask &= (1u << count) - 1;  // a last warp that is not full: a full mask means the lanes there are
  stand(call, at);
  me.mask = mask;
  me.given = given;
  me.source = source;
  if (!(mask >> me.lane & 1))
    fault(call, at, "a mask that names every lane which makes the call", "lane %u is not in its own mask 0x%08x",
          me.lane, mask);
  if (op == Op::shuffle && (source < 0 || unsigned(source) >= count || !(mask >> source & 1)))
    fault(call, at, "let the lane that is read make the call too",
          "lane %u reads lane %d, which is not in the mask 0x%08x", me.lane, source, mask);
  Group* group = nullptr;
  for (Group& other : warp.groups)
    if (other.mask == mask && other.op == op && same(other.at, at)) group = &other;
  if (!group) {
    warp.groups.push_back({mask, 0, op, at, call, &warp.memory[warp.met++ % sizeof warp.memory]});
    group = &warp.groups.back();
  }
  // Only __syncwarp orders memory: a shuffle or a vote does not.
  char* memory = op == Op::sync ? static_cast<char*>(group->memory) : nullptr;
  if (memory) release(memory);
  group->arrived |= 1u << me.lane;
  if (group->arrived == mask) {
    for (unsigned lane = 0; lane < count; lane++) {
      if (!(mask >> lane & 1)) continue;
      lanes[lane].taken = result(*group, lanes, lanes[lane]);
      lanes[lane].state = State::ready;
    }
    warp.groups.erase(warp.groups.begin() + (group - warp.groups.data()));
    changed = true;
  } else {
    wait(State::warp);
  }
  if (memory) acquire(memory);
  return me.taken;
}

}  // namespace simt
