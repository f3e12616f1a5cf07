// LinearAttention, a tile of kRows tokens by kColumns vectors of value channels at a time.
//
// For tokens r = 1 ... R behind the state S, with A_r the product of their decays up to r, elementwise on
// key channels (1 without decay):
//
//   P_rs = q_r . (A_r / A_s o k_s)         s <= r       pairs
//   K_rs = k_r . (A_r / A_s o k_s)         s < r        keys, of the delta rules
//   u_r  = v_r                                          linear, gated
//   u_r  = beta_r (v_r - (A_r o k_r)^T S - sum_s K_rs u_s)      delta rules
//   o_r  = (A_r o q_r)^T S + sum_{s <= r} P_rs u_s      divided by the same with u = 1 and S = z, plus eps
//   S   <- A_R o S + sum_s (A_R / A_s o k_s) u_s^T      and z likewise with u = 1
//
// A_r / A_s is a product of decays after s, never a quotient, so decays of any size are safe. With so few
// tokens a tile the products P and K cost next to nothing, and every element of S is loaded and stored
// once for R tokens: the arithmetic is that of the recurrence itself. Included per instruction set.

#include "attention_block.h"
#include "bidirectional_attention_kernel.h"

// What tiles need of kRows tokens or fewer. Of query heads that share a state it is the first one's; the
// others' are a block further on.
struct Group {
  const float* query;       // A_r o q_r (R, width)
  const float* key;         // A_r o k_r (R, width), of the delta rules
  const float* store;       // A_R / A_s o k_s (R, width)
  const float* decay;       // A_R (width)
  const float* pairs;       // P (kRows, kRows)
  const float* keys;        // K (kRows, kRows)
  const float* reciprocal;  // of the denominators (R)

  Group head(int64_t h, int64_t width) const {
    Group other = *this;
    other.query += h * kTokens * width;
    other.pairs += h * kTokens * kRows;
    other.reciprocal += h * kTokens;
    return other;
  }
};

// Where a tile's values come from and its outputs go: the first of its tokens and channels.
struct Tokens {
  const float* value;
  const float* beta;
  float* output;
  int64_t value_stride, beta_stride, output_stride, head_stride;  // head_stride: to the next query head's output
  int64_t columns;                                                // channels there are, at most kPanel
};

// The output of tokens: the sums so far and what the tile's own tokens add.
template <int R>
INLINE void finish(const Group& g, const Tokens& x, float* output, const Tile<R>& u, Tile<R> sums) {
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int s = 0; s <= r; ++s) UNROLL for (int j = 0; j < kColumns; ++j)
        sums.at[r][j] += g.pairs[r * kRows + s] * u.at[s][j];
    UNROLL for (int j = 0; j < kColumns; ++j) {
      const int64_t left = x.columns - j * kLanes;
      if (left > 0) store_first(output + r * x.output_stride + j * kLanes, sums.at[r][j] * g.reciprocal[r], left);
    }
  }
}

// One tile: R tokens of all query heads of a state.
template <int R, bool kDecay, bool kDelta>
static void tile(const Group& first, int64_t heads, int64_t width, int64_t rows, const State& S, const Tokens& x) {
  const Group last = first.head(heads - 1, width);
  Tile<R> u = load_tile<R>(x.value, x.value_stride, x.columns);
  if constexpr (kDelta) {
    Tile<R> seen = read<R>(last.key, width, rows, S);
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < kColumns; ++j) {
        UNROLL for (int s = 0; s < r; ++s) seen.at[r][j] += last.keys[r * kRows + s] * u.at[s][j];
        u.at[r][j] = x.beta[r * x.beta_stride] * (u.at[r][j] - seen.at[r][j]);
      }
  }
  for (int64_t h = 0; h + 1 < heads; ++h) {
    const Group g = first.head(h, width);
    finish<R>(g, x, x.output + h * x.head_stride, u, read<R>(g.query, width, rows, S));
  }
  finish<R>(last, x, x.output + (heads - 1) * x.head_stride, u, write<R, kDecay, true>(last.query, last.store, last.decay, width, rows, S, u));
}

// Ask for rows of floats that are read soon: those of a head lie too far apart for the processor to foresee.
static void prefetch(const float* x, int64_t rows, int64_t stride, int64_t width) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < width; i += 16) __builtin_prefetch(x + r * stride + i);
}

// What tokens start ... start + count - 1 of a stream read.
static void prefetch(const AttentionStream& stream, int64_t start, int64_t count) {
  const Attention& a = stream.a;
  const int64_t h = stream.head(), token = stream.batch() * a.keys + start;
  const int64_t key_head = h / (a.heads / a.key_heads), query_head = h * a.query_heads / a.heads;
  prefetch(a.query + (token * a.query_heads + query_head) * a.d_k, count, a.query_heads * a.d_k,
           (a.query_heads > a.heads ? a.group() : 1) * a.d_k);
  prefetch(a.key + (token * a.key_heads + key_head) * a.d_k, count, a.key_heads * a.d_k, a.d_k);
  prefetch(a.value + (token * a.heads + h) * a.d_v, count, a.heads * a.d_v, a.d_v);
}

// A block of a stream's tokens, from `start` on; meanwhile those of the next one are asked for.
template <bool kDecay, bool kDelta>
static void block(const AttentionStream& stream, const Layout& at, float* memory, int64_t start, const AttentionStream& next,
                  int64_t next_start) {
  const Attention& a = stream.a;
  const Part& part = stream.part;
  const int64_t b = stream.batch(), h = stream.head(), count = a.keys - start < kTokens ? a.keys - start : kTokens;
  float* z = stream.z;
  const int64_t heads = at.heads, shared = a.query_heads < a.heads ? a.heads / a.query_heads : 1;
  load_keys(a, at, memory, b, h, start, count);
  for (int64_t t = 0; t < count; t += rows(count - t))
    for (int64_t j = 0; j < heads; ++j) {
      load_queries(a, at, memory, b, (h * heads + j) / shared, start + t, rows(count - t));
      if (rows(count - t) == 1)
        prepare<1, kDecay, kDelta>(at, memory, z, t, j, a);
      else
        prepare<kRows, kDecay, kDelta>(at, memory, z, t, j, a);
    }
  const int64_t betas = a.beta_per_head ? a.heads : 1;
  for (int64_t p = part.first_panel; p < part.last_panel; ++p) {
    const State S = stream.state().panel(p);
    for (int64_t t = 0; t < count; t += rows(count - t)) {
      if (p == part.first_panel && next_start + t + rows(count - t) <= a.keys)
        prefetch(next, next_start + t, rows(count - t));
      const int64_t token = b * a.queries + start + t, column = p * kPanel;
      const Group g = {memory + at.seen + t * at.width,       memory + at.from_start + t * at.width,
                       memory + at.store + t * at.width,      memory + at.decay + t * at.width,
                       memory + at.pairs + t * kRows,         memory + at.keys + t * kRows,
                       memory + at.reciprocal + t};
      const Tokens x = {a.value + (token * a.heads + h) * a.d_v + column,
                        kDelta ? a.beta + token * betas + (a.beta_per_head ? h : 0) : nullptr,
                        a.output + (token * a.output_heads() + h * heads) * a.d_v + column,
                        a.heads * a.d_v,
                        betas,
                        a.output_heads() * a.d_v,
                        a.d_v,
                        a.d_v - column};
      if (rows(count - t) == 1)
        tile<1, kDecay, kDelta>(g, heads, at.width, at.rows, S, x);
      else
        tile<kRows, kDecay, kDelta>(g, heads, at.width, at.rows, S, x);
    }
  }
}

// All tokens of a part of the call.
template <bool kDecay, bool kDelta>
static void run(const Attention& a, const Part& part, float* memory) {
  const Layout at(a);
  const AttentionStreams streams = {a, part, memory + at.floats, a.keys == kRows};
  streams.open();
  for (Turn turn = streams.first(), next; turn.start < a.keys; turn = next) {
    next = streams.after(turn, kTokens);
    block<kDecay, kDelta>(streams[turn.stream], at, memory, turn.start, streams[next.stream], next.start);
  }
  streams.close();
}

static void run(const Attention& a, const Part& part, float* memory) {
  if (!a.causal) return run_both_ways(a, part, memory);
  if (a.has_beta) return a.has_decay ? run<true, true>(a, part, memory) : run<false, true>(a, part, memory);
  return a.has_decay ? run<true, false>(a, part, memory) : run<false, false>(a, part, memory);
}

static int64_t memory_floats(const Attention& a, const Part& part) {
  return Layout(a).floats + AttentionStreams::floats(a, part);
}

static int64_t panels(const Attention& a) { return AttentionStream::panels(a); }
