// Softmax attention of some rows over blocks of keys, which two kernels share. Where the maximum of a row's scores grows,
// its sums so far are multiplied. Included per instruction set.

#include "tile.h"

constexpr int kTile = kRows < 4 ? 4 : 8;  // rows of a product's tile
constexpr int64_t kKeys = 4 * kPanel;     // keys of a block
constexpr int64_t kBlockRows = 64;        // rows of a block, as far as these are tokens of all heads

INLINE int64_t padded_to(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// A thread's memory: of some rows the queries, their scores with `keys` keys, sums of values, maxima and denominators; and a
// block of keys by channels, and one of values.
struct Room : MemoryLayout {
  int64_t width, columns, stride;
  int64_t query, scores, sums, maximum, total, keys, values;

  Room(int64_t d_k, int64_t d_v, int64_t rows, int64_t all_keys) {
    rows = padded_to(rows, kTile);
    width = padded_to(d_k, kLanes), columns = padded_to(d_v, kPanel), stride = padded_to(all_keys, kLanes);
    query = take(rows * width), scores = take(rows * stride), sums = take(rows * columns);
    maximum = take(rows), total = take(rows), keys = take(width * kKeys), values = take(kKeys * columns);
  }
};

// Scores less their maximum as exponentials; returns the sum of these. -inf, of keys that are not seen, is none.
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

// Rows of a block and what they have summed.
struct QueryRows {
  const Room& at;
  const int64_t count;
  float* memory;

  float* query(int64_t r) const { return memory + at.query + r * at.width; }
  float* sums(int64_t r) const { return memory + at.sums + r * at.columns; }
  float* scores(int64_t r) const { return memory + at.scores + r * kKeys; }
  float& maximum(int64_t r) const { return memory[at.maximum + r]; }
  float& total(int64_t r) const { return memory[at.total + r]; }

  void clear() const {
    const int64_t all_rows = padded_to(count, kTile);
    std::memset(query(0), 0, all_rows * at.width * sizeof(float));
    std::memset(sums(0), 0, all_rows * at.columns * sizeof(float));
    for (int64_t r = 0; r < count; ++r) maximum(r) = -INFINITY, total(r) = 0;
  }

  // The block's keys by channels: key(k) is where one of them is, none behind the last.
  template <class Key>
  INLINE_MEMBER void load_keys(int64_t d_k, const Key& key) const {
    for (int64_t k = 0; k < kKeys; k += kLanes) {
      const float* of[kLanes];
      for (int i = 0; i < kLanes; ++i) of[i] = key(k + i);
      for (int64_t c = 0; c < d_k; c += kLanes) {
        Vector block[kLanes];
        UNROLL for (int i = 0; i < kLanes; ++i) block[i] = of[i] ? load_first(of[i] + c, d_k - c) : Vector{};
        transpose(block);
        float* to = memory + at.keys + (k / kPanel * at.width + c) * kPanel + k % kPanel;
        UNROLL for (int i = 0; i < kLanes; ++i) store(to + i * kPanel, block[i]);
      }
    }
  }

  void score(int64_t d_k) const {
    for (int64_t r = 0; r < count; r += kTile)
      for (int64_t k = 0; k < kKeys; k += kPanel) {
        Tile<kTile> tile = nothing<kTile>();
        multiply(tile, query(r), at.width, d_k, memory + at.keys + k * at.width, kPanel);
        UNROLL for (int i = 0; i < kTile; ++i) UNROLL for (int j = 0; j < kColumns; ++j)
            store(scores(r + i) + k + j * kLanes, tile.at[i][j]);
      }
  }

  // Masks, maxima and exponentials: masks(r)(k) is what is added to the scores of a row from the block's key k on.
  template <class Masks>
  INLINE_MEMBER void weigh(int64_t keys, const Masks& masks) const {
    for (int64_t r = 0; r < count; ++r) {
      const auto mask = masks(r);
      Vector top = all(-INFINITY);
      for (int64_t k = 0; k < kKeys; k += kLanes) {
        const Vector x = k < keys ? load(scores(r) + k) + mask(k) : all(-INFINITY);
        store(scores(r) + k, x);
        top = larger(x, top);
      }
      const float before = maximum(r), after = std::max(before, largest(top));
      if (after > before) {
        const float factor = before == -INFINITY ? 0 : exponential(all(before - after))[0];
        for (int64_t i = 0; i < at.columns; i += kLanes) store(sums(r) + i, load(sums(r) + i) * factor);
        total(r) *= factor, maximum(r) = after;
      }
      total(r) += exponentiate(scores(r), kKeys, after);
    }
  }

  void add(int64_t keys, const float* values) const {
    for (int64_t r = 0; r < count; r += kTile) add_values<kTile>(sums(r), scores(r), kKeys, keys, values, at);
  }
};
