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
// Threads that share a stream each prepare all its chunks, and apply them to their own panels of the state: what another
// thread prepared has to be fetched from that thread's cache, which takes longer. Included per instruction set.

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
    const Chunk chunk = {a, at, Tokens(a, turn), memory};
    chunk.prepare();
    chunk.apply(streams[turn.stream], Ahead(a, Tokens(a, next), chunk.tiles()));
  }
  streams.close();
}
