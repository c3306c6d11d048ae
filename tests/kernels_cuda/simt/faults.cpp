// What a fault says: what is wrong, with the numbers; which kernel and block; who waits where; one fix.
#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "runtime.hpp"

namespace simt {
namespace {

std::string format(const char* text, ...) {
  char line[1024];
  va_list values;
  va_start(values, text);
  vsnprintf(line, sizeof line, text, values);
  va_end(values);
  return line;
}

std::string spot(const At& at) {
  const char* slash = std::strrchr(at.file_name(), '/');
  return format("%s:%u", slash ? slash + 1 : at.file_name(), unsigned(at.line()));
}

std::string standing(const Thread& t) {
  if (t.state == State::exited) return "exited";
  std::string text = t.state == State::ready ? "can run" : "wait";
  if (!t.call) return text;
  text += " in " + std::string(t.call) + " at " + place(t);
  return t.state == State::warp ? text + format(", mask 0x%08x", t.mask) : text;
}

// Lines such as "threads 0-95: wait in __syncthreads at gemv.cu:12".
std::string everyone(const Block& block) {
  struct Line {
    std::string standing, ranks;
    unsigned ranges = 0;
  };
  std::vector<Line> lines;
  size_t count = block.threads.size();
  for (size_t i = 0, end; i < count; i = end) {
    std::string here = standing(block.threads[i]);
    for (end = i + 1; end < count && standing(block.threads[end]) == here;) end++;
    size_t at = 0;
    while (at < lines.size() && lines[at].standing != here) at++;
    if (at == lines.size()) lines.push_back({here, "", 0});
    Line& line = lines[at];
    if (++line.ranges <= 4) line.ranks += format(end == i + 1 ? ", %zu" : ", %zu-%zu", i, end - 1);
    if (line.ranges == 5) line.ranks += ", ...";
  }
  std::string text;
  for (const Line& line : lines)
    text += (line.ranks.find_first_of("-,", 2) == std::string::npos ? "\n    thread " : "\n    threads ") +
            line.ranks.substr(2) + ": " + line.standing;
  return text;
}

}  // namespace

// An address is made a line by whoever reads the fault: see harness.py.
std::string place(const Thread& thread) {
  if (!thread.code) return spot(thread.at);
  Dl_info info{};
  dladdr(thread.code, &info);
  return format("{+0x%zx}",
                size_t(static_cast<const char*>(thread.code) - static_cast<const char*>(info.dli_fbase)) - 1);
}

std::string report(const char* what, const Block& block, const std::string& fix) {
  std::string head = format("\n    kernel %s, block (%u, %u, %u) of (%u, %u, %u)", simt_entry.name, block.index.x,
                            block.index.y, block.index.z, grid_dim.x, grid_dim.y, grid_dim.z);
  return what + head + everyone(block) + "\n    fix: " + fix;
}

// A fault of the thread that runs: it stops for ever, and the scheduler gives the launch up.
void stop(const std::string& where, const std::string& what, const std::string& fix) {
  const Thread& t = *current;
  launch.fault = where + ": " + what +
                 format("\n    kernel %s, block (%u, %u, %u), thread (%u, %u, %u)\n    fix: ", simt_entry.name,
                        t.block->index.x, t.block->index.y, t.block->index.z, t.index.x, t.index.y, t.index.z) +
                 fix;
  switch_fiber(current->fiber, scheduler);
  __builtin_unreachable();
}

void fault(const char* call, At at, const char* fix, const char* text, ...) {
  char line[1024];
  va_list values;
  va_start(values, text);
  vsnprintf(line, sizeof line, text, values);
  va_end(values);
  stop(spot(at), std::string(call) + ": " + line, fix);
}

// Every thread waits. The first that can say why does: a barrier, a warp operation, the grid's barrier.
std::string stalled() {
  for (const Block* block : launch.alive) {
    if (!block->live) continue;
    const Thread* at_barrier = nullptr;
    const Thread* in_warp = nullptr;
    bool differ = false;
    for (const Thread& t : block->threads) {
      if (t.state == State::barrier && at_barrier) differ |= place(t) != place(*at_barrier);
      if (t.state == State::barrier && !at_barrier) at_barrier = &t;
      if (t.state == State::warp && !in_warp) in_warp = &t;
    }
    if (in_warp) {
      unsigned mask = in_warp->mask, gone = mask & in_warp->warp->exited, other = 0;
      for (const Group& group : in_warp->warp->groups)
        if (group.mask != mask && group.mask & mask) other = group.mask;
      std::string what = format("%s: %s: ", place(*in_warp).c_str(), in_warp->call);
      what += gone    ? format("mask 0x%08x names lanes that have exited: 0x%08x", mask, gone)
              : other ? format("mask 0x%08x overlaps 0x%08x, which other lanes wait with", mask, other)
                      : format("lanes of mask 0x%08x never come", mask);
      return report(what.c_str(), *block, "let every lane of a mask reach the same call, and name no other lane");
    }
    if (at_barrier) {
      std::string what = format("%s: %s: divergent barrier: ", place(*at_barrier).c_str(), at_barrier->call);
      what += differ ? "threads of the block wait at another one"
                     : format("%u of %zu threads wait, %zu have exited", block->waiting, block->threads.size(),
                              block->threads.size() - block->live);
      return report(what.c_str(), *block, "let every thread of the block reach the same barrier");
    }
  }
  for (const Block* block : launch.alive)
    for (const Thread& t : block->threads)
      if (t.state == State::grid)
        return report(format("%s: grid.sync: %u of %llu threads wait, the others have exited", place(t).c_str(),
                             launch.arrived, static_cast<unsigned long long>(launch.total))
                          .c_str(),
                      *block, "let every thread of the grid reach it");
  return "nothing can run";
}

std::string spinning() {
  for (const Block* block : launch.alive) {
    for (const Thread& t : block->threads) {
      if (t.state != State::ready || !t.call) continue;
      std::string what = format("%s: %s: a wait that never ends: in %ld turns of every thread nothing changed",
                                place(t).c_str(), t.call, max_idle_rounds);
      return report(what.c_str(), *block,
                    launch.request.cooperative ? "let another thread write what this one waits for"
                                               : "Launch(..., cooperative=True), where another block is waited for");
    }
  }
  return "nothing changes";
}

}  // namespace simt
