// MixtureOfExperts: an expert's rows of weights, a few at a time, with all of its tokens. Included per instruction set.
//
// A tile is kGroup rows with kTokens tokens, whose products are summed by lanes along the rows, and the lanes at their
// end. Of fewer rows or tokens the last one is taken again, and its products are left.

constexpr int kGroup = 4, kTokens = kLanes == 8 ? 3 : kLanes / 4, kVectors = (kGroup * kTokens + kLanes - 1) / kLanes;

// The products, token by token.
struct Tile {
  Vector of[kVectors];
};

struct Rows {
  const float* at[kGroup];
  int64_t ahead;  // floats to the rows of the next tile, which are asked for meanwhile
};

struct Tokens {
  const float* at[kTokens];
};

// Rows from `first` on of a matrix of `rows`, as they lie there, or as float32 in `memory`.
static Rows open_rows(int type, const void* matrix, int64_t first, int64_t rows, int64_t width, float* memory) {
  Rows open;
  open.ahead = type == kFloat ? kGroup * width : 0;
  for (int r = 0; r < kGroup; ++r) {
    const int64_t at = (first + r < rows ? first + r : rows - 1) * width;
    if (type == kFloat) {
      open.at[r] = static_cast<const float*>(matrix) + at;
    } else {
      widen(type, static_cast<const uint16_t*>(matrix) + at, memory + r * width, width);
      open.at[r] = memory + r * width;
    }
  }
  return open;
}

INLINE const void* matrix_of(const Experts& m, const void* weights, int64_t expert, int64_t floats) {
  return static_cast<const char*>(weights) + expert * floats * (m.stored == kFloat ? 4 : 2);
}

template <bool kCut, bool kAhead>
INLINE void add_products(Vector (&total)[kVectors][kLanes], const Tokens& x, const Rows& w, int64_t i, int64_t left) {
  Vector given[kTokens];
  UNROLL for (int t = 0; t < kTokens; ++t) given[t] = kCut ? load_first(x.at[t] + i, left) : load(x.at[t] + i);
  UNROLL for (int r = 0; r < kGroup; ++r) {
    const Vector row = kCut ? load_first(w.at[r] + i, left) : load(w.at[r] + i);
    if (kAhead) __builtin_prefetch(w.at[r] + i + w.ahead);
    UNROLL for (int t = 0; t < kTokens; ++t) total[(t * kGroup + r) / kLanes][(t * kGroup + r) % kLanes] += row * given[t];
  }
}

template <bool kAhead>
INLINE Tile products(const Tokens& x, const Rows& w, int64_t width) {
  Vector total[kVectors][kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) add_products<false, kAhead>(total, x, w, i, kLanes);
  if (i < width) add_products<true, false>(total, x, w, i, width - i);
  Tile found;
  UNROLL for (int v = 0; v < kVectors; ++v) found.of[v] = sums(total[v]);
  return found;
}

// Rows are asked for by the first tile that reads those before them.
static Tile products(const Tokens& x, const Rows& w, int64_t width, bool first) {
  return first ? products<true>(x, w, width) : products<false>(x, w, width);
}

INLINE void put(const Tile& tile, float* to) {
  UNROLL for (int v = 0; v < kVectors; ++v) store(to + v * kLanes, tile.of[v]);
}

// (2 / sqrt(pi)) int_0^x e^(-t^2) dt within 1.5e-7, by Abramowitz and Stegun 7.1.26.
INLINE Vector error_function(Vector x) {
  const Vector size = x < Vector{} ? -x : x, t = 1.0f / (size * 0.3275911f + 1.0f);
  Vector p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const Vector found = 1.0f - p * t * exponential(-size * size);
  return x < Vector{} ? -found : found;
}

// cap tanh(x / cap), or x without a cap. Of small y by the polynomial of Cephes' tanhf, as 1 - 2 / (e^2y + 1) cancels.
INLINE Vector capped(Vector x, float cap) {
  if (cap == 0) return x;
  const Vector y = x / cap, size = y < Vector{} ? -y : y, square = y * y;
  Vector p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Vector far = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
  return cap * (size < all(0.625f) ? p * square * y + y : y < Vector{} ? -far : far);
}

INLINE Vector positive(Vector x) { return Vector{} > x ? Vector{} : x; }

template <ExpertActivation kActivation>
INLINE Vector activated(Vector x, float cap) {
  const Vector linear = capped(x, cap);
  if constexpr (kActivation == ExpertActivation::kSilu) return linear / (exponential(-x) + 1.0f);
  if constexpr (kActivation == ExpertActivation::kGelu) return linear * 0.5f * (error_function(x * 0.707106781f) + 1.0f);
  return positive(linear) * positive(x);
}

// The hidden values of some groups of rows, for all pairs.
template <ExpertActivation kActivation>
static void fill_hidden(const Experts& m, const Part& part, float* memory) {
  const int64_t rows = m.gated ? 2 * m.inner : m.inner;
  for (int64_t e = 0, first = 0; e < m.experts; first = m.ends[e++]) {
    if (first == m.ends[e]) continue;
    const void* up = matrix_of(m, m.up, e, rows * m.width);
    for (int64_t row = part.first_stream * kGroup; row < part.last_stream * kGroup; row += kGroup) {
      const Rows gate = open_rows(m.stored, up, row, m.inner, m.width, memory);
      const Rows value = m.gated ? open_rows(m.stored, up, m.inner + row, rows, m.width, memory + kGroup * m.width) : gate;
      const int64_t count = m.inner - row < kGroup ? m.inner - row : kGroup;
      for (int64_t pair = first; pair < m.ends[e]; pair += kTokens) {
        const int64_t left = m.ends[e] - pair;
        Tokens x;
        for (int t = 0; t < kTokens; ++t) x.at[t] = m.x + m.token[pair + (t < left ? t : left - 1)] * m.width;
        Tile h = products(x, gate, m.width, pair == first);
        UNROLL for (int v = 0; v < kVectors; ++v) h.of[v] = activated<kActivation>(h.of[v], m.gate_cap);
        if (m.gated) {
          const Tile factors = products(x, value, m.width, pair == first);
          UNROLL for (int v = 0; v < kVectors; ++v) h.of[v] *= capped(factors.of[v], m.value_cap);
        }
        float tile[kVectors * kLanes];
        put(h, tile);
        for (int t = 0; t < kTokens && t < left; ++t)
          std::memcpy(m.hidden + (pair + t) * m.inner + row, tile + t * kGroup, count * sizeof(float));
      }
    }
  }
}

static void fill_hidden(const Experts& m, const Part& part, float* memory) {
  switch (m.activation) {
    case ExpertActivation::kSilu: return fill_hidden<ExpertActivation::kSilu>(m, part, memory);
    case ExpertActivation::kGelu: return fill_hidden<ExpertActivation::kGelu>(m, part, memory);
    case ExpertActivation::kSquaredRelu: return fill_hidden<ExpertActivation::kSquaredRelu>(m, part, memory);
  }
}

// Some columns of y, by groups: experts add to them in their order, whatever thread has the others.
static void fill_outputs(const Experts& m, const Part& part, float* memory) {
  const int64_t begin = part.first_stream * kGroup, groups = part.last_stream * kGroup;
  const int64_t end = groups < m.outputs ? groups : m.outputs;
  for (int64_t n = 0; n < m.tokens; ++n) std::memset(m.y + n * m.outputs + begin, 0, (end - begin) * sizeof(float));
  for (int64_t e = 0, first = 0; e < m.experts; first = m.ends[e++]) {
    if (first == m.ends[e]) continue;
    const void* down = matrix_of(m, m.down, e, m.outputs * m.inner);
    for (int64_t row = begin; row < end; row += kGroup) {
      const Rows open = open_rows(m.stored, down, row, m.outputs, m.inner, memory);
      const int64_t count = end - row < kGroup ? end - row : kGroup;
      for (int64_t pair = first; pair < m.ends[e]; pair += kTokens) {
        const int64_t left = m.ends[e] - pair;
        Tokens h;
        for (int t = 0; t < kTokens; ++t) h.at[t] = m.hidden + (pair + (t < left ? t : left - 1)) * m.inner;
        float tile[kVectors * kLanes];
        put(products(h, open, m.inner, pair == first), tile);
        for (int t = 0; t < kTokens && t < left; ++t) {
          float* y = m.y + m.token[pair + t] * m.outputs + row;
          for (int r = 0; r < count; ++r) y[r] += m.weight[pair + t] * tile[t * kGroup + r];
        }
      }
    }
  }
}

static int64_t groups(int64_t rows) { return (rows + kGroup - 1) / kGroup; }
static int64_t memory_floats(const Experts& m) {
  return m.stored == kFloat ? 0 : kGroup * (2 * m.width > m.inner ? 2 * m.width : m.inner);
}
