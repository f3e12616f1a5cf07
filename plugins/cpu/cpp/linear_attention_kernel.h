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

#include "map_kernels.h"
#include "tile.h"

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

// Memory of a thread, by places in floats: what is prepared of a block, and what each stream keeps.
struct Layout {
  int64_t width, rows, panels, heads;
  int64_t query, key, alpha, seen, from_start, store, decay, pairs, keys, reciprocal, block, stream;

  explicit Layout(const Attention& a) {
    width = vectors(a.d_k) * kLanes;
    rows = a.d_k;
    panels = (a.d_v + kPanel - 1) / kPanel;
    heads = a.group();
    block = 0;
    const int64_t tokens = kTokens * width;
    query = take(kRows * width);
    key = take(tokens);
    alpha = take(a.has_decay ? tokens : 0);
    seen = take(tokens * heads);
    from_start = take(a.has_beta ? tokens : 0);
    store = take(tokens);
    decay = take(a.has_decay ? tokens : 0);
    pairs = take(kTokens * kRows * heads);
    keys = take(kTokens * kRows);
    reciprocal = take(kTokens * heads);
    stream = width + panels * rows * kPanel;  // z, and S in panels
  }

 private:
  int64_t take(int64_t floats) {
    const int64_t start = block;
    block += (floats + 15) / 16 * 16;
    return start;
  }
};

// P, K, and tokens with their decays, of one query head: the sums over key channels of the header.
template <int R, bool kDecay, bool kDelta>
static void prepare(const Layout& at, float* memory, float* z, int64_t token, int64_t head, const Attention& a) {
  const int64_t width = at.width;
  const float *q = memory + at.query, *k = memory + at.key + token * width;
  const float* alpha = memory + at.alpha + token * width;
  float* seen = memory + at.seen + (head * kTokens + token) * width;
  float *from_start = memory + at.from_start + token * width, *stored = memory + at.store + token * width;
  float* decay = memory + at.decay + token * width;
  Vector pairs[R][R], keys[R][R], below[R];
  UNROLL for (int r = 0; r < R; ++r) {
    below[r] = Vector{};
    UNROLL for (int s = 0; s <= r; ++s) pairs[r][s] = keys[r][s] = Vector{};
  }
  for (int64_t i = 0; i < width; i += kLanes) {
    Vector query[R], past = all(1.0f), total = Vector{};
    const Vector before = load(z + i);
    UNROLL for (int r = 0; r < R; ++r) {
      query[r] = load(q + r * width + i);
      if constexpr (kDecay) past *= load(alpha + r * width + i);
      const Vector now = kDecay ? query[r] * past : query[r];
      store(seen + r * width + i, now);
      below[r] += now * before;
    }
    UNROLL for (int s = 0; s < R; ++s) {
      Vector x = load(k + s * width + i);
      pairs[s][s] += query[s] * x;
      UNROLL for (int r = s + 1; r < R; ++r) {
        if constexpr (kDecay) x *= load(alpha + r * width + i);
        pairs[r][s] += query[r] * x;
        if constexpr (kDelta) keys[r][s] += load(k + r * width + i) * x;
      }
      store(stored + s * width + i, x);
      total += x;
    }
    if constexpr (kDelta) {
      Vector so_far = all(1.0f);
      UNROLL for (int r = 0; r < R; ++r) {
        if constexpr (kDecay) so_far *= load(alpha + r * width + i);
        store(from_start + r * width + i, load(k + r * width + i) * so_far);
      }
    }
    if constexpr (kDecay) store(decay + i, past);
    if (head == at.heads - 1) store(z + i, past * before + total);
  }
  float* P = memory + at.pairs + (head * kTokens + token) * kRows;
  float* K = memory + at.keys + token * kRows;
  float* reciprocal = memory + at.reciprocal + head * kTokens + token;
  UNROLL for (int r = 0; r < R; ++r) {
    float denominator = a.normalize ? sum(below[r]) + a.eps : 1.0f;
    UNROLL for (int s = 0; s <= r; ++s) {
      P[r * kRows + s] = sum(pairs[r][s]);
      if (a.normalize) denominator += P[r * kRows + s];
      if constexpr (kDelta)
        if (s < r) K[r * kRows + s] = sum(keys[r][s]);
    }
    reciprocal[r] = 1.0f / denominator;
  }
}

// exp(decay) of one token by key channel; 1 for one that is masked.
static void decays(const Attention& a, int64_t b, int64_t t, int64_t h, float* alpha) {
  const int64_t token = b * a.keys + t;
  if (a.key_mask && !a.key_mask[token]) {
    for (int64_t i = 0; i < a.d_k; i += kLanes) store(alpha + i, all(1.0f));
    return;
  }
  if (!a.decay_per_channel) {
    const Vector one = exponential(all(a.decay[token * a.heads + h]));
    for (int64_t i = 0; i < a.d_k; i += kLanes) store(alpha + i, one);
    return;
  }
  const float* x = a.decay_scale ? a.decay_scale + h * a.d_k : a.decay + (token * a.heads + h) * a.d_k;
  const float factor = a.decay_scale ? a.decay[token * a.heads + h] : 1.0f;
  for (int64_t i = 0; i < a.d_k; i += kLanes)
    store(alpha + i, exponential(load_first(x + i, a.d_k - i) * factor));
}

// Keys and decays of a block of tokens.
static void load_keys(const Attention& a, const Layout& at, float* memory, int64_t b, int64_t h, int64_t start,
                      int64_t count) {
  const int64_t key_head = h / (a.heads / a.key_heads);
  for (int64_t t = 0; t < count; ++t) {
    const int64_t token = b * a.keys + start + t;
    float* k = memory + at.key + t * at.width;
    if (a.key_mask && !a.key_mask[token])
      std::memset(k, 0, at.width * sizeof(float));
    else
      map_head(a.map, a.key + (token * a.key_heads + key_head) * a.d_k, k, a.d_k, 1.0f);
    if (a.has_decay) decays(a, b, start + t, h, memory + at.alpha + t * at.width);
  }
}

static void load_queries(const Attention& a, const Layout& at, float* memory, int64_t b, int64_t query_head,
                         int64_t start, int64_t count) {
  for (int64_t t = 0; t < count; ++t)
    map_head(a.map, a.query + ((b * a.queries + start + t) * a.query_heads + query_head) * a.d_k,
             memory + at.query + t * at.width, a.d_k, a.scale);
}

// One state and the sequence that it runs along.
struct Stream {
  const Attention& a;
  const Layout& at;
  const Part& part;
  int64_t index;
  float* z;  // the normaliser, and behind it the state in panels of kPanel channels

  int64_t columns(int64_t p) const { return state().columns(p); }
  State panel(int64_t p) const { return state().panel(p); }

  StateInPanels state() const {
    const int64_t size = a.d_k * a.d_v;
    return {a.past_state ? a.past_state + index * size : nullptr,
            a.present_state ? a.present_state + index * size : nullptr,
            z + at.width,
            at.rows,
            a.d_v,
            (a.keys == 1 || a.keys == kRows) && a.causal};
  }

  void open() const {
    std::memset(z, 0, at.width * sizeof(float));
    if (a.past_normalizer) std::memcpy(z, a.past_normalizer + index * a.d_k, a.d_k * sizeof(float));
    state().open(part.first_panel, part.last_panel);
  }

  void close() const {
    state().close(part.first_panel, part.last_panel);
    if (a.present_normalizer && part.first_panel == 0)
      std::memcpy(a.present_normalizer + index * a.d_k, z, a.d_k * sizeof(float));
  }
};

// Ask for rows of floats that are read soon: those of a head lie too far apart for the processor to foresee.
static void prefetch(const float* x, int64_t rows, int64_t stride, int64_t width) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < width; i += 16) __builtin_prefetch(x + r * stride + i);
}

// What tokens start ... start + count - 1 of a stream read.
static void prefetch(const Stream& stream, int64_t start, int64_t count) {
  const Attention& a = stream.a;
  const int64_t b = stream.index / a.heads, h = stream.index % a.heads, token = b * a.keys + start;
  const int64_t key_head = h / (a.heads / a.key_heads), query_head = h * a.query_heads / a.heads;
  prefetch(a.query + (token * a.query_heads + query_head) * a.d_k, count, a.query_heads * a.d_k,
           (a.query_heads > a.heads ? stream.at.heads : 1) * a.d_k);
  prefetch(a.key + (token * a.key_heads + key_head) * a.d_k, count, a.key_heads * a.d_k, a.d_k);
  prefetch(a.value + (token * a.heads + h) * a.d_v, count, a.heads * a.d_v, a.d_v);
}

// Tokens start ... start + count - 1 of a stream; meanwhile those of the next block are asked for.
template <bool kDecay, bool kDelta>
static void block(const Stream& stream, float* memory, int64_t start, int64_t count, const Stream& next,
                  int64_t next_start) {
  const Attention& a = stream.a;
  const Layout& at = stream.at;
  const Part& part = stream.part;
  const int64_t b = stream.index / a.heads, h = stream.index % a.heads;
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
    const State S = stream.panel(p);
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

static int64_t memory_floats(const Attention& a, const Part& part) {
  const Layout at(a);
  return at.block + (part.last_stream - part.first_stream) * at.stream;
}

static int64_t panels(const Attention& a) { return Layout(a).panels; }

// causal = 0: S = sum_s k_s v_s^T and z of all keys, then every query reads them.
static void add_keys(const Stream& stream, float* memory, int64_t start, int64_t count) {
  const Attention& a = stream.a;
  const Layout& at = stream.at;
  const int64_t b = stream.index / a.heads, h = stream.index % a.heads;
  load_keys(a, at, memory, b, h, start, count);
  float* keys = memory + at.key;
  std::memset(keys + count * at.width, 0, (kTokens - count) * at.width * sizeof(float));
  for (int64_t t = 0; t < count; ++t)
    for (int64_t i = 0; i < at.width; i += kLanes)
      store(stream.z + i, load(stream.z + i) + load(keys + t * at.width + i));
  for (int64_t p = stream.part.first_panel; p < stream.part.last_panel; ++p)
    for (int64_t t = 0; t < count; t += kRows) {
      const float* value = a.value + ((b * a.keys + start + t) * a.heads + h) * a.d_v + p * kPanel;
      const int64_t left = count - t, stride = a.heads * a.d_v;
      Tile<kRows> u = nothing<kRows>();
      if (left >= kRows)
        u = load_tile<kRows>(value, stride, stream.columns(p));
      else
        for (int64_t r = 0; r < left; ++r) {
          const Tile<1> one = load_tile<1>(value + r * stride, stride, stream.columns(p));
          for (int j = 0; j < kColumns; ++j) u.at[r][j] = one.at[0][j];
        }
      write<kRows, false, false>(nullptr, keys + t * at.width, nullptr, at.width, at.rows, stream.panel(p), u);
    }
}

static void answer_queries(const Stream& stream, float* memory, int64_t start, int64_t count) {
  const Attention& a = stream.a;
  const Layout& at = stream.at;
  const int64_t b = stream.index / a.heads, h = stream.index % a.heads;
  const int64_t shared = a.query_heads < a.heads ? a.heads / a.query_heads : 1;
  float* query = memory + at.query;
  for (int64_t head = h * at.heads; head < (h + 1) * at.heads; ++head) {
    std::memset(query, 0, kRows * at.width * sizeof(float));
    load_queries(a, at, memory, b, head / shared, start, count);
    float factor[kRows];
    for (int64_t r = 0; r < kRows; ++r) {
      Vector below = {};
      for (int64_t i = 0; i < at.width; i += kLanes) below += load(query + r * at.width + i) * load(stream.z + i);
      factor[r] = a.normalize ? 1.0f / (sum(below) + a.eps) : 1.0f;
    }
    for (int64_t p = stream.part.first_panel; p < stream.part.last_panel; ++p) {
      const Tile<kRows> sums = read<kRows>(query, at.width, at.rows, stream.panel(p));
      for (int64_t r = 0; r < count; ++r)
        for (int64_t j = 0; j < kColumns && j * kLanes < stream.columns(p); ++j)
          store_first(a.output + ((b * a.queries + start + r) * a.output_heads() + head) * a.d_v + p * kPanel +
                          j * kLanes,
                      sums.at[r][j] * factor[r], stream.columns(p) - j * kLanes);
    }
  }
}

static void run_both_ways(const Attention& a, const Part& part, float* memory) {
  const Layout at(a);
  for (int64_t s = part.first_stream; s < part.last_stream; ++s) {
    const Stream stream = {a, at, part, s, memory + at.block + (s - part.first_stream) * at.stream};
    stream.open();
    for (int64_t start = 0; start < a.keys; start += kTokens)
      add_keys(stream, memory, start, a.keys - start < kTokens ? a.keys - start : kTokens);
    for (int64_t start = 0; start < a.queries; start += kRows)
      answer_queries(stream, memory, start, a.queries - start < kRows ? a.queries - start : kRows);
    stream.close();
  }
}

// All tokens of a part of the call. Streams take turns by block: one token's heads are neighbours in memory.
template <bool kDecay, bool kDelta>
static void run(const Attention& a, const Part& part, float* memory) {
  const Layout at(a);
  auto stream = [&](int64_t index) {
    return Stream{a, at, part, index, memory + at.block + (index - part.first_stream) * at.stream};
  };
  for (int64_t s = part.first_stream; s < part.last_stream; ++s) stream(s).open();
  for (int64_t start = 0; start < a.keys; start += kTokens)
    for (int64_t s = part.first_stream; s < part.last_stream; ++s) {
      const bool wraps = s + 1 == part.last_stream;
      block<kDecay, kDelta>(stream(s), memory, start, a.keys - start < kTokens ? a.keys - start : kTokens,
                            stream(wraps ? part.first_stream : s + 1), wraps ? start + kTokens : start);
    }
  for (int64_t s = part.first_stream; s < part.last_stream; ++s) stream(s).close();
}

static void run(const Attention& a, const Part& part, float* memory) {
  if (!a.causal) return run_both_ways(a, part, memory);
  if (a.has_beta) return a.has_decay ? run<true, true>(a, part, memory) : run<false, true>(a, part, memory);
  return a.has_decay ? run<true, false>(a, part, memory) : run<false, false>(a, part, memory);
}
