// The work of a call divided for threads: streams (states, each a sequence of its own) and, where those
// are fewer than the threads, panels of their value channels.
#pragma once

#include <cstdint>
#include <vector>

#include "operator.h"

namespace linexport {

constexpr int64_t kTurns = 4;  // streams of a thread, where they take turns
constexpr int64_t kMoved = 8;  // multiplications that take less time than a number's way out of memory and back

// Numbers below 1.2e-38: a recurrence decays to them, and is not to become slower by that.
enum class Subnormals { kZero, kKept };

// Some streams, and of their value channels some panels (the kernel's unit).
struct Part {
  int64_t first_stream, last_stream, first_panel, last_panel;
};

struct Division {
  int64_t streams, panels;
  int64_t shares, splits;  // of the streams, and of the panels

  // For so many multiplications on so many threads. Of streams that take turns, a thread has a few where there
  // are enough: a token's heads are neighbours in memory, and their pages are met once.
  Division(int64_t streams, int64_t panels, int64_t multiplications, int threads, int64_t turns = 1);
  void run(const Context& call, const Work<const Part&>& part, Subnormals subnormals = Subnormals::kZero) const;
  // What parts may read of a past while another one writes the present: where those are one memory a copy, which lives
  // until this thread's next call for the same place: 0 or 1.
  const float* apart(const float* past, const float* present, int64_t floats, int place = 0) const;
};

// What is where in a thread's memory: places in floats, multiples of 64 bytes.
struct MemoryLayout {
  int64_t floats = 0;

  int64_t take(int64_t count) {
    const int64_t start = floats;
    floats += (count + 15) / 16 * 16;
    return start;
  }
};

// So many floats of what is kept from call to call, aligned to 64 bytes.
float* aligned(std::vector<float>& kept, int64_t floats);
// A thread's own memory, aligned likewise.
float* memory(int64_t floats);

}  // namespace linexport
