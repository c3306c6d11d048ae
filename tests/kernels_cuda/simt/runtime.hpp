// What the runtime's own files share: the launch that runs, and how a thread stops.
#pragma once
#include <string>

#include "fibers.hpp"
#include "machine.hpp"

namespace simt {

struct Launch {
  Request request;
  void** args = nullptr;
  std::vector<Block*> alive;  // blocks that run at once: one, or all of a cooperative launch
  unsigned arrived = 0;       // threads at the grid's barrier
  unsigned phase = 0;
  uint64_t total = 0;      // threads of the launch
  std::string fault;       // why it stopped
  Region last[2][2] = {};  // the two arguments read from last, and the two written to
  char memory[4];          // what TSan orders by: two of the grid's barrier, the start, the end
};

extern Launch launch;
extern bool changed;  // in this round: memory, or where a thread stands

// Stand still until another thread makes this one ready.
inline void wait(State state) {
  Thread* me = current;
  me->state = state;
  switch_fiber(me->fiber, scheduler);
}

std::string report(const char* what, const Block& block, const std::string& fix);
std::string stalled();  // nothing can go on: why
std::string spinning();
std::string place(const Thread& thread);
[[noreturn]] void stop(const std::string& where, const std::string& what, const std::string& fix);

}  // namespace simt
