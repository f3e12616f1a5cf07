// GeneralizedDeltaRule, a tile of kRows tokens by kColumns vectors of value channels at a time.
//
// For tokens r = 1 ... R behind the state S, with A_r the product of their decays up to r, elementwise on
// key channels:
//
//   w_r = (A_{r-1} o a_r)^T S + sum_{s < r} (a_r . A_{r-1} / A_s o b_s) w_s + (a_r . A_{r-1} / A_s o k_s) v_s
//   o_r = (A_r o q_r)^T S + sum_{s <= r} (q_r . A_r / A_s o b_s) w_s + (q_r . A_r / A_s o k_s) v_s
//   S   <- A_R o S + sum_s (A_R / A_s o b_s) w_s^T + (A_R / A_s o k_s) v_s^T
//
// w_r is what a_r reads of the state before token r. A_r / A_s is a product of decays after s, never a
// quotient, so decays of any size are safe. Every element of S is loaded twice and stored once for R
// tokens. Included per instruction set.

#include "tile.h"

// What a tile of R tokens needs of its keys, in memory: vectors of the padded key width, and products.
template <int R>
struct Prepared {
  float *query, *read;  // A_r o q_r and behind them A_{r-1} o a_r (R, width)
  float *key, *write;   // A_R / A_s o k_s and behind them A_R / A_s o b_s (R, width)
  float* decay;         // A_R (width)
  float *query_key, *query_write, *read_key, *read_write;  // the products in brackets (R, R)

  Prepared(float* memory, int64_t width) {
    query = memory, read = query + R * width, key = read + R * width, write = key + R * width;
    decay = write + R * width;
    query_key = decay + width, query_write = query_key + R * R;
    read_key = query_write + R * R, read_write = read_key + R * R;
  }
};

static int64_t prepared_floats(int64_t width) { return ((4 * kRows + 1) * width + 4 * kRows * kRows + 15) / 16 * 16; }

// One head of a tile's tokens as they are given, padded with zeros: the same places in all inputs.
struct Loaded {
  float *query, *key, *alpha, *a, *b;

  Loaded(float* memory, int64_t width) {
    const int64_t vectors = kRows * width;
    query = memory, key = query + vectors, alpha = key + vectors, a = alpha + vectors, b = a + vectors;
  }
  static int64_t floats(int64_t width) { return 5 * kRows * width; }
};

static void load_token(const DeltaRule& d, int64_t token, int64_t head, const Loaded& to, int64_t place) {
  const int64_t from = (token * d.heads + head) * d.d_k;
  const bool masked = d.key_mask && !d.key_mask[token];
  for (int64_t i = 0; i < d.d_k; i += kLanes) {
    const int64_t left = d.d_k - i, at = place + i;
    store(to.query + at, load_first(d.query + from + i, left) * d.scale);
    store(to.b + at, load_first(d.b + from + i, left));
    store(to.key + at, masked ? Vector{} : load_first(d.key + from + i, left));
    store(to.a + at, masked ? Vector{} : load_first(d.a + from + i, left));
    store(to.alpha + at, masked ? all(1.0f) : exponential(load_first(d.decay + from + i, left)));
  }
}

// Of keys (or what is written, b): A_R / A_s o k_s, and their products with all later queries and readers.
template <int R>
INLINE void carry(const Loaded& x, const float* key, int64_t width, float* carried, float* by_query, float* by_reader) {
  Vector queries[R][R], readers[R][R];
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int s = 0; s <= r; ++s) queries[r][s] = readers[r][s] = Vector{};
  for (int64_t i = 0; i < width; i += kLanes)
    UNROLL for (int s = 0; s < R; ++s) {
      Vector k = load(key + s * width + i);
      queries[s][s] += load(x.query + s * width + i) * k;
      UNROLL for (int r = s + 1; r < R; ++r) {
        readers[r][s] += load(x.a + r * width + i) * k;
        k *= load(x.alpha + r * width + i);
        queries[r][s] += load(x.query + r * width + i) * k;
      }
      store(carried + s * width + i, k);
    }
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int s = 0; s <= r; ++s) {
      by_query[r * R + s] = sum(queries[r][s]);
      if (s < r) by_reader[r * R + s] = sum(readers[r][s]);
    }
}

template <int R>
static void prepare(const Loaded& x, int64_t width, float* memory) {
  const Prepared<R> p(memory, width);
  for (int64_t i = 0; i < width; i += kLanes) {
    Vector past = all(1.0f);
    UNROLL for (int r = 0; r < R; ++r) {
      store(p.read + r * width + i, load(x.a + r * width + i) * past);
      past *= load(x.alpha + r * width + i);
      store(p.query + r * width + i, load(x.query + r * width + i) * past);
    }
    store(p.decay + i, past);
  }
  carry<R>(x, x.key, width, p.key, p.query_key, p.read_key);
  carry<R>(x, x.b, width, p.write, p.query_write, p.read_write);
}

template <int R>
static void tile(const DeltaRule& d, float* memory, int64_t width, const State& S, const float* value, float* output,
                 int64_t columns) {
  const Prepared<R> p(memory, width);
  const int64_t stride = d.heads * d.d_v;
  Tile<2 * R> sums = read<2 * R>(p.query, width, d.d_k, S), added;  // of queries and a; of keys and b
  const Tile<R> v = load_tile<R>(value, stride, columns);
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < kColumns; ++j) {
      Vector w = sums.at[R + r][j];
      UNROLL for (int s = 0; s < r; ++s)
        w += p.read_write[r * R + s] * added.at[R + s][j] + p.read_key[r * R + s] * v.at[s][j];
      added.at[r][j] = v.at[r][j], added.at[R + r][j] = w;
    }
  write<2 * R, true, false>(nullptr, p.key, p.decay, width, d.d_k, S, added);
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int s = 0; s <= r; ++s) UNROLL for (int j = 0; j < kColumns; ++j)
        sums.at[r][j] += p.query_write[r * R + s] * added.at[R + s][j] + p.query_key[r * R + s] * added.at[s][j];
    UNROLL for (int j = 0; j < kColumns; ++j) {
      const int64_t left = columns - j * kLanes;
      if (left > 0) store_first(output + r * stride + j * kLanes, sums.at[r][j], left);
    }
  }
}

// Memory of a thread: one tile's loaded tokens, a block of prepared tiles, and the state of every stream.
struct Layout {
  int64_t width, panels, prepared, states, state;

  explicit Layout(const DeltaRule& d) {
    width = vectors(d.d_k) * kLanes;
    panels = (d.d_v + kPanel - 1) / kPanel;
    prepared = Loaded::floats(width);
    states = prepared + kTokens * prepared_floats(width);  // a tile for each of the tokens at the end
    state = panels * d.d_k * kPanel;
  }
};

static int64_t panels(const DeltaRule& d) { return Layout(d).panels; }

static int64_t memory_floats(const DeltaRule& d, const Part& part) {
  const Layout at(d);
  return at.states + (part.last_stream - part.first_stream) * at.state;
}

static StateInPanels state_of(const DeltaRule& d, const Layout& at, const Part& part, int64_t stream, float* memory) {
  const int64_t size = d.d_k * d.d_v;
  return {d.past_state ? d.past_state + stream * size : nullptr,
          d.present_state ? d.present_state + stream * size : nullptr,
          memory + at.states + (stream - part.first_stream) * at.state,
          d.d_k,
          d.d_v,
          d.length == 1 || d.length == kRows};
}

// Tokens start ... start + count - 1 of a stream.
static void block(const DeltaRule& d, const Layout& at, const Part& part, int64_t stream, float* memory, int64_t start,
                  int64_t count) {
  const int64_t head = stream % d.heads, token = stream / d.heads * d.length + start;
  const Loaded loaded(memory, at.width);
  float* prepared = memory + at.prepared;
  int64_t tiles = 0;
  for (int64_t t = 0; t < count; t += rows(count - t), ++tiles) {
    const int64_t tokens = rows(count - t);
    for (int64_t r = 0; r < tokens; ++r) load_token(d, token + t + r, head, loaded, r * at.width);
    (tokens == 1 ? prepare<1> : prepare<kRows>)(loaded, at.width, prepared + tiles * prepared_floats(at.width));
  }
  const StateInPanels state = state_of(d, at, part, stream, memory);
  for (int64_t panel = part.first_panel; panel < part.last_panel; ++panel) {
    const State S = state.panel(panel);
    int64_t index = 0;
    for (int64_t t = 0; t < count; t += rows(count - t), ++index) {
      const int64_t place = ((token + t) * d.heads + head) * d.d_v + state.column(panel);
      const auto run = rows(count - t) == 1 ? tile<1> : tile<kRows>;
      run(d, prepared + index * prepared_floats(at.width), at.width, S, d.value + place, d.output + place, state.columns(panel));
    }
  }
}

// All tokens of a part of the call. Streams take turns by block: one token's heads are neighbours in memory.
static void run(const DeltaRule& d, const Part& part, float* memory) {
  const Layout at(d);
  for (int64_t s = part.first_stream; s < part.last_stream; ++s)
    state_of(d, at, part, s, memory).open(part.first_panel, part.last_panel);
  for (int64_t start = 0; start < d.length; start += kTokens)
    for (int64_t s = part.first_stream; s < part.last_stream; ++s)
      block(d, at, part, s, memory, start, d.length - start < kTokens ? d.length - start : kTokens);
  for (int64_t s = part.first_stream; s < part.last_stream; ++s)
    state_of(d, at, part, s, memory).close(part.first_panel, part.last_panel);
}
