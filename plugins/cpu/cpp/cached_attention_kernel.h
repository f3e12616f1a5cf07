// Softmax attention of the query heads that share one head of keys, a stream: for row r of the queries and key s
//
//   a_rs = scale q_r . k_s + mask_rs,  m_r = max_s a_rs,  o_r = (sum over s of exp(a_rs - m_r) v_s) / (sum over s of exp(a_rs - m_r))
//
// Few rows take their scores with a panel of keys first, while keys and values are added to what is there: each is met once.
// Panels are of one size, whatever the threads, and are summed in their order. Of many rows a block at a time passes over
// blocks of keys. Included per instruction set.

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

// Rows first ... first + count - 1 of what a cache holds after the call, of a stream. Those of the past are there already
// where both caches are the same memory.
static void append(const float* past, int64_t kept, const float* added, int64_t stride, int64_t width, int64_t first,
                   int64_t count, float* present) {
  const int64_t old = std::min(std::max<int64_t>(kept - first, 0), count);
  if (old > 0 && past != present)
    std::memcpy(present + first * width, past + first * width, old * width * sizeof(float));
  for (int64_t i = first + old; i < first + count; ++i)
    std::memcpy(present + i * width, added + (i - kept) * stride, width * sizeof(float));
}

static void append_keys(const CachedAttention& a, int64_t stream, int64_t first, int64_t count) {
  const float* added = a.key + (stream / a.heads * a.queries * a.heads + stream % a.heads) * a.d_k;
  append(a.past_key + stream * a.past_capacity * a.d_k, a.past, added, a.heads * a.d_k, a.d_k, first, count,
         a.present_key + stream * a.capacity * a.d_k);
}

static void append_values(const CachedAttention& a, int64_t stream, int64_t first, int64_t count) {
  const float* added = a.value + (stream / a.heads * a.queries * a.heads + stream % a.heads) * a.d_v;
  append(a.past_value + stream * a.past_capacity * a.d_v, a.past, added, a.heads * a.d_v, a.d_v, first, count,
         a.present_value + stream * a.capacity * a.d_v);
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

constexpr int kTileKeys = kLanes >= 16 ? 4 : 2, kTileVectors = kLanes >= 16 ? 4 : 2;
// Read `count` floats in order, which a processor foresees, into the first cache. Rows of a cache that are read side by side
// are not foreseen, and each line of them would be waited for: 14 GB/s in the place of 9.
INLINE void touch(const float* x, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) static_cast<void>(*static_cast<const volatile float*>(x + i));
}

// Scores of R rows with the keys from `key` on, as many as a vector has lanes; those behind the last are that one again.
template <int R, class Store>
INLINE void score_few(const float* query, const Room& at, const float* key, int64_t d_k, int64_t left, const Store& store_row) {
  Vector products[R][kLanes];
  for (int s = 0; s < kLanes; s += kTileKeys) {
    const float* rows[kTileKeys];
    UNROLL for (int j = 0; j < kTileKeys; ++j) rows[j] = key + std::min<int64_t>(s + j, left - 1) * d_k;
    Tile<R, kTileKeys> tile = nothing<R, kTileKeys>();
    for (int64_t i = 0; i < d_k; i += kLanes) {
      Vector keys[kTileKeys];
      UNROLL for (int j = 0; j < kTileKeys; ++j) keys[j] = load_first(rows[j] + i, d_k - i);
      UNROLL for (int r = 0; r < R; ++r) {
        const Vector q = load(query + r * at.width + i);
        UNROLL for (int j = 0; j < kTileKeys; ++j) tile.at[r][j] += q * keys[j];
      }
    }
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < kTileKeys; ++j) products[r][s + j] = tile.at[r][j];
  }
  UNROLL for (int r = 0; r < R; ++r) store_row(r, sums(products[r]));
}

// sums += weights times values, of R rows and J vectors of columns.
template <int R, int J>
INLINE void add_few(float* sums, const float* weights, const Room& at, int64_t count, const float* values) {
  const Rows<R> rows(weights, at.stride);
  Tile<R, J> tile;
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < J; ++j) tile.at[r][j] = load(sums + r * at.columns + j * kLanes);
  for (int64_t k = 0; k < count; ++k, values += at.columns) {
    Vector row[J];
    UNROLL for (int j = 0; j < J; ++j) row[j] = load(values + j * kLanes);
    UNROLL for (int r = 0; r < R; ++r) {
      const float weight = rows.at(r, k);
      UNROLL for (int j = 0; j < J; ++j) tile.at[r][j] += weight * row[j];
    }
  }
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < J; ++j) store(sums + r * at.columns + j * kLanes, tile.at[r][j]);
}

template <int R>
INLINE void add_few(float* sums, const float* weights, const Room& at, int64_t count, const float* values) {
  int64_t p = 0;
  for (; p + kTileVectors * kLanes <= at.columns; p += kTileVectors * kLanes)
    add_few<R, kTileVectors>(sums + p, weights, at, count, values + p);
  for (; p < at.columns; p += kPanel) add_few<R, kColumns>(sums + p, weights, at, count, values + p);
}

// Call work(r, the number of rows that are taken together) for rows in fours, twos and ones.
template <class Work>
INLINE void by_few(int64_t rows, const Work& work) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) work(r, std::integral_constant<int, 4>());
  for (; r + 2 <= rows; r += 2) work(r, std::integral_constant<int, 2>());
  for (; r < rows; ++r) work(r, std::integral_constant<int, 1>());
}

constexpr int64_t kFewKeys = 512;  // of a panel

static int64_t few_panels(const CachedAttention& a) { return (a.keys() + kFewKeys - 1) / kFewKeys; }
static int64_t few_floats(const CachedAttention& a) { return room(a, a.rows(), kFewKeys).floats; }

// What a panel of a stream's keys makes of the rows: sums of values, maxima and denominators.
struct PanelSums {
  float *sums, *maximum, *total;

  static int64_t floats(const CachedAttention& a) { return a.rows() * (padded_to(a.d_v, kPanel) + 2); }
  PanelSums(const CachedAttention& a, float* partial, int64_t stream, int64_t panel)
      : sums(partial + (stream * few_panels(a) + panel) * floats(a)),
        maximum(sums + a.rows() * padded_to(a.d_v, kPanel)),
        total(maximum + a.rows()) {}
};

static int64_t sums_floats(const CachedAttention& a) { return a.streams() * few_panels(a) * PanelSums::floats(a); }

// The outputs of a stream, of what its panels made.
static void join_few(const CachedAttention& a, int64_t stream, float* partial) {
  const int64_t columns = padded_to(a.d_v, kPanel), panels = few_panels(a);
  const PanelSums first(a, partial, stream, 0);
  for (int64_t r = 0; r < a.rows(); ++r) {
    float largest = -INFINITY;
    for (int64_t p = 0; p < panels; ++p) largest = std::max(largest, PanelSums(a, partial, stream, p).maximum[r]);
    float* sums = first.sums + r * columns;
    float total = 0;
    for (int64_t p = 0; p < panels; ++p) {
      const PanelSums own(a, partial, stream, p);
      const float factor = own.maximum[r] == -INFINITY ? 0 : exponential(all(own.maximum[r] - largest))[0];
      total += own.total[r] * factor;
      for (int64_t i = 0; i < columns; i += kLanes) {
        const Vector more = load(own.sums + r * columns + i) * factor;
        store(sums + i, p == 0 ? more : load(sums + i) + more);
      }
    }
    store_output(Query(a, stream, r % a.group(), r / a.group()), sums, total);
  }
}

static void join_few(const CachedAttention& a, const Part& part, float* partial) {
  for (int64_t stream = part.first_stream; stream < part.last_stream; ++stream) join_few(a, stream, partial);
}

// What the keys first ... first + count - 1 of a stream make of its rows, whose queries are in memory.
static void run_panel(const CachedAttention& a, int64_t stream, int64_t first, int64_t count, const Mask* masks, const Room& at,
                      float* memory, const PanelSums& made) {
  const int64_t rows = a.rows();
  float* scores = memory + at.scores;
  const float* key = a.present_key + stream * a.capacity * a.d_k;
  for (int64_t k = 0; k < count; k += kLanes) {
    const int64_t left = count - k, own = std::min<int64_t>(left, kLanes);
    append_keys(a, stream, first + k, own);
    touch(key + (first + k) * a.d_k, own * a.d_k);
    by_few(rows, [&](int64_t row, auto few) {
      score_few<few>(memory + at.query + row * at.width, at, key + (first + k) * a.d_k, a.d_k, left, [&](int r, Vector products) {
        store(scores + (row + r) * at.stride + k, products + masks[row + r].at(first + k, left));
      });
    });
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* own = scores + r * at.stride;
    Vector top = all(-INFINITY);
    for (int64_t k = 0; k < count; k += kLanes) top = larger(load(own + k), top);
    made.maximum[r] = largest(top);
    made.total[r] = exponentiate(own, count, made.maximum[r]);
  }
  std::memset(made.sums, 0, rows * at.columns * sizeof(float));
  const float* value = a.present_value + stream * a.capacity * a.d_v;
  for (int64_t k = 0; k < count; k += kLanes) {
    const int64_t own = std::min<int64_t>(count - k, kLanes);
    append_values(a, stream, first + k, own);
    touch(value + (first + k) * a.d_v, own * a.d_v);
    const float* values = whole_panels(a, value + (first + k) * a.d_v, own, at, memory + at.values);
    by_few(rows, [&](int64_t row, auto few) {
      add_few<few>(made.sums + row * at.columns, scores + row * at.stride + k, at, own, values);
    });
  }
}

static void run_few(const CachedAttention& a, const Part& part, float* memory, float* partial) {
  const Room at = room(a, a.rows(), kFewKeys);
  for (int64_t stream = part.first_stream; stream < part.last_stream; ++stream) {
    Mask masks[kFew];
    for (int64_t r = 0; r < a.rows(); ++r) {
      const Query query(a, stream, r % a.group(), r / a.group());
      masks[r] = query.mask(), load_query(query, memory + at.query + r * at.width);
    }
    for (int64_t panel = part.first_panel; panel < part.last_panel; ++panel) {
      const int64_t first = panel * kFewKeys, count = std::min(a.keys() - first, kFewKeys);
      run_panel(a, stream, first, count, masks, at, memory, PanelSums(a, partial, stream, panel));
    }
    if (few_panels(a) == 1) join_few(a, stream, partial);
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
      const float* key = a.present_key + (stream * a.capacity + k) * a.d_k;
      rows.load_keys(a.d_k, [&](int64_t i) { return i < count ? key + i * a.d_k : nullptr; });
      rows.score(a.d_k);
      rows.weigh(count, [&](int64_t r) {
        return [k, count, mask = query(r).mask()](int64_t i) { return mask.at(k + i, count - i); };
      });
      const float* value = a.present_value + (stream * a.capacity + k) * a.d_v;
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
