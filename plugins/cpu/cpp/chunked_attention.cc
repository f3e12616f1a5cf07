#include "chunked_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "division.h"

#define KERNEL "chunked_attention_kernel.h"
#include "for_each_instruction_set.h"

namespace linexport {
namespace {

constexpr int64_t kLeastSegment = 128;  // tokens: with fewer, waiting for the other threads takes what is gained

// The time of a token, in that of reading one value channel of the state and adding to it: what was measured, a part of
// which is the preparation of a key and of a query.
struct Cost {
  double preparation, recurrence, state;  // state: what a token adds to it, without outputs

  explicit Cost(const Attention& a) {
    const double heads = static_cast<double>(a.group()), channels = static_cast<double>(a.d_v);
    preparation = 16 + 22 * heads, recurrence = (1 + heads) * channels / 2, state = 16 + channels / 2;
  }
  double whole() const { return preparation + recurrence; }
  // Of the first segment in terms of the others, so that the states of those are there when its outputs are.
  double first() const { return state / whole(); }
  double in_segments(double count) const { return whole() * (1 + first()) / (count + first()); }
  double in_panels(int64_t panels, int64_t splits) const {
    return preparation + recurrence * static_cast<double>((panels + splits - 1) / splits) / static_cast<double>(panels);
  }
};

// The segments of every stream: so many, and one before them.
struct Segments {
  const Attention& a;
  int64_t count;
  double first;

  int64_t start(int64_t j) const {
    if (j == 0 || j > count) return j == 0 ? 0 : a.keys;
    const double tokens = static_cast<double>(a.keys) / (static_cast<double>(count) + first);
    return std::llround((static_cast<double>(j - 1) + first) * tokens / kChunk) * kChunk;
  }
  Segment operator[](int64_t j) const { return {start(j), start(j + 1)}; }

  // The square root of the product of a stream's decays in segment j. What grows by more than e^177 is infinite, or was zero.
  float root_of_decays(int64_t stream, int64_t j) const {
    double sum = 0;
    const int64_t before = stream / a.heads * a.keys, end = before + start(j + 1);
    for (int64_t token = before + start(j); a.has_decay && token < end; ++token)
      if (!a.key_mask || a.key_mask[token]) sum += static_cast<double>(a.decay[token * a.heads + stream % a.heads]);
    return static_cast<float>(std::exp(std::min(sum, 177.0) / 2));
  }
};

void run_segments(const Context& call, const Attention& a, const Division& division, const Segments& segments) {
  const int64_t count = segments.count, floats = DISPATCH(state_floats(a)), panels = DISPATCH(panels(a));
  static thread_local std::vector<float> kept;
  float* const states = aligned(kept, a.streams() * count * (floats + 1));
  float* const roots = states + a.streams() * count * floats;
  const auto whole = [&](const Part& part) { return Part{part.first_stream, part.last_stream, 0, panels}; };
  division.run(call, [&](const Part& part) {
    const int64_t j = part.first_panel, place = part.first_stream * count + j;
    const Part own = whole(part);
    float *state = states + place * floats, *room = memory(DISPATCH(memory_floats(a, own)));
    if (j == 0) return DISPATCH(run_first(a, own, segments[j], state, room));
    DISPATCH(sum_keys(a, own, segments[j], state, room));
    roots[place] = segments.root_of_decays(part.first_stream, j);
  });
  division.run(call, [&](const Part& part) {
    const int64_t j = part.first_panel + 1, place = part.first_stream * count;
    const Part own = whole(part);
    float* room = memory(DISPATCH(memory_floats(a, own)));
    DISPATCH(run_behind(a, own, segments[j], j, states + place * floats, roots + place, room));
  });
}

}  // namespace

bool is_chunked(const Attention& a) {
  return a.causal && !a.has_beta && !a.decay_per_channel && a.keys >= kChunk;
}

void chunked_attention(const Context& call, const Attention& attention, int threads) {
  Attention a = attention;
  const Cost cost(a);
  const int64_t streams = a.streams(), multiplications = streams * 2 * a.keys * a.d_k * a.d_v, panels = DISPATCH(panels(a));
  const Division by_panels(streams, panels, multiplications, threads, kTurns);
  const int64_t count = Division(streams, a.keys / kLeastSegment, multiplications, threads).splits;
  if (count > 1 && cost.in_segments(static_cast<double>(count)) < cost.in_panels(panels, by_panels.splits))
    return run_segments(call, a, {streams, count, multiplications, threads}, {a, count, cost.first()});
  a.past_normalizer = by_panels.apart(a.past_normalizer, a.present_normalizer, streams * a.d_k);
  by_panels.run(call, [&](const Part& part) { DISPATCH(run(a, part, memory(DISPATCH(memory_floats(a, part))))); });
}

}  // namespace linexport
