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
// Threads that share a stream each compute P: it was no faster to compute it once, by turns, for all of them.
// Included per instruction set.

#include "attention_stream.h"
#include "map_kernels.h"

constexpr int kTile = kRows < 4 ? 4 : 8;  // rows of a product's tile
constexpr int kPairColumns = kChunk < kPanel ? kChunk / kLanes : kColumns;

// A chunk by places in floats of a thread's memory; its streams lie behind.
struct Places {
  int64_t width, panels, heads;
  int64_t query, key, pairs, below, from_start, key_sum, value, reciprocal, chunk;

  explicit Places(const Attention& a) {
    width = AttentionStream::width(a);
    panels = AttentionStream::panels(a);
    heads = a.group();
    chunk = 0;
    query = take(heads * kChunk * width), key = take(width * kChunk);
    pairs = take(heads * kChunk * kChunk), below = take(heads * kChunk);
    from_start = take(kChunk), key_sum = take(width);
    value = take(panels * kChunk * kPanel), reciprocal = take(heads * kChunk);
  }

 private:
  int64_t take(int64_t floats) {
    const int64_t start = chunk;
    chunk += (floats + 15) / 16 * 16;
    return start;
  }
};

// Tokens of a stream: the first one's rows in the inputs and the output.
struct Tokens {
  const float *query, *key, *value;
  float* output;
  const bool* mask;
  const float* decay;
  int64_t count;

  Tokens(const Attention& a, const Turn& turn)
      : count(a.keys <= turn.start ? 0 : a.keys - turn.start < kChunk ? a.keys - turn.start : kChunk) {
    const int64_t h = turn.stream % a.heads, token = turn.stream / a.heads * a.keys + turn.start;
    query = a.query + (token * a.query_heads + h * a.query_heads / a.heads) * a.d_k;
    key = a.key + (token * a.key_heads + h / (a.heads / a.key_heads)) * a.d_k;
    value = a.value + (token * a.heads + h) * a.d_v;
    output = a.output + (token * a.output_heads() + h * a.group()) * a.d_v;
    mask = a.key_mask ? a.key_mask + token : nullptr;
    decay = a.has_decay ? a.decay + token * a.heads + h : nullptr;
  }
  bool masked(int64_t t) const { return t >= count || (mask && !mask[t]); }
};

// Asks for what tokens read and write while others are computed: rows of a head lie too far apart for the
// processor to foresee.
struct Ahead {
  const Attention& a;
  const Tokens next;
  int64_t rows, row;  // rows that are asked for in a turn; tokens that are done

  Ahead(const Attention& a, const Tokens& next, int64_t turns)
      : a(a), next(next), rows((next.count + turns - 1) / turns), row(0) {}

  static INLINE_MEMBER void ask(const float* x, int64_t floats) {
    for (int64_t i = 0; i < floats; i += 16) __builtin_prefetch(x + i);
  }

  void advance() {
    for (int64_t end = row + rows < next.count ? row + rows : next.count; row < end; ++row) {
      ask(next.query + row * a.query_heads * a.d_k, (a.query_heads > a.heads ? a.group() : 1) * a.d_k);
      ask(next.key + row * a.key_heads * a.d_k, a.d_k);
      ask(next.value + row * a.heads * a.d_v, a.d_v);
      float* output = next.output + row * a.output_heads() * a.d_v;
      for (int64_t i = 0; i < a.group() * a.d_v; i += 16) __builtin_prefetch(output + i, 1);
    }
  }
};

// A chunk of tokens, in a thread's memory.
struct Chunk {
  const Attention& a;
  const Places& at;
  const Tokens tokens;
  float* memory;

  bool sums_keys() const { return a.normalize || a.present_normalizer; }
  int64_t tiles() const { return at.panels * ((tokens.count + kTile - 1) / kTile * at.heads + a.d_k / kTile); }

  // Mapped keys by channels, zeros where one is masked or there is none.
  template <Map kMap>
  void load_keys() const {
    for (int64_t t = 0; t < kChunk; t += kLanes) {
      const float* rows[kLanes];
      UNROLL for (int r = 0; r < kLanes; ++r)
        rows[r] = tokens.masked(t + r) ? nullptr : tokens.key + (t + r) * a.key_heads * a.d_k;
      for (int64_t i = 0; i < a.d_k; i += kLanes) {
        Vector block[kLanes];
        UNROLL for (int r = 0; r < kLanes; ++r)
          block[r] = rows[r] ? mapped<kMap>(load_first(rows[r] + i, a.d_k - i)) : Vector{};
        transpose(block);
        UNROLL for (int r = 0; r < kLanes; ++r) store(memory + at.key + (i + r) * kChunk + t, block[r]);
      }
    }
  }

  void load_keys() const {
    switch (a.map) {
      case Map::kElu1: return load_keys<Map::kElu1>();
      case Map::kExp: return load_keys<Map::kExp>();
      case Map::kRelu: return load_keys<Map::kRelu>();
      case Map::kSquaredRelu: return load_keys<Map::kSquaredRelu>();
      case Map::kSoftplus: return load_keys<Map::kSoftplus>();
      case Map::kIdentity: return load_keys<Map::kIdentity>();
    }
  }

  // Mapped queries by tokens; zeros behind them up to a whole chunk.
  void load_queries() const {
    for (int64_t j = 0; j < at.heads; ++j) {
      float* to = memory + at.query + j * kChunk * at.width;
      const float* from = tokens.query + (a.query_heads > a.heads ? j * a.d_k : 0);
      for (int64_t t = 0; t < tokens.count; ++t)
        map_head(a.map, from + t * a.query_heads * a.d_k, to + t * at.width, a.d_k, a.scale);
      if (tokens.count < kChunk)
        std::memset(to + tokens.count * at.width, 0, (kChunk - tokens.count) * at.width * sizeof(float));
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
    for (int64_t row = 0; row < at.heads * kChunk; row += kTile) {
      const int64_t t = row % kChunk;
      float* pairs = memory + at.pairs + row * kChunk;
      Vector below[kTile] = {};
      for (int64_t s = 0; s < t + kTile; s += kPairColumns * kLanes) {
        Tile<kTile, kPairColumns> products = nothing<kTile, kPairColumns>();
        multiply(products, memory + at.query + row * at.width, at.width, a.d_k, memory + at.key + s, kChunk);
        UNROLL for (int r = 0; r < kTile; ++r) UNROLL for (int j = 0; j < kPairColumns; ++j) {
            const Vector weight = load(between + (t + r) * kChunk + s + j * kLanes);
            const Vector product = weight > Vector{} ? products.at[r][j] * weight : Vector{};
            below[r] += product;
            store(pairs + r * kChunk + s + j * kLanes, product);
          }
      }
      if (a.normalize) UNROLL for (int r = 0; r < kTile; ++r) memory[at.below + row + r] = sum(below[r]);
    }
  }

  // Keys times A_C / A_s, and their sums.
  void weigh_keys(const float* weights) const {
    if (!a.has_decay && !sums_keys()) return;
    for (int64_t i = 0; i < at.width; i += kLanes) {
      Vector totals[kLanes];
      UNROLL for (int r = 0; r < kLanes; ++r) {
        float* row = memory + at.key + (i + r) * kChunk;
        totals[r] = Vector{};
        UNROLL for (int t = 0; t < kChunk; t += kLanes) {
          const Vector key = load(row + t) * load(weights + t);
          totals[r] += key;
          store(row + t, key);
        }
      }
      store(memory + at.key_sum + i, sums(totals));
    }
  }

  void prepare() const {
    float between[kChunk * kChunk];
    load_keys();
    load_queries();
    accumulate_decays(between);
    pair(between);
    weigh_keys(between + (kChunk - 1) * kChunk);
  }

  // Of each query 1 / (A_r q_r . z + sum_s P_rs + eps).
  void divide(const float* z, int64_t row, float* reciprocal) const {
    for (int64_t t = 0; t < kChunk; t += kLanes) {
      const float* query = memory + at.query + (row + t) * at.width;
      Vector products[kLanes] = {};
      for (int64_t i = 0; i < at.width; i += kLanes)
        UNROLL for (int r = 0; r < kLanes; ++r) products[r] += load(z + i) * load(query + r * at.width + i);
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
    const int64_t width = at.width, d_k = a.d_k, count = tokens.count, stride = a.output_heads() * a.d_v;
    const float *query = memory + at.query + row * width, *pairs = memory + at.pairs + row * kChunk;
    const float* from_start = memory + at.from_start;
    const bool has_decay = a.has_decay, normalize = a.normalize;
    for (int64_t t = 0; t < count; t += kTile) {
      ahead.advance();
      Tile<kTile> sums = nothing<kTile>();
      multiply(sums, query + t * width, width, d_k, S, kPanel);
      if (has_decay) scale_rows(sums, from_start + t);
      multiply(sums, pairs + t * kChunk, kChunk, t + kTile < count ? t + kTile : count, values, kPanel);
      if (normalize) scale_rows(sums, reciprocal + t);
      store_tile(sums, output + t * stride, stride, count - t, columns);
    }
  }

  // R rows of a panel of the state.
  template <int R>
  INLINE_MEMBER void write_rows(float* S, const float* keys, const float* values, float decay) const {
    Tile<R> rows;
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < kColumns; ++j)
        rows.at[r][j] = load(S + r * kPanel + j * kLanes) * decay;
    multiply(rows, keys, kChunk, tokens.count, values, kPanel);
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < kColumns; ++j)
        store(S + r * kPanel + j * kLanes, rows.at[r][j]);
  }

  void write_state(float* S, const float* values, Ahead& ahead) const {
    const float decay = memory[at.from_start + kChunk - 1], *keys = memory + at.key;
    int64_t i = 0;
    for (; i + kTile <= a.d_k; i += kTile) {
      ahead.advance();
      write_rows<kTile>(S + i * kPanel, keys + i * kChunk, values, decay);
    }
    for (; i < a.d_k; ++i) write_rows<1>(S + i * kPanel, keys + i * kChunk, values, decay);
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
    float *values = memory + at.value, *reciprocal = memory + at.reciprocal;
    load_values(part, values);
    for (int64_t row = 0; a.normalize && row < at.heads * kChunk; row += kChunk) divide(z, row, reciprocal + row);
    for (int64_t p = part.first_panel; p < part.last_panel; ++p) {
      float* S = state.panel(p).to;
      for (int64_t j = 0; j < at.heads; ++j)
        read_state(j * kChunk, S, values + p * kChunk * kPanel, reciprocal + j * kChunk,
                   tokens.output + j * a.d_v + p * kPanel, a.d_v - p * kPanel, ahead);
      write_state(S, values + p * kChunk * kPanel, ahead);
    }
    if (sums_keys()) add_keys(z);
  }
};

static int64_t panels(const Attention& a) { return AttentionStream::panels(a); }

static int64_t memory_floats(const Attention& a, const Part& part) {
  return Places(a).chunk + AttentionStreams::floats(a, part);
}

// All tokens of a part of the call.
static void run(const Attention& a, const Part& part, float* memory) {
  const Places at(a);
  const AttentionStreams streams = {a, part, memory + at.chunk, false};
  streams.open();
  for (Turn turn = streams.first(), next; turn.start < a.keys; turn = next) {
    next = streams.after(turn, kChunk);
    const Chunk chunk = {a, at, Tokens(a, turn), memory};
    chunk.prepare();
    chunk.apply(streams[turn.stream], Ahead(a, Tokens(a, next), chunk.tiles()));
  }
  streams.close();
}
