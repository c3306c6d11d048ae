// What kernels use of CUDA's header of this name: the barrier of a grid whose blocks all run at once, and of a block.
#pragma once
#include "simt.hpp"

namespace cooperative_groups {

struct grid_group {
  void sync(simt::At at = simt::At::current()) const { simt::grid_barrier(at); }
};
struct thread_block {
  void sync(simt::At at = simt::At::current()) const { __syncthreads(at); }
};
inline grid_group this_grid() { return {}; }
inline thread_block this_thread_block() { return {}; }

}  // namespace cooperative_groups
