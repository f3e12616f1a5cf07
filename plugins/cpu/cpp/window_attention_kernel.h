// Softmax attention over sinks and the last w rows of [past, new], of the query heads that share one head of keys, a stream:
// for row r of the queries, of token t, and row p of [past, new] with t < p <= t + w
//
//   a_rp = scale q_r . k_p,  m_r = max_p a_rp,  l_r = sum over p of exp(a_rp - m_r),  o_r = (sum over p of exp(a_rp - m_r) v_p) / l_r
//
// Few rows take their scores with all keys first. Of many rows a block at a time passes over blocks of the keys that one of
// them sees. Included per instruction set.

#include "softmax_rows.h"

// Some neighbouring keys: sinks from `first` on, or rows of [past, new].
struct Keys {
  int64_t first, count;
  bool sinks;
};

struct Stream {
  const WindowAttention& a;
  const int64_t batch, head;

  Stream(const WindowAttention& a, int64_t stream) : a(a), batch(stream / a.heads), head(stream % a.heads) {}

  const float* key(const Keys& keys, int64_t i) const {
    if (keys.sinks) return a.sink_keys[batch * a.sinks + keys.first + i] + head * a.d_k;
    return row(a.past_key, a.key, keys.first + i, a.d_k);
  }
  const float* value(const Keys& keys, int64_t i) const {
    if (keys.sinks) return a.sink_values[batch * a.sinks + keys.first + i] + head * a.d_v;
    return row(a.past_value, a.value, keys.first + i, a.d_v);
  }
  // Without a past its rows are not seen: any row has their place.
  const float* row(const float* past, const float* added, int64_t p, int64_t width) const {
    if (p < a.window && past) return past + ((batch * a.window + p) * a.heads + head) * width;
    return added + ((batch * a.length + std::max<int64_t>(p - a.window, 0)) * a.heads + head) * width;
  }
  // What is added to the scores of a token's query with keys from i on: 0, or -inf where it does not see them.
  INLINE_MEMBER Vector mask(const Keys& keys, int64_t i, int64_t t) const {
    const int64_t left = keys.count - i;
    if (keys.sinks) {
      const Vector since = load_first(a.since + batch * a.sinks + keys.first + i, left, INFINITY);
      return since > all(static_cast<float>(t)) ? all(-INFINITY) : Vector{};
    }
    const int64_t p = keys.first + i;
    const Vector seen = load_first(a.seen + batch * (a.window + a.length) + p, left, -INFINITY);
    const Integers before = lane() + static_cast<int32_t>(p - t - 1), behind = lane() + static_cast<int32_t>(p - t - a.window);
    return (before < Integers{}) | (behind > Integers{}) ? all(-INFINITY) : seen;
  }
  int64_t place(int64_t t, int64_t g) const { return (batch * a.length + t) * a.query_heads + head * a.group() + g; }
};

static Room room(const WindowAttention& a, int64_t rows, int64_t keys) { return Room(a.d_k, a.d_v, rows, keys); }

static void load_query(const Stream& s, int64_t place, float* to) {
  const float* from = s.a.query + place * s.a.d_k;
  for (int64_t i = 0; i < s.a.d_k; i += kLanes) store(to + i, load_first(from + i, s.a.d_k - i) * s.a.scale);
}

static void store_output(const Stream& s, int64_t place, const float* sums, float maximum, float total) {
  const bool none = maximum == -INFINITY;
  float* to = s.a.output + place * s.a.d_v;
  for (int64_t i = 0; i < s.a.d_v; i += kLanes)
    store_first(to + i, none ? Vector{} : load(sums + i) / total, s.a.d_v - i);
  s.a.maximum[place] = none ? kNoKey : maximum, s.a.total[place] = none ? 0 : total;
}

static int64_t padded(int64_t count) { return padded_to(count, kLanes); }
static int64_t all_keys(const WindowAttention& a) { return padded(a.sinks) + padded(a.window + a.length - 1); }
static int64_t few_floats(const WindowAttention& a) { return room(a, a.rows(), all_keys(a)).floats; }

// Rows of all tokens, which are few: their scores with keys, at a place in each row of scores.
static void score_few(const Stream& s, const Room& at, const Keys& keys, float* memory, int64_t start) {
  const int64_t rows = s.a.rows(), d = s.a.d_k;
  for (int64_t k = 0; k < keys.count; k += kLanes) {
    const float* of[kLanes];
    for (int i = 0; i < kLanes; ++i) of[i] = s.key(keys, std::min(k + i, keys.count - 1));
    for (int64_t r = 0; r < rows; ++r) {
      const float* query = memory + at.query + r * at.width;
      Vector products[kLanes] = {};
      for (int64_t c = 0; c < d; c += kLanes) {
        const Vector q = load(query + c);
        UNROLL for (int i = 0; i < kLanes; ++i) products[i] += q * load_first(of[i] + c, d - c);
      }
      store(memory + at.scores + r * at.stride + start + k, sums(products) + s.mask(keys, k, r / s.a.group()));
    }
  }
}

static void add_few(const Stream& s, const Room& at, const Keys& keys, float* memory, int64_t start) {
  const int64_t rows = s.a.rows(), d = s.a.d_v;
  for (int64_t k = 0; k < keys.count; ++k) {
    const float* value = s.value(keys, k);
    for (int64_t r = 0; r < rows; ++r) {
      const float weight = memory[at.scores + r * at.stride + start + k];
      float* sums = memory + at.sums + r * at.columns;
      for (int64_t c = 0; c < d; c += kLanes) store(sums + c, load(sums + c) + weight * load_first(value + c, d - c));
    }
  }
}

static void run_few(const WindowAttention& a, const Part& part, float* memory) {
  const Room at = room(a, a.rows(), all_keys(a));
  const Keys sinks{0, a.sinks, true}, window{1, a.window + a.length - 1, false};
  const int64_t behind = padded(a.sinks);
  for (int64_t stream = part.first_stream; stream < part.last_stream; ++stream) {
    const Stream s(a, stream);
    for (int64_t r = 0; r < a.rows(); ++r)
      load_query(s, s.place(r / a.group(), r % a.group()), memory + at.query + r * at.width);
    score_few(s, at, sinks, memory, 0);
    score_few(s, at, window, memory, behind);
    std::memset(memory + at.sums, 0, a.rows() * at.columns * sizeof(float));
    for (int64_t r = 0; r < a.rows(); ++r) {
      float* own = memory + at.scores + r * at.stride;
      Vector top = all(-INFINITY);
      for (int64_t k = 0; k < at.stride; k += kLanes) top = larger(load(own + k), top);
      memory[at.maximum + r] = largest(top);
      memory[at.total + r] = exponentiate(own, at.stride, memory[at.maximum + r]);
    }
    add_few(s, at, sinks, memory, 0);
    add_few(s, at, window, memory, behind);
    for (int64_t r = 0; r < a.rows(); ++r)
      store_output(s, s.place(r / a.group(), r % a.group()), memory + at.sums + r * at.columns, memory[at.maximum + r],
                   memory[at.total + r]);
  }
}

static int64_t block_tokens(const WindowAttention& a) { return std::max<int64_t>(1, kBlockRows / a.group()); }
static int64_t blocks(const WindowAttention& a) { return (a.length + block_tokens(a) - 1) / block_tokens(a); }
static int64_t block_floats(const WindowAttention& a) { return room(a, block_tokens(a) * a.group(), kKeys).floats; }

// Some tokens of a stream; row g * tokens + t.
struct QueryBlock {
  const WindowAttention& a;
  const Room& at;
  const Stream s;
  const int64_t first, tokens;
  const QueryRows rows;

  int64_t token(int64_t r) const { return first + r % tokens; }
  int64_t place(int64_t r) const { return s.place(token(r), r / tokens); }

  const float* load_values(const Keys& keys) const {
    float* values = rows.memory + at.values;
    for (int64_t k = 0; k < keys.count; ++k) {
      float* to = values + k * at.columns;
      std::memcpy(to, s.value(keys, k), a.d_v * sizeof(float));
      std::memset(to + a.d_v, 0, (at.columns - a.d_v) * sizeof(float));
    }
    return values;
  }

  void see(int64_t from, int64_t to, bool sinks) const {
    for (int64_t k = from; k < to; k += kKeys) {
      const Keys keys{k, std::min(to - k, kKeys), sinks};
      rows.load_keys(a.d_k, [&](int64_t i) { return i < keys.count ? s.key(keys, i) : nullptr; });
      rows.score(a.d_k);
      rows.weigh(keys.count, [&](int64_t r) {
        return [&, t = token(r)](int64_t i) { return s.mask(keys, i, t); };
      });
      rows.add(keys.count, load_values(keys));
    }
  }

  void run() const {
    rows.clear();
    for (int64_t r = 0; r < rows.count; ++r) load_query(s, place(r), rows.query(r));
    see(0, a.sinks, true);
    see(first + 1, first + tokens + a.window, false);
    for (int64_t r = 0; r < rows.count; ++r) store_output(s, place(r), rows.sums(r), rows.maximum(r), rows.total(r));
  }
};

static void run_blocks(const WindowAttention& a, const Part& part, float* memory) {
  const int64_t tokens = block_tokens(a);
  const Room at = room(a, tokens * a.group(), kKeys);
  for (int64_t stream = part.first_stream; stream < part.last_stream; ++stream)
    for (int64_t block = part.first_panel; block < part.last_panel; ++block) {
      const int64_t own = std::min(tokens, a.length - block * tokens);
      QueryBlock{a, at, Stream(a, stream), block * tokens, own, QueryRows{at, own * a.group(), memory}}.run();
    }
}
