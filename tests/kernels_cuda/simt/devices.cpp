// Several GPUs at once: each makes its calls of one kernel, one after the other, over memory that some of them share.
//
// All blocks of a call run at once. In a round of the scheduler every GPU has its turns, in the launch's order, but one
// that sleeps: so it is late, or is gone, or is overtaken, at a round that a test chooses.
#include <cstring>

#include "runtime.hpp"

namespace simt {
namespace {

struct Running {
  const Device* device;
  std::vector<Block*> blocks;
  std::vector<char> lines;  // what TSan orders a call and those behind it by: a byte for what is in front of each
  int64_t done = 0;         // calls

  bool sleeps(int64_t round) const { return round >= device->sleeps_from && round < device->sleeps_to; }
  bool gone() const { return device->sleeps_to == INT64_MAX; }

  void call() {
    for (size_t i = 0; i < blocks.size(); i++) {
      begin(*blocks[i], i);
      blocks[i]->args = device->args[done];
      blocks[i]->line = &lines[done];
    }
  }

  // A turn for each thread. True where one had it.
  bool round() {
    launch.request.regions = device->regions;
    launch.request.region_count = device->region_count;
    std::memset(launch.last, 0, sizeof launch.last);
    bool moved = false, live = false;
    if (launch.request.order == 2) shuffle(blocks);
    for (Block* block : blocks) {
      if (block->live) moved |= turns(*block);
      if (!launch.fault.empty()) return false;
      live |= block->live != 0;
    }
    if (!live && ++done < device->calls) call();
    return moved;
  }
};

}  // namespace
}  // namespace simt

// Run them until each has made its calls or is gone for good. Returns null, or what was wrong.
SIMT_EXPORT const char* simt_devices(const simt::Request* request, const simt::Device* devices, uint64_t count) {
  using namespace simt;
  if (!prepare_launch(request)) return launch.fault.c_str();
  unsigned threads = block_dim.x * block_dim.y * block_dim.z;
  uint64_t each = uint64_t(grid_dim.x) * grid_dim.y * grid_dim.z;
  launch.total = each * threads;
#if defined(SIMT_THREAD)
  scheduler.tsan = __tsan_get_current_fiber();
#endif
  while (blocks.size() < count * each) blocks.push_back(new Block);
  std::vector<Running> running(count);
  for (uint64_t d = 0; d < count; d++) {
    running[d].device = &devices[d];
    running[d].lines.resize(devices[d].calls + 1);
    running[d].blocks.assign(blocks.begin() + d * each, blocks.begin() + (d + 1) * each);
    for (Block* block : running[d].blocks) populate(*block, threads);
    launch.alive.insert(launch.alive.end(), running[d].blocks.begin(), running[d].blocks.end());
  }
  for (Running& each : running)
    if (each.device->calls) each.call();
  std::vector<Running*> order;
  for (Running& each : running) order.insert(request->order == 1 ? order.begin() : order.end(), &each);
  long idle = 0;
  for (int64_t round = 0; launch.fault.empty(); round++) {
    bool left = false, moved = false;
    changed = false;
    if (request->order == 2) shuffle(order);
    for (Running* each : order) {
      if (each->done == each->device->calls || !launch.fault.empty()) continue;
      if (!each->sleeps(round)) moved |= each->round();
      else if (each->gone()) continue;
      else changed = true;  // by and by
      left |= each->done != each->device->calls;
    }
    if (!left || !launch.fault.empty()) break;
    idle = changed ? 0 : idle + 1;
    if (!moved && !changed) launch.fault = stalled();
    else if (idle == max_idle_rounds) launch.fault = spinning();
  }
  acquire(&launch.memory[3]);
  bury();
  give_stacks_back();
  return launch.fault.empty() ? nullptr : launch.fault.c_str();
}
