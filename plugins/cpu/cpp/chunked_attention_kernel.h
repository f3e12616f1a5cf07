// LinearAttention by the linear rule, or the gated one with a decay per head, kChunk tokens at a time.
//
// For tokens r = 1 ... C behind the state S, with A_r the product of their decays up to r (1 without decay):
//
//   P_rs = (A_r / A_s) q_r . k_s    s <= r              pairs
//   o_r  = A_r q_r^T S + sum_{s <= r} P_rs v_s          divided by the same with v = 1 and S = z, plus eps
//   S   <- A_C S + sum_s (A_C / A_s) k_s v_s^T          and z likewise with v = 1
//
// Three products of matrices, of C x d_k and d_k x C, of C x (d_k + C) and of d_k x C, in register tiles. A_r / A_s
// is a product of decays after s, never a quotient, so decays of any size are safe. P costs C / d_v of the
// recurrence's operations; in return every element of S is loaded once for a tile of tokens, and stored once for C.
//
// Threads that share a stream have segments of its tokens. First the states are computed that the keys of each segment
// leave of none, without outputs; the first segment, whose past is known, has its outputs then already. With a_j the
// product of a segment's decays, S_j = a_j S_{j-1} + own_j, and behind these the others are computed, outputs and all.
//
// Or, of short sequences and wide values, they have panels of the state: each prepares all chunks, as what another
// thread prepared has to be fetched from that thread's cache, which takes longer. Included per instruction set.

#include "attention_chunk.h"

static int64_t panels(const Attention& a) { return AttentionStream::panels(a); }

static int64_t memory_floats(const Attention& a, const Part& part) {
  return Places(a).floats + AttentionStreams::floats(a, part);
}

// Tokens first ... last - 1 of some streams: outputs and states, or where `at` has no heads the states alone.
static void advance(const Places& at, const AttentionStreams& streams, int64_t first, int64_t last, float* memory) {
  const Attention& a = streams.a;
  for (Turn turn = {streams.part.first_stream, first}, next; turn.start < last; turn = next) {
    next = streams.after(turn, kChunk);
    const Chunk chunk = {a, at, Tokens(a, turn), memory};
    chunk.prepare();
    chunk.apply(streams[turn.stream], Ahead(a, Tokens(a, next), chunk.tiles(), at.heads > 0));
  }
}

// All tokens of a part of the call.
static void run(const Attention& a, const Part& part, float* memory) {
  const Places at(a);
  const AttentionStreams streams = {a, part, memory + at.floats, false};
  streams.open();
  advance(at, streams, 0, a.keys, memory);
  streams.close();
}

static int64_t state_floats(const Attention& a) { return AttentionStream::floats(a); }

// The first segment with its outputs, and the state behind it.
static void run_first(const Attention& a, const Part& part, const Segment& segment, float* state, float* memory) {
  const AttentionStreams streams = {a, part, state, false};
  streams.open();
  advance(Places(a), streams, segment.first, segment.last, memory);
}

// The state that a segment's keys leave of none.
static void sum_keys(const Attention& a, const Part& part, const Segment& segment, float* state, float* memory) {
  Places at(a);
  at.heads = 0;
  std::memset(state, 0, AttentionStream::floats(a) * sizeof(float));
  advance(at, {a, part, state, false}, segment.first, segment.last, memory);
}

// A segment behind `before` others: behind the state of the first of them, and what the others' keys leave of none. The
// products of their decays are given by roots: a state that grows by more than a float holds can still be a number.
static void run_behind(const Attention& a, const Part& part, const Segment& segment, int64_t before, const float* states,
                       const float* roots, float* memory) {
  const Places at(a);
  const int64_t floats = AttentionStream::floats(a);
  float* state = memory + at.floats;
  std::memcpy(state, states, floats * sizeof(float));
  for (int64_t j = 1; j < before; ++j)
    for (int64_t i = 0; i < floats; i += kLanes)
      store(state + i, load(state + i) * roots[j] * roots[j] + load(states + j * floats + i));
  const AttentionStreams streams = {a, part, state, false};
  advance(at, streams, segment.first, segment.last, memory);
  if (segment.last == a.keys) streams.close();
}
