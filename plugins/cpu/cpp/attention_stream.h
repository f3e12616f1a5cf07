// States of LinearAttention with their normalisers, each with the sequence that it runs along. Included per
// instruction set.

#include "tile.h"

// One state: its normaliser z, padded to whole vectors, and behind it S in panels of kPanel channels.
struct AttentionStream {
  const Attention& a;
  const Part& part;
  int64_t index;
  float* z;
  bool one_tile;  // as in StateInPanels

  static int64_t width(const Attention& a) { return vectors(a.d_k) * kLanes; }
  static int64_t panels(const Attention& a) { return (a.d_v + kPanel - 1) / kPanel; }
  static int64_t floats(const Attention& a) { return width(a) + panels(a) * a.d_k * kPanel; }

  int64_t batch() const { return index / a.heads; }
  int64_t head() const { return index % a.heads; }

  StateInPanels state() const {
    const int64_t size = a.d_k * a.d_v;
    return {a.past_state ? a.past_state + index * size : nullptr,
            a.present_state ? a.present_state + index * size : nullptr,
            z + width(a),
            a.d_k,
            a.d_v,
            one_tile};
  }

  void open() const {
    std::memset(z, 0, width(a) * sizeof(float));
    if (a.past_normalizer) std::memcpy(z, a.past_normalizer + index * a.d_k, a.d_k * sizeof(float));
    state().open(part.first_panel, part.last_panel);
  }

  void close() const {
    state().close(part.first_panel, part.last_panel);
    if (a.present_normalizer && part.first_panel == 0)
      std::memcpy(a.present_normalizer + index * a.d_k, z, a.d_k * sizeof(float));
  }
};

// Some tokens of a stream: those from `start` on.
struct Turn {
  int64_t stream, start;
};

// The streams of a part, one behind the other in memory. They take turns: one token's heads are neighbours.
struct AttentionStreams {
  const Attention& a;
  const Part& part;
  float* memory;
  bool one_tile;

  static int64_t floats(const Attention& a, const Part& part) {
    return (part.last_stream - part.first_stream) * AttentionStream::floats(a);
  }

  AttentionStream operator[](int64_t index) const {
    return {a, part, index, memory + (index - part.first_stream) * AttentionStream::floats(a), one_tile};
  }

  void open() const {
    for (int64_t s = part.first_stream; s < part.last_stream; ++s) (*this)[s].open();
  }

  void close() const {
    for (int64_t s = part.first_stream; s < part.last_stream; ++s) (*this)[s].close();
  }

  Turn first() const { return {part.first_stream, 0}; }
  Turn after(const Turn& turn, int64_t tokens) const {
    if (turn.stream + 1 < part.last_stream) return {turn.stream + 1, turn.start};
    return {part.first_stream, turn.start + tokens};
  }
};
