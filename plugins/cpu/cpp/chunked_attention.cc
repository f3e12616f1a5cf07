#include "chunked_attention.h"

#include <algorithm>
#include <vector>

#include "division.h"

namespace linexport {
namespace {

constexpr int64_t kStretchChunks = 64;

// Chunks of every stream, prepared one behind the other.
struct Stretch {
  int64_t start, chunks;
  float* prepared;
};

}  // namespace
}  // namespace linexport

#define KERNEL "chunked_attention_kernel.h"
#include "for_each_instruction_set.h"

namespace linexport {
namespace {

// Between stretches, states and normalisers go from one of two places to the other.
struct States {
  float* memory;
  int64_t state, normalizer;

  float* place(int64_t stretch) const { return memory + stretch % 2 * (state + normalizer); }
  void before(int64_t stretch, Attention& a) const {
    a.past_state = place(stretch), a.past_normalizer = place(stretch) + state;
  }
  void behind(int64_t stretch, Attention& a) const {
    a.present_state = place(stretch + 1), a.present_normalizer = place(stretch + 1) + state;
  }
};

// Threads share a stream.
void run_stretches(const Context& call, const Attention& a, const Division& division, int threads) {
  const int64_t streams = a.streams(), size = DISPATCH(prepared_floats(a)), all = (a.keys + kChunk - 1) / kChunk;
  const int64_t most = std::min(all, kStretchChunks);
  static thread_local std::vector<float> kept;
  float* prepared = aligned(kept, streams * (most * size + 2 * a.d_k * (a.d_v + 1)));
  const States states = {prepared + streams * most * size, streams * a.d_k * a.d_v, streams * a.d_k};
  for (int64_t n = 0; n * most < all; ++n) {
    const Stretch stretch = {n * most * kChunk, std::min(most, all - n * most), prepared};
    Attention own = a;
    if (n > 0) states.before(n, own);
    if ((n + 1) * most < all) states.behind(n, own);
    const int64_t chunks = streams * stretch.chunks;
    Division(chunks, 1, chunks * kChunk * a.d_k * kChunk, threads).run(call, [&](const Part& part) {
      DISPATCH(prepare(own, stretch, part, memory(DISPATCH(own_floats(own)))));
    });
    division.run(call, [&](const Part& part) {
      DISPATCH(run_prepared(own, stretch, part, memory(DISPATCH(memory_floats(own, part)))));
    });
  }
}

}  // namespace

bool is_chunked(const Attention& a) {
  return a.causal && !a.has_beta && !a.decay_per_channel && a.keys >= kChunk;
}

void chunked_attention(const Context& call, const Attention& attention, int threads) {
  Attention a = attention;
  const int64_t streams = a.streams();
  const Division division(streams, DISPATCH(panels(a)), streams * 2 * a.keys * a.d_k * a.d_v, threads, kTurns);
  a.past_normalizer = division.apart(a.past_normalizer, a.present_normalizer, streams * a.d_k);
  if (division.splits > 1) return run_stretches(call, a, division, threads);
  division.run(call, [&](const Part& part) { DISPATCH(run(a, part, memory(DISPATCH(memory_floats(a, part))))); });
}

}  // namespace linexport
