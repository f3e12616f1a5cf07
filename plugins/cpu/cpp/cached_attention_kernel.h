// Softmax attention of the query heads that share one head of keys, a stream: for row r of the queries and key s
//
//   a_rs = scale q_r . k_s + mask_rs,  m_r = max_s a_rs,  o_r = (sum over s of exp(a_rs - m_r) v_s) / (sum over s of exp(a_rs - m_r))
//
// Few rows take their scores with all keys first, while keys and values are added to what is there: each is met once.
// Of many rows a block at a time passes over blocks of keys. Included per instruction set.

#include "softmax_rows.h"

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

static Room room(const CachedAttention& a, int64_t rows, int64_t keys) { return Room(a.d_k, a.d_v, rows, keys); }

static void load_query(const Query& q, float* to) {
  for (int64_t i = 0; i < q.a.d_k; i += kLanes) store(to + i, load_first(q.from() + i, q.a.d_k - i) * q.a.scale);
}

static void store_output(const Query& q, const float* sums, float total) {
  for (int64_t i = 0; i < q.a.d_v; i += kLanes) store_first(q.output() + i, load(sums + i) / total, q.a.d_v - i);
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

static int64_t few_floats(const CachedAttention& a) { return room(a, a.rows(), a.keys()).floats; }

static void run_few(const CachedAttention& a, const Part& part, float* memory) {
  const int64_t rows = a.rows(), keys = a.keys();
  const Room at = room(a, rows, keys);
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
static int64_t block_floats(const CachedAttention& a) { return room(a, block_tokens(a) * a.group(), kKeys).floats; }

// Some tokens of a stream, whose keys and values are in the cache; row g * tokens + t.
struct QueryBlock {
  const CachedAttention& a;
  const Room& at;
  const int64_t stream, first, tokens;
  const QueryRows rows;

  Query query(int64_t r) const { return Query(a, stream, r / tokens, first + r % tokens); }

  // Whether the keys would add nothing to any sum.
  bool hides(int64_t k, int64_t count) const {
    for (int64_t r = 0; r < rows.count; ++r)
      if (!(rows.maximum(r) > kSeen)) return false;
    for (int64_t t = 0; t < tokens; ++t) {
      const Mask mask = query(t).mask();
      for (int64_t i = 0; i < count; i += kLanes)
        if (!(largest(mask.at(k + i, count - i)) < kHidden)) return false;
    }
    return true;
  }

  void run() const {
    rows.clear();
    for (int64_t r = 0; r < rows.count; ++r) load_query(query(r), rows.query(r));
    for (int64_t k = 0; k < a.keys(); k += kKeys) {
      const int64_t count = std::min(a.keys() - k, kKeys);
      if (hides(k, count)) continue;
      const float* key = a.present_key + (stream * a.keys() + k) * a.d_k;
      rows.load_keys(a.d_k, [&](int64_t i) { return i < count ? key + i * a.d_k : nullptr; });
      rows.score(a.d_k);
      rows.weigh(count, [&](int64_t r) {
        return [k, count, mask = query(r).mask()](int64_t i) { return mask.at(k + i, count - i); };
      });
      const float* value = a.present_value + (stream * a.keys() + k) * a.d_v;
      rows.add(count, whole_panels(a, value, count, at, rows.memory + at.values));
    }
    for (int64_t r = 0; r < rows.count; ++r) store_output(query(r), rows.sums(r), rows.total(r));
  }
};

static void run_blocks(const CachedAttention& a, const Part& part, float* memory) {
  const int64_t tokens = block_tokens(a);
  const Room at = room(a, tokens * a.group(), kKeys);
  for (int64_t stream = part.first_stream; stream < part.last_stream; ++stream)
    for (int64_t block = part.first_panel; block < part.last_panel; ++block) {
      const int64_t own = std::min(tokens, a.queries - block * tokens);
      QueryBlock{a, at, stream, block * tokens, own, QueryRows{at, own * a.group(), memory}}.run();
    }
}
