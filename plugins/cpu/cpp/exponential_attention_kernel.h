// Normalised attention with exponential features, a chunk of tokens at a time. For exponents a of a key and b of a query,
//
//   m'             = max(m, a)                             the running maximum, by feature
//   query features = exp(b + m' - max_j (b_j + m'_j))
//   key features   = exp(a - m'),  those of earlier keys and S times exp(m - m')
//
// Within a chunk m' is that of its last token for all of them, which is the same product of features and leaves S as it is.
// A chunk ends before a token whose maximum is kGrowth above that of its first: features of queries are at most
// exp(kGrowth), and keys whose features are lost are lost as well where each token has its own maximum. A query keeps
// its own max_j, so that its denominator, to which eps is added, is the same. Included per instruction set.

#include "attention_chunk.h"

constexpr float kGrowth = 20;

// Exponents of up to kChunk rows at a time; features are padded to whole panels with ones that are 0.
struct Projection {
  const ExponentialMap& map;
  int64_t depth, panels, width;
  float *weights, *norms, *constants, *rows, *half_squares;

  Projection(const ExponentialMap& map, float* memory) : map(map) {
    depth = vectors(map.width) * kLanes, panels = (map.features() + kPanel - 1) / kPanel, width = panels * kPanel;
    weights = memory, norms = weights + map.width * width, constants = norms + width;
    rows = constants + width, half_squares = rows + kChunk * depth;
  }
  static int64_t floats(const ExponentialMap& map) {
    const Projection sizes(map, nullptr);
    return (map.width + 2) * sizes.width + kChunk * (sizes.depth + 1);
  }

  void open() const {
    for (int64_t j = 0; j < width; ++j) {
      const int64_t column = map.opposites && j >= map.columns ? j - map.columns : j;
      const bool projected = column < map.columns, floored = !projected && map.floored && j == map.columns;
      norms[j] = projected ? map.norm : 0;
      constants[j] = projected ? -map.constant : floored ? map.floor : kLowest;
      float* to = weights + j / kPanel * map.width * kPanel + j % kPanel;
      const float sign = column == j ? map.factor : -map.factor;
      for (int64_t i = 0; i < map.width; ++i) to[i * kPanel] = projected ? sign * map.weights[i * map.columns + column] : 0;
    }
  }

  // The exponents of rows x, `width` floats each.
  void write(const float* x, int64_t stride, int64_t count, float* to) const {
    std::memset(rows, 0, kChunk * (depth + 1) * sizeof(float));
    for (int64_t r = 0; r < count; ++r) {
      Vector total = {};
      for (int64_t i = 0; i < map.width; i += kLanes) {
        const Vector v = load_first(x + r * stride + i, map.width - i), scaled = v * map.factor;
        store(rows + r * depth + i, v);
        total += scaled * scaled;
      }
      half_squares[r] = sum(total) / 2;
    }
    for (int64_t r = 0; r < count; r += kTile)
      for (int64_t p = 0; p < panels; ++p) {
        Tile<kTile> sums = nothing<kTile>();
        multiply(sums, rows + r * depth, depth, map.width, weights + p * map.width * kPanel, kPanel);
        UNROLL for (int i = 0; i < kTile; ++i) UNROLL for (int j = 0; j < kColumns; ++j) {
            const int64_t place = p * kPanel + j * kLanes;
            const Vector below = load(norms + place) * half_squares[r + i];
            store(to + (r + i) * width + place, sums.at[i][j] - (below - load(constants + place)));
          }
      }
  }
};

// A thread's memory: a chunk, the exponents of a turn's tokens, and behind them the streams and their maxima.
struct Rooms : MemoryLayout {
  Places chunk;
  int64_t width, exponents, key, query, before, first, tops, streams, maxima;

  Rooms(const ExponentialAttention& x, const Part& part) : chunk(x.mapped) {
    take(chunk.floats);
    width = Projection(x.map, nullptr).width;
    exponents = take(Projection::floats(x.map));
    key = take(kChunk * width), query = take(chunk.heads * kChunk * width);
    before = take(width), first = take(width), tops = take(chunk.heads * kChunk);
    streams = take(AttentionStreams::floats(x.mapped, part));
    maxima = take((part.last_stream - part.first_stream) * width);
  }
};

// The tokens of one stream's turn, in one chunk or several.
struct ExponentialTurn {
  const ExponentialAttention& x;
  const Rooms& at;
  const AttentionStream stream;
  const Tokens tokens;
  float *memory, *m;

  void write_exponents() const {
    const Attention& a = x.given;
    const Projection projection(x.map, memory + at.exponents);
    projection.write(tokens.key, a.key_heads * a.d_k, tokens.count, memory + at.key);
    for (int64_t j = 0; j < at.chunk.heads; ++j)
      projection.write(tokens.query + (a.query_heads > a.heads ? j * a.d_k : 0), a.query_heads * a.d_k, tokens.count,
                      memory + at.query + j * kChunk * at.width);
  }

  const float* key(int64_t t) const { return memory + at.key + t * at.width; }
  const float* query(int64_t head, int64_t t) const { return memory + at.query + (head * kChunk + t) * at.width; }

  // Whether the maximum stays within kGrowth of `first` with a token's key.
  bool is_near(int64_t t) const {
    const float* first = memory + at.first;
    Vector far = {};
    for (int64_t i = 0; i < at.width; i += kLanes)  // a NaN is not near
      far = load(key(t) + i) - load(first + i) <= all(kGrowth) ? far : all(1.0f);
    return largest(far) == 0;
  }

  // Let the maximum go on by a token, and write max_j of its queries.
  void pass(int64_t t) const {
    if (!tokens.masked(t))
      for (int64_t i = 0; i < at.width; i += kLanes) store(m + i, larger(load(m + i), load(key(t) + i)));
    for (int64_t j = 0; j < at.chunk.heads; ++j) {
      Vector top = all(-INFINITY);
      for (int64_t i = 0; i < at.width; i += kLanes) top = larger(top, load(query(j, t) + i) + load(m + i));
      memory[at.tops + j * kChunk + t] = largest(top);
    }
  }

  // The end of the chunk that begins with token `start`; the maximum is then that of its last token.
  int64_t pass_chunk(int64_t start) const {
    std::memcpy(memory + at.before, m, at.width * sizeof(float));
    pass(start);
    std::memcpy(memory + at.first, m, at.width * sizeof(float));
    int64_t t = start + 1;
    for (; t < tokens.count && (tokens.masked(t) || is_near(t)); ++t) pass(t);
    return t;
  }

  // S and z relative to the new maximum. Most features keep theirs.
  void rescale() const {
    const StateInPanels state = stream.state();
    for (int64_t i = 0; i < x.mapped.d_k; ++i) {
      const float before = memory[at.before + i];
      if (before == m[i]) continue;
      const float factor = exponential(all(before - m[i]))[0];
      stream.z[i] *= factor;
      for (int64_t p = stream.part.first_panel; p < stream.part.last_panel; ++p) {
        float* row = state.panel(p).to + i * kPanel;
        UNROLL for (int j = 0; j < kColumns; ++j) store(row + j * kLanes, load(row + j * kLanes) * factor);
      }
    }
  }

  void map_keys(const Chunk& chunk, int64_t start) const {
    for (int64_t t = 0; t < kChunk; ++t)
      for (int64_t i = 0; i < at.chunk.width; i += kLanes) {
        const bool there = !chunk.tokens.masked(t);
        store(chunk.mapped_key(t) + i, there ? exponential(load(key(start + t) + i) - load(m + i)) : Vector{});
      }
  }

  void load_queries(const Chunk& chunk, int64_t start) const {
    for (int64_t j = 0; j < at.chunk.heads; ++j)
      for (int64_t t = 0; t < kChunk; ++t) {
        const float top = memory[at.tops + j * kChunk + start + t];
        for (int64_t i = 0; i < at.chunk.width; i += kLanes) {
          const bool there = t < chunk.tokens.count;
          const Vector features = there ? exponential(load(query(j, start + t) + i) + load(m + i) - top) : Vector{};
          store(chunk.query(j * kChunk + t, i), features * x.mapped.scale);
        }
      }
  }

  void run(Ahead ahead) const {
    write_exponents();
    for (int64_t start = 0, end; start < tokens.count; start = end) {
      end = pass_chunk(start);
      rescale();
      const Chunk chunk = {x.mapped, at.chunk, tokens.some(x.given, start, end), memory};
      float between[kChunk * kChunk];
      chunk.accumulate_decays(between);
      map_keys(chunk, start);
      chunk.transpose_keys(between + (kChunk - 1) * kChunk);
      load_queries(chunk, start);
      chunk.pair(between);
      chunk.apply(stream, ahead);
    }
  }
};

static int64_t panels(const Attention& a) { return AttentionStream::panels(a); }
static int64_t memory_floats(const ExponentialAttention& x, const Part& part) { return Rooms(x, part).floats; }

static void open_maximum(const ExponentialAttention& x, int64_t stream, int64_t width, float* m) {
  const int64_t features = x.mapped.d_k;
  for (int64_t i = 0; i < width; ++i) m[i] = i >= features ? 0 : x.past_max ? x.past_max[stream * features + i] : kLowest;
}

// All tokens of a part of the call.
static void run(const ExponentialAttention& x, const Part& part, float* memory) {
  const Rooms at(x, part);
  const AttentionStreams streams = {x.mapped, part, memory + at.streams, false};
  const auto maximum = [&](int64_t s) { return memory + at.maxima + (s - part.first_stream) * at.width; };
  Projection(x.map, memory + at.exponents).open();
  streams.open();
  for (int64_t s = part.first_stream; s < part.last_stream; ++s) open_maximum(x, s, at.width, maximum(s));
  for (Turn turn = streams.first(), next; turn.start < x.given.keys; turn = next) {
    next = streams.after(turn, kChunk);
    const Tokens tokens(x.given, turn);
    const Chunk whole = {x.mapped, at.chunk, tokens, memory};
    const ExponentialTurn own = {x, at, streams[turn.stream], tokens, memory, maximum(turn.stream)};
    own.run(Ahead(x.given, Tokens(x.given, next), whole.tiles()));
  }
  streams.close();
  const int64_t features = x.mapped.d_k;
  for (int64_t s = part.first_stream; x.present_max && part.first_panel == 0 && s < part.last_stream; ++s)
    std::memcpy(x.present_max + s * features, maximum(s), features * sizeof(float));
}

static int64_t exponents_floats(const ExponentialMap& map) {
  return Projection::floats(map) + kChunk * Projection(map, nullptr).width;
}

// The exponents of `count` rows one behind the other, in memory of that size.
static void write_exponents(const ExponentialMap& map, const float* x, int64_t count, float* to, float* memory) {
  const Projection projection(map, memory);
  const int64_t features = map.features();
  float* found = memory + Projection::floats(map);
  projection.open();
  for (int64_t start = 0; start < count; start += kChunk) {
    const int64_t rows = count - start < kChunk ? count - start : kChunk;
    projection.write(x + start * map.width, map.width, rows, found);
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(to + (start + r) * features, found + r * projection.width, features * sizeof(float));
  }
}
