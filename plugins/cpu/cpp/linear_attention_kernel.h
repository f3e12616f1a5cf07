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

constexpr int kTokens = 8 * kRows;  // a block: what is prepared of it stays in the first cache
constexpr int kPanel = kColumns * kLanes;

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

// A state in memory: what is read, and where the next one is written, by rows of key channels.
struct State {
  const float* from;
  float* to;
  int64_t from_stride, to_stride;
};

template <int R>
INLINE void read(const float* x, int64_t width, int64_t rows, const State& S, Vector (&sums)[R][kColumns]) {
  const float* from = S.from;
  for (int64_t i = 0; i < rows; ++i, from += S.from_stride) {
    Vector row[kColumns];
    for (int j = 0; j < kColumns; ++j) row[j] = load(from + j * kLanes);
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < kColumns; ++j) sums[r][j] += x[r * width + i] * row[j];
  }
}

// The state with R tokens more; with kRead what read() sums of it as it was, in the same turn.
template <int R, bool kDecay, bool kRead>
INLINE void write(const Group& g, int64_t width, int64_t rows, const State& S, const Vector (&u)[R][kColumns],
                  Vector (&sums)[R][kColumns]) {
  const float* from = S.from;
  float* to = S.to;
  for (int64_t i = 0; i < rows; ++i, from += S.from_stride, to += S.to_stride) {
    Vector row[kColumns];
    for (int j = 0; j < kColumns; ++j) row[j] = load(from + j * kLanes);
    if constexpr (kRead)
      for (int r = 0; r < R; ++r)
        for (int j = 0; j < kColumns; ++j) sums[r][j] += g.query[r * width + i] * row[j];
    if constexpr (kDecay)
      for (int j = 0; j < kColumns; ++j) row[j] *= g.decay[i];
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < kColumns; ++j) row[j] += g.store[r * width + i] * u[r][j];
    for (int j = 0; j < kColumns; ++j) store(to + j * kLanes, row[j]);
  }
}

// Where a tile's values come from and its outputs go: the first of its tokens and channels.
struct Tokens {
  const float* value;
  const float* beta;
  float* output;
  int64_t value_stride, beta_stride, output_stride, head_stride;  // head_stride: to the next query head's output
  int64_t columns;                                                // channels there are, at most kPanel
};

template <int R>
INLINE void finish(const Group& g, const Tokens& x, float* output, const Vector (&u)[R][kColumns],
                   Vector (&sums)[R][kColumns]) {
  for (int r = 0; r < R; ++r) {
    for (int s = 0; s <= r; ++s)
      for (int j = 0; j < kColumns; ++j) sums[r][j] += g.pairs[r * kRows + s] * u[s][j];
    for (int j = 0; j < kColumns; ++j) {
      const int64_t left = x.columns - j * kLanes;
      if (left > 0) store_first(output + r * x.output_stride + j * kLanes, sums[r][j] * g.reciprocal[r], left);
    }
  }
}

// One tile: R tokens of all query heads of a state.
template <int R, bool kDecay, bool kDelta>
static void tile(const Group& first, int64_t heads, int64_t width, int64_t rows, const State& S, const Tokens& x) {
  const Group last = first.head(heads - 1, width);
  Vector u[R][kColumns], sums[R][kColumns] = {};
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < kColumns; ++j) {
      const int64_t left = x.columns - j * kLanes;
      u[r][j] = left > 0 ? load_first(x.value + r * x.value_stride + j * kLanes, left) : Vector{};
    }
  if constexpr (kDelta) {
    read<R>(last.key, width, rows, S, sums);
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < kColumns; ++j) {
        Vector seen = sums[r][j];
        for (int s = 0; s < r; ++s) seen += last.keys[r * kRows + s] * u[s][j];
        u[r][j] = x.beta[r * x.beta_stride] * (u[r][j] - seen);
      }
  }
  for (int64_t h = 0; h + 1 < heads; ++h) {
    std::memset(sums, 0, sizeof sums);
    const Group g = first.head(h, width);
    read<R>(g.query, width, rows, S, sums);
    finish<R>(g, x, x.output + h * x.head_stride, u, sums);
  }
  std::memset(sums, 0, sizeof sums);
  write<R, kDecay, true>(last, width, rows, S, u, sums);
  finish<R>(last, x, x.output + (heads - 1) * x.head_stride, u, sums);
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
    decay = take(a.has_decay ? tokens / kRows : 0);
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
  const int64_t width = at.width, group = token / kRows;
  const float *q = memory + at.query, *k = memory + at.key + token * width;
  const float* alpha = memory + at.alpha + token * width;
  float* seen = memory + at.seen + (head * kTokens + token) * width;
  float *from_start = memory + at.from_start + token * width, *stored = memory + at.store + token * width;
  float* decay = memory + at.decay + group * width;
  Vector pairs[R][R] = {}, keys[R][R] = {}, below[R] = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    Vector query[R], key[R];
    for (int r = 0; r < R; ++r) query[r] = load(q + r * width + i), key[r] = load(k + r * width + i);
    Vector total = {};
    for (int s = 0; s < R; ++s) {
      Vector x = key[s];
      pairs[s][s] += query[s] * x;
      for (int r = s + 1; r < R; ++r) {
        if constexpr (kDecay) x *= load(alpha + r * width + i);
        pairs[r][s] += query[r] * x;
        if constexpr (kDelta) keys[r][s] += key[r] * x;
      }
      store(stored + s * width + i, x);
      total += x;
    }
    Vector past = all(1.0f);
    const Vector sum_before = load(z + i);
    for (int r = 0; r < R; ++r) {
      if constexpr (kDecay) past *= load(alpha + r * width + i);
      const Vector now = kDecay ? query[r] * past : query[r];
      store(seen + r * width + i, now);
      below[r] += now * sum_before;
      if constexpr (kDelta) store(from_start + r * width + i, kDecay ? key[r] * past : key[r]);
    }
    if constexpr (kDecay) store(decay + i, past);
    if (head == at.heads - 1) store(z + i, past * sum_before + total);
  }
  float* P = memory + at.pairs + (head * kTokens + token) * kRows;
  float* K = memory + at.keys + token * kRows;
  float* reciprocal = memory + at.reciprocal + head * kTokens + token;
  for (int r = 0; r < R; ++r) {
    float denominator = a.normalize ? sum(below[r]) + a.eps : 1.0f;
    for (int s = 0; s <= r; ++s) {
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

  int64_t column(int64_t p) const { return p * kPanel; }
  int64_t columns(int64_t p) const { return a.d_v - column(p) < kPanel ? a.d_v - column(p) : kPanel; }
  float* packed(int64_t p) const { return z + at.width + p * at.rows * kPanel; }
  const float* past() const { return a.past_state ? a.past_state + index * a.d_k * a.d_v : nullptr; }
  float* present() const { return a.present_state ? a.present_state + index * a.d_k * a.d_v : nullptr; }

  // So few tokens are one tile: a whole panel is read and written where it is, in past and present state.
  bool in_place(int64_t p) const { return a.keys > 0 && a.keys <= kRows && columns(p) == kPanel; }

  State panel(int64_t p) const {
    State S = {packed(p), packed(p), kPanel, kPanel};
    if (in_place(p) && past()) S.from = past() + column(p), S.from_stride = a.d_v;
    if (in_place(p) && present()) S.to = present() + column(p), S.to_stride = a.d_v;
    return S;
  }

  void open() const {
    std::memset(z, 0, at.width * sizeof(float));
    if (a.past_normalizer) std::memcpy(z, a.past_normalizer + index * a.d_k, a.d_k * sizeof(float));
    for (int64_t p = part.first_panel; p < part.last_panel; ++p) {
      if (in_place(p) && past()) continue;
      std::memset(packed(p), 0, at.rows * kPanel * sizeof(float));
      for (int64_t i = 0; past() && i < at.rows; ++i)
        std::memcpy(packed(p) + i * kPanel, past() + i * a.d_v + column(p), columns(p) * sizeof(float));
    }
  }

  void close() const {
    for (int64_t p = part.first_panel; present() && p < part.last_panel; ++p)
      for (int64_t i = 0; !in_place(p) && i < at.rows; ++i)
        std::memcpy(present() + i * a.d_v + column(p), packed(p) + i * kPanel, columns(p) * sizeof(float));
    if (a.present_normalizer && part.first_panel == 0)
      std::memcpy(a.present_normalizer + index * a.d_k, z, a.d_k * sizeof(float));
  }
};

// Tokens start ... start + count - 1 of a stream.
template <bool kDecay, bool kDelta>
static void block(const Stream& stream, float* memory, int64_t start, int64_t count) {
  const Attention& a = stream.a;
  const Layout& at = stream.at;
  const Part& part = stream.part;
  const int64_t b = stream.index / a.heads, h = stream.index % a.heads;
  float* z = stream.z;
  const int64_t heads = at.heads, shared = a.query_heads < a.heads ? a.heads / a.query_heads : 1;
  load_keys(a, at, memory, b, h, start, count);
  for (int64_t t = 0; t < count; t += kRows)
    for (int64_t j = 0; j < heads; ++j) {
      const int64_t tokens = count - t < kRows ? count - t : kRows;
      load_queries(a, at, memory, b, (h * heads + j) / shared, start + t, tokens);
      switch (tokens) {
        case 1: prepare<1, kDecay, kDelta>(at, memory, z, t, j, a); break;
        case 2: prepare<2, kDecay, kDelta>(at, memory, z, t, j, a); break;
        case 3: prepare<3, kDecay, kDelta>(at, memory, z, t, j, a); break;
        default: prepare<kRows, kDecay, kDelta>(at, memory, z, t, j, a);
      }
    }
  const int64_t betas = a.beta_per_head ? a.heads : 1;
  for (int64_t p = part.first_panel; p < part.last_panel; ++p) {
    const State S = stream.panel(p);
    for (int64_t t = 0; t < count; t += kRows) {
      const int64_t token = b * a.queries + start + t, column = p * kPanel;
      const Group g = {memory + at.seen + t * at.width,       memory + at.from_start + t * at.width,
                       memory + at.store + t * at.width,      memory + at.decay + t / kRows * at.width,
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
      switch (count - t) {
        case 1: tile<1, kDecay, kDelta>(g, heads, at.width, at.rows, S, x); break;
        case 2: tile<2, kDecay, kDelta>(g, heads, at.width, at.rows, S, x); break;
        case 3: tile<3, kDecay, kDelta>(g, heads, at.width, at.rows, S, x); break;
        default: tile<kRows, kDecay, kDelta>(g, heads, at.width, at.rows, S, x);
      }
    }
  }
}

static int64_t memory_floats(const Attention& a, const Part& part) {
  const Layout at(a);
  return at.block + (part.last_stream - part.first_stream) * at.stream;
}

static int64_t panels(const Attention& a) { return Layout(a).panels; }

// All tokens of a part of the call. Streams take turns by block: one token's heads are neighbours in memory.
template <bool kDecay, bool kDelta>
static void run(const Attention& a, const Part& part, float* memory) {
  const Layout at(a);
  auto stream = [&](int64_t index) {
    return Stream{a, at, part, index, memory + at.block + (index - part.first_stream) * at.stream};
  };
  for (int64_t s = part.first_stream; s < part.last_stream; ++s) stream(s).open();
  for (int64_t start = 0; start < a.keys; start += kTokens)
    for (int64_t s = part.first_stream; s < part.last_stream; ++s)
      block<kDecay, kDelta>(stream(s), memory, start, a.keys - start < kTokens ? a.keys - start : kTokens);
  for (int64_t s = part.first_stream; s < part.last_stream; ++s) stream(s).close();
}

static void run(const Attention& a, const Part& part, float* memory) {
  if (a.has_beta) return a.has_decay ? run<true, true>(a, part, memory) : run<false, true>(a, part, memory);
  return a.has_decay ? run<true, false>(a, part, memory) : run<false, false>(a, part, memory);
}
