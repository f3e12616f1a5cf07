// The work of a call divided for threads: streams (states, each a sequence of its own) and, where those
// are fewer than the threads, panels of their value channels.
#pragma once

#include <cstdint>
#include <functional>

#include "operator.h"

namespace linexport {

// Some streams, and of their value channels some panels (the kernel's unit).
struct Part {
  int64_t first_stream, last_stream, first_panel, last_panel;
};

struct Division {
  int64_t streams, panels;
  int64_t shares, splits;  // of the streams, and of the panels

  // For so many multiplications on so many threads.
  Division(int64_t streams, int64_t panels, int64_t multiplications, int threads);
  void run(const Context& call, const std::function<void(const Part&)>& part) const;
};

// A thread's own memory, aligned to 64 bytes, kept from call to call.
float* memory(int64_t floats);

}  // namespace linexport
