// Softmax attention of the query heads that share one head of keys, a stream: for row r of the queries and key s
//
//   a_rs = scale q_r . k_s + mask_rs,  m_r = max_s a_rs,  o_r = (sum over s of exp(a_rs - m_r) v_s) / (sum over s of exp(a_rs - m_r))
//
// Few rows take their scores with all keys first, while keys and values are added to what is there: each is met once.
// Of many rows a block at a time passes over blocks of keys; where m_r grows, the sums so far are multiplied. Included per
// instruction set.

#include "tile.h"

constexpr int kTile = kRows < 4 ? 4 : 8;    // rows of a product's tile
constexpr int64_t kKeys = 4 * kPanel;       // keys of a block
constexpr int64_t kBlockRows = 64;          // rows of a block, as far as these are tokens of all heads
constexpr float kHidden = -1e30f, kSeen = -1e29f;  // masks below one add nothing to a sum with a maximum above the other

// What is added to the scores of a row: its numbers, and at most `low` for keys behind the last that it may see.
struct Mask {
  const float* row;
  int64_t last;
  float low;

  // With keys from k on, of which `left` are there: -inf behind those.
  INLINE_MEMBER Vector at(int64_t k, int64_t left) const {
    const Vector x = load_first(row + k, left, -INFINITY);
    const Integers behind = lane() + static_cast<int32_t>(k - last);
    return behind > Integers{} ? smaller(all(low), x) : x;
  }
};

// The query of a token, number g of those that share a head of keys.
struct Query {
  const CachedAttention& a;
  const int64_t batch, head, token;

  Query(const CachedAttention& a, int64_t stream, int64_t g, int64_t t)
      : a(a), batch(stream / a.heads), head(stream % a.heads * a.group() + g), token(t) {}
  const float* from() const { return a.query + ((batch * a.queries + token) * a.query_heads + head) * a.d_k; }
  float* output() const { return a.output + ((batch * a.queries + token) * a.query_heads + head) * a.d_v; }
  Mask mask() const {
    if (!a.mask) return {a.seen + batch * a.keys(), a.past + token, a.low};
    return {a.mask + batch * a.mask_of_batch + token * a.keys(), a.keys(), -INFINITY};
  }
};

// Rows first ... first + count - 1 of what a cache holds after the call, of a stream.
static void append(const float* past, int64_t kept, const float* added, int64_t stride, int64_t width, int64_t first,
                   int64_t count, float* present) {
  const int64_t old = std::min(std::max<int64_t>(kept - first, 0), count);
  if (old > 0) std::memcpy(present + first * width, past + first * width, old * width * sizeof(float));
  for (int64_t i = first + old; i < first + count; ++i)
    std::memcpy(present + i * width, added + (i - kept) * stride, width * sizeof(float));
}

static void append_keys(const CachedAttention& a, int64_t stream, int64_t first, int64_t count) {
  const float* added = a.key + (stream / a.heads * a.queries * a.heads + stream % a.heads) * a.d_k;
  append(a.past_key + stream * a.past * a.d_k, a.past, added, a.heads * a.d_k, a.d_k, first, count,
         a.present_key + stream * a.keys() * a.d_k);
}

static void append_values(const CachedAttention& a, int64_t stream, int64_t first, int64_t count) {
  const float* added = a.value + (stream / a.heads * a.queries * a.heads + stream % a.heads) * a.d_v;
  append(a.past_value + stream * a.past * a.d_v, a.past, added, a.heads * a.d_v, a.d_v, first, count,
         a.present_value + stream * a.keys() * a.d_v);
}

static void append_all(const CachedAttention& a, const Part& part) {
  for (int64_t stream = part.first_stream; stream < part.last_stream; ++stream)
    append_keys(a, stream, 0, a.keys()), append_values(a, stream, 0, a.keys());
}

// A thread's memory: of some rows the queries, their scores with `keys` keys, sums of values, maxima and denominators; and a
// block of keys by channels, and one of values.
struct Room : MemoryLayout {
  int64_t width, panels, columns, stride;
  int64_t query, scores, sums, maximum, total, keys, values;

  Room(const CachedAttention& a, int64_t rows, int64_t all_keys) {
    rows = (rows + kTile - 1) / kTile * kTile;
    width = vectors(a.d_k) * kLanes, panels = (a.d_v + kPanel - 1) / kPanel, columns = panels * kPanel;
    stride = (all_keys + kLanes - 1) / kLanes * kLanes;
    query = take(rows * width), scores = take(rows * stride), sums = take(rows * columns);
    maximum = take(rows), total = take(rows), keys = take(width * kKeys), values = take(kKeys * columns);
  }
};

static void load_query(const Query& q, float* to) {
  for (int64_t i = 0; i < q.a.d_k; i += kLanes) store(to + i, load_first(q.from() + i, q.a.d_k - i) * q.a.scale);
}

static void store_output(const Query& q, const float* sums, float total) {
  for (int64_t i = 0; i < q.a.d_v; i += kLanes) store_first(q.output() + i, load(sums + i) / total, q.a.d_v - i);
}

// Scores less their maximum as exponentials; returns the sum of these. -inf, of keys that are not there, is none.
static float exponentiate(float* scores, int64_t count, float maximum) {
  const float base = maximum == -INFINITY ? 0 : maximum;
  Vector total = {};
  for (int64_t k = 0; k < count; k += kLanes) {
    const Vector e = exponential(load(scores + k) - base);
    store(scores + k, e);
    total += e;
  }
  return sum(total);
}

// Values of `count` keys by rows of whole panels, zeros behind their channels: where they are, or a copy.
static const float* whole_panels(const CachedAttention& a, const float* value, int64_t count, const Room& at, float* copy) {
  if (a.d_v == at.columns) return value;
  for (int64_t k = 0; k < count; ++k) {
    std::memcpy(copy + k * at.columns, value + k * a.d_v, a.d_v * sizeof(float));
    std::memset(copy + k * at.columns + a.d_v, 0, (at.columns - a.d_v) * sizeof(float));
  }
  return copy;
}

// sums += weights times values, R rows of them.
template <int R>
INLINE void add_values(float* sums, const float* weights, int64_t stride, int64_t count, const float* values, const Room& at) {
  for (int64_t p = 0; p < at.columns; p += kPanel) {
    Tile<R> tile;
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < kColumns; ++j)
        tile.at[r][j] = load(sums + r * at.columns + p + j * kLanes);
    multiply(tile, weights, stride, count, values + p, at.columns);
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < kColumns; ++j)
        store(sums + r * at.columns + p + j * kLanes, tile.at[r][j]);
  }
}

// Scores of a row with the keys from k on, as many as a vector has lanes; those behind the last are that one again.
INLINE Vector scores_of(const float* query, const float* key, int64_t d_k, int64_t left) {
  Vector products[kLanes] = {};
  for (int64_t i = 0; i < d_k; i += kLanes) {
    const Vector q = load(query + i);
    UNROLL for (int s = 0; s < kLanes; ++s) products[s] += q * load_first(key + (s < left ? s : left - 1) * d_k + i, d_k - i);
  }
  return sums(products);
}

constexpr int kFewRows = 4;

static int64_t few_floats(const CachedAttention& a) { return Room(a, a.rows(), a.keys()).floats; }

static void run_few(const CachedAttention& a, const Part& part, float* memory) {
  const int64_t rows = a.rows(), keys = a.keys();
  const Room at(a, rows, keys);
  float *scores = memory + at.scores, *sums = memory + at.sums;
  for (int64_t stream = part.first_stream; stream < part.last_stream; ++stream) {
    const auto query = [&](int64_t r) { return Query(a, stream, r % a.group(), r / a.group()); };
    Mask masks[kFew];
    for (int64_t r = 0; r < rows; ++r) masks[r] = query(r).mask(), load_query(query(r), memory + at.query + r * at.width);
    const float* key = a.present_key + stream * keys * a.d_k;
    for (int64_t k = 0; k < keys; k += kLanes) {
      const int64_t left = keys - k;
      append_keys(a, stream, k, std::min<int64_t>(left, kLanes));
      for (int64_t r = 0; r < rows; ++r) {
        const Vector products = scores_of(memory + at.query + r * at.width, key + k * a.d_k, a.d_k, left);
        store(scores + r * at.stride + k, products + masks[r].at(k, left));
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* own = scores + r * at.stride;
      Vector top = all(-INFINITY);
      for (int64_t k = 0; k < keys; k += kLanes) top = larger(load(own + k), top);
      memory[at.total + r] = exponentiate(own, keys, largest(top));
    }
    std::memset(sums, 0, rows * at.columns * sizeof(float));
    const float* value = a.present_value + stream * keys * a.d_v;
    for (int64_t k = 0; k < keys; k += kKeys) {
      const int64_t count = std::min(keys - k, kKeys);
      append_values(a, stream, k, count);
      const float* values = whole_panels(a, value + k * a.d_v, count, at, memory + at.values);
      int64_t r = 0;
      for (; r + kFewRows <= rows; r += kFewRows)
        add_values<kFewRows>(sums + r * at.columns, scores + r * at.stride + k, at.stride, count, values, at);
      for (; r < rows; ++r) add_values<1>(sums + r * at.columns, scores + r * at.stride + k, at.stride, count, values, at);
    }
    for (int64_t r = 0; r < rows; ++r) store_output(query(r), sums + r * at.columns, memory[at.total + r]);
  }
}

static int64_t block_tokens(const CachedAttention& a) { return std::max<int64_t>(1, kBlockRows / a.group()); }
static int64_t blocks(const CachedAttention& a) { return (a.queries + block_tokens(a) - 1) / block_tokens(a); }
static int64_t block_floats(const CachedAttention& a) { return Room(a, block_tokens(a) * a.group(), kKeys).floats; }

// Some tokens of a stream, whose keys and values are in the cache; row g * tokens + t.
struct QueryBlock {
  const CachedAttention& a;
  const Room& at;
  const int64_t stream, first, tokens;
  float* memory;

  int64_t rows() const { return tokens * a.group(); }
  Query query(int64_t r) const { return Query(a, stream, r / tokens, first + r % tokens); }
  float* sums(int64_t r) const { return memory + at.sums + r * at.columns; }
  float* scores(int64_t r) const { return memory + at.scores + r * kKeys; }

  void open() const {
    const int64_t padded = (rows() + kTile - 1) / kTile * kTile;
    std::memset(memory + at.query, 0, padded * at.width * sizeof(float));
    std::memset(memory + at.sums, 0, padded * at.columns * sizeof(float));
    for (int64_t r = 0; r < rows(); ++r) {
      load_query(query(r), memory + at.query + r * at.width);
      memory[at.maximum + r] = -INFINITY, memory[at.total + r] = 0;
    }
  }

  // Whether the keys would add nothing to any sum.
  bool hides(int64_t k, int64_t count) const {
    for (int64_t r = 0; r < rows(); ++r)
      if (!(memory[at.maximum + r] > kSeen)) return false;
    for (int64_t t = 0; t < tokens; ++t) {
      const Mask mask = query(t).mask();
      for (int64_t i = 0; i < count; i += kLanes)
        if (!(largest(mask.at(k + i, count - i)) < kHidden)) return false;
    }
    return true;
  }

  void load_keys(int64_t k, int64_t count) const {
    const float* key = a.present_key + (stream * a.keys() + k) * a.d_k;
    for (int64_t s = 0; s < kKeys; s += kLanes)
      for (int64_t i = 0; i < a.d_k; i += kLanes) {
        Vector block[kLanes];
        UNROLL for (int r = 0; r < kLanes; ++r)
          block[r] = s + r < count ? load_first(key + (s + r) * a.d_k + i, a.d_k - i) : Vector{};
        transpose(block);
        float* to = memory + at.keys + (s / kPanel * at.width + i) * kPanel + s % kPanel;
        UNROLL for (int r = 0; r < kLanes; ++r) store(to + r * kPanel, block[r]);
      }
  }

  void score() const {
    for (int64_t r = 0; r < rows(); r += kTile)
      for (int64_t s = 0; s < kKeys; s += kPanel) {
        Tile<kTile> tile = nothing<kTile>();
        multiply(tile, memory + at.query + r * at.width, at.width, a.d_k, memory + at.keys + s * at.width, kPanel);
        UNROLL for (int i = 0; i < kTile; ++i) UNROLL for (int j = 0; j < kColumns; ++j)
            store(scores(r + i) + s + j * kLanes, tile.at[i][j]);
      }
  }

  // Masks, maxima and exponentials of all rows.
  void weigh(int64_t k, int64_t count) const {
    for (int64_t r = 0; r < rows(); ++r) {
      const Mask mask = query(r).mask();
      Vector top = all(-INFINITY);
      for (int64_t s = 0; s < kKeys; s += kLanes) {
        const Vector x = s < count ? load(scores(r) + s) + mask.at(k + s, count - s) : all(-INFINITY);
        store(scores(r) + s, x);
        top = larger(x, top);
      }
      const float before = memory[at.maximum + r], maximum = std::max(before, largest(top));
      if (maximum > before) {
        const float factor = before == -INFINITY ? 0 : exponential(all(before - maximum))[0];
        for (int64_t i = 0; i < at.columns; i += kLanes) store(sums(r) + i, load(sums(r) + i) * factor);
        memory[at.total + r] *= factor, memory[at.maximum + r] = maximum;
      }
      memory[at.total + r] += exponentiate(scores(r), kKeys, maximum);
    }
  }

  void run() const {
    open();
    for (int64_t k = 0; k < a.keys(); k += kKeys) {
      const int64_t count = std::min(a.keys() - k, kKeys);
      if (hides(k, count)) continue;
      load_keys(k, count);
      score();
      weigh(k, count);
      const float* value = a.present_value + (stream * a.keys() + k) * a.d_v;
      const float* values = whole_panels(a, value, count, at, memory + at.values);
      for (int64_t r = 0; r < rows(); r += kTile) add_values<kTile>(sums(r), scores(r), kKeys, count, values, at);
    }
    for (int64_t r = 0; r < rows(); ++r) store_output(query(r), sums(r), memory[at.total + r]);
  }
};

static void run_blocks(const CachedAttention& a, const Part& part, float* memory) {
  const int64_t tokens = block_tokens(a);
  const Room at(a, tokens * a.group(), kKeys);
  for (int64_t stream = part.first_stream; stream < part.last_stream; ++stream)
    for (int64_t block = part.first_panel; block < part.last_panel; ++block)
      QueryBlock{a, at, stream, block * tokens, std::min(tokens, a.queries - block * tokens), memory}.run();
}
