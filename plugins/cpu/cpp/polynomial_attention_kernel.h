// LinearAttention whose map's kernel is a polynomial of q . k, a chunk of kChunk tokens at a time.
//
//   kappa(t) = sum_n b_n (t + c)^n = phi(q) . phi(k),   t = q . k
//   o_r = phi(q_r)^T S + sum_{s <= r} kappa(q_r . k_s) v_s      divided by the same with v = 1 and S = z, plus eps
//   S  <- S + sum_s phi(k_s) v_s^T                              and z likewise with v = 1
//
// Within a chunk no features are needed, and its sums do not cancel where kappa is positive. With pairs,
// phi(x) = [first(x), s x_i^2, s sqrt2 x_i x_j (i < j)], features are not computed either: row i of the pairs
// is a linear attention of x_j, j >= i, whose outputs are multiplied by q_i and whose values by k_i,
//
//   o_r += q_ri (y_ri^T S_i),   S_i += sum_s y_si (k_si v_s)^T,   y_i = s [x_i, sqrt2 x_(i+1), ..., sqrt2 x_d]
//
// and S_i, of d - i rows, stays in the first cache for all tokens of the chunk. Included per instruction set.

#include "attention_stream.h"

constexpr int64_t kChunk = 16 * kRows;
constexpr int64_t kScores = (kChunk + kPanel - 1) / kPanel * kPanel;  // of a query, in whole panels

#include "chunk_tokens.h"

static int64_t panels(const Attention& a) { return (a.d_v + kPanel - 1) / kPanel; }

// Memory of a thread, by places in floats. Rows of tokens have kLanes zeros behind them at least.
struct Places : MemoryLayout {
  int64_t width, first, heads, panels;
  int64_t query, key, seen, stored, seen_first, stored_first, roots;
  int64_t transposed, scores, value, output, denominator, query_factor, key_factor;
  int64_t normalizer, state;

  Places(const Attention& a, const Polynomial& map) {
    width = padded(map.width) + kLanes, first = padded(map.first());
    heads = a.group(), panels = (a.d_v + kPanel - 1) / kPanel;
    query = take(heads * kChunk * width), key = take(kChunk * width);
    seen = take(heads * kChunk * width), stored = take(kChunk * width);
    seen_first = take(heads * kChunk * first), stored_first = take(kChunk * first);
    roots = take(map.pairs ? 0 : first);
    transposed = take(map.width * kScores), scores = take(heads * kChunk * kScores);
    value = take(panels * kChunk * kPanel), output = take(heads * panels * kChunk * kPanel);
    denominator = take(heads * kChunk), query_factor = take(heads * kChunk), key_factor = take(kChunk);
    normalizer = take(first + (map.pairs ? map.width * width : 0));
    state = take(panels * a.d_k * kPanel);
  }

 private:
  static int64_t padded(int64_t count) { return vectors(count) * kLanes; }
};

static int64_t memory_floats(const Attention& a, const Polynomial& map, const Part&) { return Places(a, map).floats; }

INLINE Vector kappa(const Polynomial& map, Vector t) {
  const Vector u = t + map.shift;
  Vector sum = all(map.about[map.terms - 1]);
  for (int n = map.terms - 2; n >= 0; --n) sum = sum * u + map.about[n];
  return sum;
}

// Some tokens of a stream, in memory.
struct Chunk {
  const Attention& a;
  const Polynomial& map;
  const Places& at;
  const Part& part;
  float* memory;
  const Tokens tokens;
  const int64_t count = tokens.count;

  // Features that are computed: all, or those ahead of the pairs.
  void write_first(const float* x, float* y) const {
    if (map.pairs) {
      y[0] = std::sqrt(map.about[2] * map.shift * map.shift + map.about[0]);
      const float factor = std::sqrt(2 * map.about[2] * map.shift);
      for (int64_t i = 0; i < map.width; ++i) y[1 + i] = factor * x[i];
      return;
    }
    const float* roots = memory + at.roots;
    for (int64_t i = 0; i < map.features; ++i) {
      float product = roots[i];
      for (int64_t n = 0; n < map.degree; ++n) {
        const int64_t component = map.components[n * map.features + i];
        product *= component == map.width ? 1.0f : x[component];
      }
      y[i] = product;
    }
  }

  // A token's components, those times s sqrt2, and its first features.
  void load_token(const float* x, float* raw, float* scaled, float* first) const {
    const Vector factor = all(map.pairs ? std::sqrt(2 * map.about[2]) : 0.0f);
    for (int64_t i = 0; i < map.width; i += kLanes) {
      const Vector v = load_first(x + i, map.width - i);
      store(raw + i, v);
      store(scaled + i, v * factor);
    }
    if (at.first) write_first(raw, first);
  }

  // Tokens that are computed: whole tiles.
  int64_t computed() const { return (count + 2 * kRows - 1) / (2 * kRows) * (2 * kRows); }

  // Zeros in the rows of all tokens that are computed.
  void clear(int64_t place, int64_t blocks, int64_t width) const {
    for (int64_t b = 0; b < blocks; ++b)
      std::memset(memory + place + b * kChunk * width, 0, computed() * width * sizeof(float));
  }

  void open() const {
    clear(at.query, at.heads, at.width), clear(at.key, 1, at.width);
    clear(at.seen, at.heads, at.width), clear(at.stored, 1, at.width);
    clear(at.seen_first, at.heads, at.first), clear(at.stored_first, 1, at.first);
    clear(at.value, at.panels, kPanel), clear(at.output, at.heads * at.panels, kPanel);
    std::memset(memory + at.transposed, 0, map.width * kScores * sizeof(float));
    for (int64_t i = 0; i < (map.pairs ? 0 : map.features); ++i) memory[at.roots + i] = std::sqrt(map.square(i));
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t h = 0; h < at.heads; ++h) {
        const int64_t row = h * kChunk + t, query_head = a.query_heads > a.heads ? h : 0;
        load_token(tokens.query + (t * a.query_heads + query_head) * map.width, memory + at.query + row * at.width,
                   memory + at.seen + row * at.width, memory + at.seen_first + row * at.first);
      }
      if (tokens.masked(t)) continue;  // a row of zeros adds nothing
      const float* key = memory + at.key + t * at.width;
      load_token(tokens.key + t * a.key_heads * map.width, memory + at.key + t * at.width,
                 memory + at.stored + t * at.width, memory + at.stored_first + t * at.first);
      for (int64_t i = 0; i < map.width; ++i) memory[at.transposed + i * kScores + t] = key[i];
      for (int64_t p = part.first_panel; p < part.last_panel; ++p)
        for (int64_t j = 0; j < kColumns; ++j) {
          const int64_t column = p * kPanel + j * kLanes, left = a.d_v - column;
          if (left > 0)
            store(memory + at.value + (p * kChunk + t) * kPanel + j * kLanes,
                  load_first(tokens.value + t * a.heads * a.d_v + column, left));
        }
    }
  }

  // kappa(q_r . k_s) for s <= r, zeros elsewhere, and their sums.
  template <int R>
  void score() const {
    for (int64_t h = 0; h < at.heads; ++h)
      for (int64_t t = 0; t < count; t += R) {
        const int64_t row = h * kChunk + t;
        float* scores = memory + at.scores + row * kScores;
        for (int64_t s = 0; s < t + R; s += kPanel) {
          const State keys = {memory + at.transposed + s, nullptr, kScores, 0};
          const Tile<R> products = read<R>(memory + at.query + row * at.width, at.width, map.width, keys);
          UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < kColumns; ++j)
              store(scores + r * kScores + s + j * kLanes, kappa(map, products.at[r][j]));
        }
        for (int64_t r = 0; r < R; ++r) {
          float* weights = scores + r * kScores;
          for (int64_t s = t + r + 1; s < t + R + kPanel && s < kScores; ++s) weights[s] = 0;
          for (int64_t s = 0; a.key_mask && s <= t + r && s < count; ++s)
            if (tokens.masked(s)) weights[s] = 0;
          Vector total = {};
          for (int64_t s = 0; s < t + R; s += kLanes) total += load(weights + s);
          memory[at.denominator + row + r] = sum(total);
        }
      }
  }

  // Outputs += the scores times the values.
  template <int R>
  void weigh() const {
    for (int64_t h = 0; h < at.heads; ++h)
      for (int64_t p = part.first_panel; p < part.last_panel; ++p)
        for (int64_t t = 0; t < count; t += R) {
          const State values = {memory + at.value + p * kChunk * kPanel, nullptr, kPanel, 0};
          const int64_t row = h * kChunk + t, rows = t + R < count ? t + R : count;
          add<R>(h, p, t, read<R>(memory + at.scores + row * kScores, kScores, rows, values), nullptr);
        }
  }

  template <int R>
  void add(int64_t h, int64_t p, int64_t t, const Tile<R>& sums, const float* factors) const {
    float* output = memory + at.output + ((h * at.panels + p) * kChunk + t) * kPanel;
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < kColumns; ++j) {
        float* place = output + r * kPanel + j * kLanes;
        store(place, load(place) + (factors ? sums.at[r][j] * factors[r] : sums.at[r][j]));
      }
  }

  // Rows of the state: queries (of all heads) read them, then keys are added. Outputs are multiplied by
  // query_factor and values by key_factor, by token; null: by 1.
  template <int R>
  void section(const StateInPanels& state, int64_t first_row, int64_t rows, const float* queries, const float* keys,
               int64_t width, const float* query_factor, const float* key_factor) const {
    for (int64_t p = part.first_panel; p < part.last_panel; ++p) {
      State S = state.panel(p);
      S.from += first_row * S.from_stride, S.to += first_row * S.to_stride;
      for (int64_t h = 0; h < at.heads; ++h)
        for (int64_t t = 0; t < count; t += R) {
          const int64_t row = h * kChunk + t;
          add<R>(h, p, t, read<R>(queries + row * width, width, rows, S), query_factor ? query_factor + row : nullptr);
        }
      for (int64_t t = 0; t < count; t += R) {
        const float* value = memory + at.value + (p * kChunk + t) * kPanel;
        Tile<R> u;
        UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < kColumns; ++j) {
            u.at[r][j] = load(value + r * kPanel + j * kLanes);
            if (key_factor) u.at[r][j] *= key_factor[t + r];
          }
        write<R, false, false>(nullptr, keys + t * width, nullptr, width, rows, S, u);
        S.from = S.to, S.from_stride = S.to_stride;
      }
    }
  }

  // The same of the normaliser, whose rows are padded with zeros to whole vectors.
  void section_of_normalizer(float* z, int64_t rows, const float* queries, const float* keys, int64_t width,
                             const float* query_factor, const float* key_factor) const {
    for (int64_t h = 0; h < at.heads; ++h)
      for (int64_t row = h * kChunk; row < h * kChunk + count; row += kLanes) {
        Vector products[kLanes] = {};
        for (int64_t i = 0; i < rows; i += kLanes)
          UNROLL for (int r = 0; r < kLanes; ++r) products[r] += load(queries + (row + r) * width + i) * load(z + i);
        float* below = memory + at.denominator + row;
        store(below, load(below) + sums(products) * (query_factor ? load(query_factor + row) : all(1.0f)));
      }
    for (int64_t i = 0; i < rows; i += kLanes) {
      Vector totals[kRows] = {};
      for (int64_t t = 0; t < computed(); t += kRows)
        UNROLL for (int r = 0; r < kRows; ++r)
          totals[r] += load(keys + (t + r) * width + i) * (key_factor ? key_factor[t + r] : 1.0f);
      for (int r = 1; r < kRows; ++r) totals[0] += totals[r];
      store(z + i, load(z + i) + totals[0]);
    }
  }

  // Row i of the pairs: components i ... d - 1 of tokens, the first of which is not times sqrt2.
  void begin_pairs(int64_t i) const {
    const float root = std::sqrt(map.about[2]);
    for (int64_t h = 0; h < at.heads; ++h)
      for (int64_t row = h * kChunk; row < h * kChunk + computed(); ++row) {
        memory[at.query_factor + row] = memory[at.query + row * at.width + i];
        memory[at.seen + row * at.width + i] = root * memory[at.query + row * at.width + i];
      }
    for (int64_t t = 0; t < computed(); ++t) {
      memory[at.key_factor + t] = memory[at.key + t * at.width + i];
      memory[at.stored + t * at.width + i] = root * memory[at.key + t * at.width + i];
    }
  }

  void finish() const {
    for (int64_t h = 0; h < at.heads; ++h)
      for (int64_t t = 0; t < count; ++t) {
        const float below = a.scale * memory[at.denominator + h * kChunk + t] + a.eps;
        const float factor = a.normalize ? a.scale / below : a.scale;
        float* output = tokens.output + (t * a.output_heads() + h) * a.d_v;
        for (int64_t p = part.first_panel; p < part.last_panel; ++p)
          for (int64_t j = 0; j < kColumns; ++j) {
            const int64_t column = p * kPanel + j * kLanes, left = a.d_v - column;
            if (left > 0)
              store_first(output + column,
                          load(memory + at.output + ((h * at.panels + p) * kChunk + t) * kPanel + j * kLanes) * factor, left);
          }
      }
  }

  template <int R>
  void run(const StateInPanels& state, bool normalizer, Ahead ahead) const {
    open();
    score<R>();
    weigh<R>();
    float* z = memory + at.normalizer;
    const int64_t first = map.first();
    if (first) {
      const float *queries = memory + at.seen_first, *keys = memory + at.stored_first;
      section<R>(state, 0, first, queries, keys, at.first, nullptr, nullptr);
      if (normalizer) section_of_normalizer(z, first, queries, keys, at.first, nullptr, nullptr);
    }
    for (int64_t i = 0, row = first; map.pairs && i < map.width; row += map.width - i, ++i) {
      ahead.advance();
      begin_pairs(i);
      const float *queries = memory + at.seen + i, *keys = memory + at.stored + i;
      const float *query_factor = memory + at.query_factor, *key_factor = memory + at.key_factor;
      section<R>(state, row, map.width - i, queries, keys, at.width, query_factor, key_factor);
      if (normalizer)
        section_of_normalizer(z + at.first + i * at.width, map.width - i, queries, keys, at.width, query_factor, key_factor);
    }
    finish();
  }
};

// The normaliser by features, and by rows padded to whole vectors.
template <class F>
static void each_row(const Places& at, const Polynomial& map, const F& copy) {
  copy(0, 0, map.first());
  for (int64_t i = 0, place = map.first(); map.pairs && i < map.width; place += map.width - i, ++i)
    copy(place, at.first + i * at.width, map.width - i);
}

static void run(const Attention& a, const Polynomial& map, const Part& part, float* memory) {
  const Places at(a, map);
  Attention given = a;  // heads as wide as they are in the inputs
  given.d_k = map.width;
  const int64_t size = a.d_k * a.d_v;
  const bool normalizer = a.normalize || a.present_normalizer;
  float* z = memory + at.normalizer;
  for (int64_t s = part.first_stream; s < part.last_stream; ++s) {
    const StateInPanels state = {a.past_state ? a.past_state + s * size : nullptr,
                                 a.present_state ? a.present_state + s * size : nullptr,
                                 memory + at.state,
                                 a.d_k,
                                 a.d_v,
                                 a.keys > 0 && a.keys <= kChunk};
    state.open(part.first_panel, part.last_panel);
    std::memset(z, 0, (at.state - at.normalizer) * sizeof(float));
    if (a.past_normalizer)
      each_row(at, map, [&](int64_t from, int64_t to, int64_t count) {
        std::memcpy(z + to, a.past_normalizer + s * a.d_k + from, count * sizeof(float));
      });
    for (int64_t start = 0; start < a.keys; start += kChunk) {
      const Chunk chunk = {a, map, at, part, memory, Tokens(given, {s, start})};
      const Ahead ahead(given, Tokens(given, {s, start + kChunk}), map.pairs ? map.width : 1);
      chunk.count <= kRows ? chunk.run<kRows>(state, normalizer, ahead) : chunk.run<2 * kRows>(state, normalizer, ahead);
    }
    state.close(part.first_panel, part.last_panel);
    if (a.present_normalizer && part.first_panel == 0)
      each_row(at, map, [&](int64_t to, int64_t from, int64_t count) {
        std::memcpy(a.present_normalizer + s * a.d_k + to, z + from, count * sizeof(float));
      });
  }
}
