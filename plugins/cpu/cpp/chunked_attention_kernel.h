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
// Threads that share a stream do not each prepare its chunks: first all chunks of a stretch are prepared, by tokens, then
// each thread applies them to its panels of the state. Included per instruction set.

#include "attention_chunk.h"

static int64_t panels(const Attention& a) { return AttentionStream::panels(a); }

static int64_t memory_floats(const Attention& a, const Part& part) {
  return Places(a).floats + AttentionStreams::floats(a, part);
}

// All tokens of a part of the call.
static void run(const Attention& a, const Part& part, float* memory) {
  const Places at(a);
  const AttentionStreams streams = {a, part, memory + at.floats, false};
  streams.open();
  for (Turn turn = streams.first(), next; turn.start < a.keys; turn = next) {
    next = streams.after(turn, kChunk);
    const Chunk chunk = {a, at, Tokens(a, turn), memory, memory + at.prepared};
    chunk.prepare();
    chunk.apply(streams[turn.stream], Ahead(a, Tokens(a, next), chunk.tiles()));
  }
  streams.close();
}

static int64_t prepared_floats(const Attention& a) { return Places(a).prepared; }
static int64_t own_floats(const Attention& a) { return Places(a).floats - Places(a).prepared; }

// The chunks of a stretch that a part has, whose streams are chunks.
static void prepare(const Attention& a, const Stretch& x, const Part& part, float* memory) {
  const Places at(a);
  for (int64_t i = part.first_stream; i < part.last_stream; ++i)
    Chunk{a, at, Tokens(a, {i / x.chunks, x.start + i % x.chunks * kChunk}), x.prepared + i * at.prepared, memory}.prepare();
}

static void run_prepared(const Attention& a, const Stretch& x, const Part& part, float* memory) {
  const Places at(a);
  const AttentionStreams streams = {a, part, memory + at.floats, false};
  streams.open();
  for (int64_t i = part.first_stream * x.chunks; i < part.last_stream * x.chunks; ++i) {
    const Turn turn = {i / x.chunks, x.start + i % x.chunks * kChunk};
    const Chunk chunk = {a, at, Tokens(a, turn), x.prepared + i * at.prepared, memory};
    chunk.apply(streams[turn.stream], Ahead(a, Tokens(a, {turn.stream, turn.start + kChunk}), chunk.tiles()));
  }
  streams.close();
}
