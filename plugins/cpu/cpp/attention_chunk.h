// A chunk of tokens of LinearAttention without decays by channel: its products P, what its queries read of the state, and
// what its keys add to it. See chunked_attention_kernel.h for the formulas. Included per instruction set.

#include "attention_stream.h"
#include "chunk_tokens.h"
#include "map_kernels.h"

constexpr int kTile = kRows < 4 ? 4 : 8;  // rows of a product's tile
constexpr int kPairRows = 8;  // the same of P, whose tiles are one vector wide
constexpr int64_t kSlab = 64;  // channels of queries that lie side by side: tiles address their rows by constants

// A chunk by places in floats. `by_tokens` has its keys by tokens, later its values.
struct Places : MemoryLayout {
  int64_t width, slabs, panels, heads;
  int64_t query, key, pairs, below, from_start, key_sum, by_tokens, reciprocal;

  explicit Places(const Attention& a) {
    width = AttentionStream::width(a);
    slabs = (width + kSlab - 1) / kSlab;
    panels = AttentionStream::panels(a);
    heads = a.group();
    query = take(heads * kChunk * slabs * kSlab), key = take(width * kChunk);
    pairs = take(heads * kChunk * kChunk), below = take(heads * kChunk);
    from_start = take(kChunk), key_sum = take(width);
    by_tokens = take(kChunk * (panels * kPanel > width ? panels * kPanel : width));
    reciprocal = take(heads * kChunk);
  }
};

// A chunk of tokens.
struct Chunk {
  const Attention& a;
  const Places& at;
  const Tokens tokens;
  float* memory;

  bool sums_keys() const { return a.normalize || a.present_normalizer; }
  int64_t tiles() const { return at.panels * ((tokens.count + kTile - 1) / kTile * at.heads + (a.d_k + kTile - 1) / kTile); }

  float* mapped_key(int64_t t) const { return memory + at.by_tokens + t * at.width; }

  // Mapped keys by tokens, zeros where one is missing.
  void map_keys() const {
    for (int64_t t = 0; t < kChunk; ++t)
      if (tokens.masked(t))
        std::memset(mapped_key(t), 0, at.width * sizeof(float));
      else
        map_head(a.map, tokens.key + t * a.key_heads * a.d_k, mapped_key(t), a.d_k, 1.0f);
  }

  // Mapped keys by channels, and their sums with these weights.
  void transpose_keys(const float* weights) const {
    for (int64_t i = 0; i < at.width; i += kLanes) {
      Vector total = {};
      UNROLL for (int t = 0; t < kChunk; t += kLanes) {
        Vector block[kLanes];
        UNROLL for (int r = 0; r < kLanes; ++r) {
          block[r] = load(mapped_key(t + r) + i);
          total += block[r] * weights[t + r];
        }
        transpose(block);
        UNROLL for (int r = 0; r < kLanes; ++r) store(memory + at.key + (i + r) * kChunk + t, block[r]);
      }
      store(memory + at.key_sum + i, total);
    }
  }

  // Channel i of a query and those of its slab behind it; queries of a slab lie kSlab floats apart.
  float* query(int64_t row, int64_t i) const {
    const int64_t slab = row / kChunk * at.slabs + i / kSlab;
    return memory + at.query + (slab * kChunk + row % kChunk) * kSlab + i % kSlab;
  }

  // sums_r += the sum over channels i of q_ri y_i, of R queries from `row` on.
  template <int R, int J>
  INLINE_MEMBER void multiply_queries(Tile<R, J>& sums, int64_t row, const float* y, int64_t y_stride) const {
    for (int64_t i = 0; i < a.d_k; i += kSlab)
      multiply(sums, query(row, i), kSlab, a.d_k - i < kSlab ? a.d_k - i : kSlab, y + i * y_stride, y_stride);
  }

  // Mapped queries by tokens; zeros behind them up to a whole chunk.
  void load_queries() const {
    for (int64_t j = 0; j < at.heads; ++j) {
      const float* from = tokens.query + (a.query_heads > a.heads ? j * a.d_k : 0);
      for (int64_t i = 0; i < a.d_k; i += kSlab) {
        float* to = query(j * kChunk, i);
        const int64_t channels = a.d_k - i < kSlab ? a.d_k - i : kSlab;
        for (int64_t t = 0; t < tokens.count; ++t)
          map_head(a.map, from + t * a.query_heads * a.d_k + i, to + t * kSlab, channels, a.scale);
        std::memset(to + tokens.count * kSlab, 0, (kChunk - tokens.count) * kSlab * sizeof(float));
      }
    }
  }

  // A_r / A_s by rows r, zeros for s > r, and A_r. Each row is the one before times a decay.
  void accumulate_decays(float* between) const {
    Vector row[kChunk / kLanes] = {};
    float product = 1;
    for (int r = 0; r < kChunk; ++r) {
      const bool decays = a.has_decay && !tokens.masked(r);
      const float decay = decays ? exponential(all(tokens.decay[r * a.heads]))[0] : 1.0f;
      memory[at.from_start + r] = product *= decay;
      UNROLL for (int j = 0; j < kChunk / kLanes; ++j) {
        row[j] = lane() == r - j * kLanes ? all(1.0f) : row[j] * decay;
        store(between + r * kChunk + j * kLanes, row[j]);
      }
    }
  }

  // P of all query heads, and its sums over s.
  void pair(const float* between) const {
    for (int64_t row = 0; row < at.heads * kChunk; row += kPairRows) {
      const int64_t t = row % kChunk;
      float* pairs = memory + at.pairs + row * kChunk;
      for (int64_t s = 0; s < t + kPairRows; s += kLanes) {
        Tile<kPairRows, 1> products = nothing<kPairRows, 1>();
        multiply_queries(products, row, memory + at.key + s, kChunk);
        UNROLL for (int r = 0; r < kPairRows; ++r) {
          const Vector weight = load(between + (t + r) * kChunk + s);
          store(pairs + r * kChunk + s, weight > Vector{} ? products.at[r][0] * weight : Vector{});
        }
      }
    }
    for (int64_t row = 0; a.normalize && row < at.heads * kChunk; row += kLanes) {
      Vector below[kLanes] = {};
      for (int64_t s = 0; s < row % kChunk + kLanes; s += kLanes)
        UNROLL for (int r = 0; r < kLanes; ++r) below[r] += load(memory + at.pairs + (row + r) * kChunk + s);
      store(memory + at.below + row, sums(below));
    }
  }

  // Keys times A_C / A_s.
  void weigh_keys(const float* weights) const {
    for (float* row = memory + at.key; a.has_decay && row < memory + at.key + a.d_k * kChunk; row += kChunk)
      UNROLL for (int t = 0; t < kChunk; t += kLanes) store(row + t, load(row + t) * load(weights + t));
  }

  void prepare() const {
    float between[kChunk * kChunk];
    const float* to_end = between + (kChunk - 1) * kChunk;
    accumulate_decays(between);
    map_keys();
    transpose_keys(to_end);
    load_queries();
    pair(between);
    weigh_keys(to_end);
  }

  // Of each query 1 / (A_r q_r . z + sum_s P_rs + eps).
  void divide(const float* z, int64_t row, float* reciprocal) const {
    for (int64_t t = 0; t < kChunk; t += kLanes) {
      Vector products[kLanes] = {};
      for (int64_t i = 0; i < at.width; i += kLanes) {
        const float* queries = query(row + t, i);
        UNROLL for (int r = 0; r < kLanes; ++r) products[r] += load(z + i) * load(queries + r * kSlab);
      }
      const Vector before = sums(products) * load(memory + at.from_start + t);
      store(reciprocal + t, 1.0f / (before + load(memory + at.below + row + t) + a.eps));
    }
  }

  void load_values(const Part& part, float* values) const {
    for (int64_t p = part.first_panel; p < part.last_panel; ++p) {
      const int64_t columns = a.d_v - p * kPanel;
      for (int64_t t = 0; t < tokens.count; ++t) {
        const Tile<1> row = load_tile<1>(tokens.value + t * a.heads * a.d_v + p * kPanel, 0, columns);
        UNROLL for (int j = 0; j < kColumns; ++j) store(values + (p * kChunk + t) * kPanel + j * kLanes, row.at[0][j]);
      }
    }
  }

  // The outputs of a panel of `columns` channels for the query head whose rows begin at `row`.
  void read_state(int64_t row, const float* S, const float* values, const float* reciprocal, float* output,
                  int64_t columns, Ahead& ahead) const {
    const int64_t count = tokens.count, stride = a.output_heads() * a.d_v;
    const float *pairs = memory + at.pairs + row * kChunk, *from_start = memory + at.from_start;
    const bool has_decay = a.has_decay, normalize = a.normalize;
    for (int64_t t = 0; t < count; t += kTile) {
      ahead.advance();
      Tile<kTile> sums = nothing<kTile>();
      multiply_queries(sums, row + t, S, kPanel);
      if (has_decay) scale_rows(sums, from_start + t);
      multiply(sums, pairs + t * kChunk, kChunk, t + kTile < count ? t + kTile : count, values, kPanel);
      if (normalize) scale_rows(sums, reciprocal + t);
      store_tile(sums, output + t * stride, stride, count - t, columns);
    }
  }

  // R rows of a panel of the state.
  template <int R, bool kDecay>
  INLINE_MEMBER void write_rows(float* S, const float* keys, const float* values, float decay) const {
    Tile<R> rows;
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < kColumns; ++j) {
        rows.at[r][j] = load(S + r * kPanel + j * kLanes);
        if constexpr (kDecay) rows.at[r][j] *= decay;
      }
    multiply(rows, keys, kChunk, tokens.count, values, kPanel);
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < kColumns; ++j)
        store(S + r * kPanel + j * kLanes, rows.at[r][j]);
  }

  template <bool kDecay>
  void write_state(float* S, const float* values, Ahead& ahead) const {
    const float decay = memory[at.from_start + kChunk - 1], *keys = memory + at.key;
    int64_t i = 0;
    for (; i + kTile <= a.d_k; i += kTile) {
      ahead.advance();
      write_rows<kTile, kDecay>(S + i * kPanel, keys + i * kChunk, values, decay);
    }
    for (; i < a.d_k; ++i) write_rows<1, kDecay>(S + i * kPanel, keys + i * kChunk, values, decay);
  }

  void add_keys(float* z) const {
    const float decay = memory[at.from_start + kChunk - 1];
    for (int64_t i = 0; i < at.width; i += kLanes) store(z + i, load(z + i) * decay + load(memory + at.key_sum + i));
  }

  // The outputs and the next state of a part's panels.
  void apply(const AttentionStream& stream, Ahead ahead) const {
    const Part& part = stream.part;
    const StateInPanels state = stream.state();
    float* z = stream.z;
    float *values = memory + at.by_tokens, *reciprocal = memory + at.reciprocal;
    load_values(part, values);
    for (int64_t row = 0; a.normalize && row < at.heads * kChunk; row += kChunk) divide(z, row, reciprocal + row);
    for (int64_t p = part.first_panel; p < part.last_panel; ++p) {
      float* S = state.panel(p).to;
      for (int64_t j = 0; j < at.heads; ++j)
        read_state(j * kChunk, S, values + p * kChunk * kPanel, reciprocal + j * kChunk,
                   tokens.output + j * a.d_v + p * kPanel, a.d_v - p * kPanel, ahead);
      a.has_decay ? write_state<true>(S, values + p * kChunk * kPanel, ahead)
                  : write_state<false>(S, values + p * kChunk * kPanel, ahead);
    }
    if (sums_keys()) add_keys(z);
  }
};
