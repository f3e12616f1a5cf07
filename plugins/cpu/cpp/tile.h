// States in memory and tiles in registers: kRows tokens by kColumns vectors of value channels. Included
// per instruction set.

constexpr int kTokens = 8 * kRows;  // a block: what is prepared of it stays in the first cache
constexpr int kPanel = kColumns * kLanes;

// A state in memory: what is read, and where the next one is written, by rows of key channels.
struct State {
  const float* from;
  float* to;
  int64_t from_stride, to_stride;
};

// Sums or values of a tile of J vectors. Loops over it are unrolled, so that it is in registers.
template <int R, int J = kColumns>
struct Tile {
  Vector at[R][J];
};

template <int R, int J = kColumns>
INLINE Tile<R, J> nothing() {
  Tile<R, J> tile;
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < J; ++j) tile.at[r][j] = Vector{};
  return tile;
}

// Rows of a matrix, three to a pointer: with one for each of eight, some would not stay in registers.
template <int R>
struct Rows {
  const float* of_three[(R + 2) / 3];
  int64_t stride;

  INLINE_MEMBER Rows(const float* x, int64_t stride) : stride(stride) {
    UNROLL for (int k = 0; k < (R + 2) / 3; ++k) {
      of_three[k] = x + 3 * k * stride;
      asm("" : "+r"(of_three[k]));  // or the compiler makes the others again
    }
  }
  INLINE_MEMBER float at(int r, int64_t i) const { return of_three[r / 3][r % 3 * stride + i]; }
};

// sums_r += the sum over i of x_ri y_i, a product of matrices.
template <int R, int J>
INLINE void multiply(Tile<R, J>& sums, const float* x, int64_t x_stride, int64_t depth, const float* y, int64_t y_stride) {
  const Rows<R> rows(x, x_stride);
  for (int64_t i = 0; i < depth; ++i, y += y_stride) {
    Vector row[J];
    UNROLL for (int j = 0; j < J; ++j) row[j] = load(y + j * kLanes);
    UNROLL for (int r = 0; r < R; ++r) {
      const float factor = rows.at(r, i);
      UNROLL for (int j = 0; j < J; ++j) sums.at[r][j] += factor * row[j];
    }
  }
}

// The sums over rows of x_r and the state.
template <int R>
INLINE Tile<R> read(const float* x, int64_t width, int64_t rows, const State& S) {
  Tile<R> sums = nothing<R>();
  multiply(sums, x, width, rows, S.from, S.from_stride);
  return sums;
}

// The state times decay, and key_r u_r^T of R tokens; with kRead, in the same turn, read() of it as it was.
template <int R, bool kDecay, bool kRead>
INLINE Tile<R> write(const float* query, const float* key, const float* decay, int64_t width, int64_t rows,
                     const State& S, const Tile<R>& u) {
  Tile<R> sums = nothing<R>();
  const float* from = S.from;
  float* to = S.to;
  const Rows<R> queries(kRead ? query : key, width), keys(key, width);
  for (int64_t i = 0; i < rows; ++i, from += S.from_stride, to += S.to_stride) {
    Vector row[kColumns];
    UNROLL for (int j = 0; j < kColumns; ++j) row[j] = load(from + j * kLanes);
    if constexpr (kRead) UNROLL for (int r = 0; r < R; ++r) {
        const float factor = queries.at(r, i);
        UNROLL for (int j = 0; j < kColumns; ++j) sums.at[r][j] += factor * row[j];
      }
    if constexpr (kDecay) UNROLL for (int j = 0; j < kColumns; ++j) row[j] *= decay[i];
    UNROLL for (int r = 0; r < R; ++r) {
      const float factor = keys.at(r, i);
      UNROLL for (int j = 0; j < kColumns; ++j) row[j] += factor * u.at[r][j];
    }
    UNROLL for (int j = 0; j < kColumns; ++j) store(to + j * kLanes, row[j]);
  }
  return sums;
}

// Tokens of the next tile: kRows, and one by one at the end.
INLINE int64_t rows(int64_t left) { return left < kRows ? 1 : kRows; }

template <int R>
INLINE Tile<R> load_tile(const float* value, int64_t stride, int64_t columns) {
  Tile<R> u;
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < kColumns; ++j) {
      const int64_t left = columns - j * kLanes;
      u.at[r][j] = left > 0 ? load_first(value + r * stride + j * kLanes, left) : Vector{};
    }
  return u;
}

// factors_r times row r.
template <int R>
INLINE void scale_rows(Tile<R>& tile, const float* factors) {
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < kColumns; ++j) tile.at[r][j] *= factors[r];
}

// The first `rows` rows and `columns` channels.
template <int R>
INLINE void store_tile(const Tile<R>& tile, float* to, int64_t stride, int64_t rows, int64_t columns) {
  UNROLL for (int r = 0; r < R; ++r) {
    if (r == rows) return;
    UNROLL for (int j = 0; j < kColumns; ++j) {
      const int64_t left = columns - j * kLanes;
      if (left > 0) store_first(to + r * stride + j * kLanes, tile.at[r][j], left);
    }
  }
}

// A state of rows x channels between calls and meanwhile: past and present by rows of all channels, either
// may be missing, and its panels of kPanel channels packed one behind the other.
struct StateInPanels {
  const float* past;
  float* present;
  float* packed;
  int64_t rows, channels;
  bool one_tile;  // all tokens are one: a whole panel is read and written where it is, in past and present

  int64_t column(int64_t p) const { return p * kPanel; }
  int64_t columns(int64_t p) const { return channels - column(p) < kPanel ? channels - column(p) : kPanel; }
  bool in_place(int64_t p) const { return one_tile && columns(p) == kPanel; }
  float* own(int64_t p) const { return packed + p * rows * kPanel; }

  State panel(int64_t p) const {
    State S = {own(p), own(p), kPanel, kPanel};
    if (in_place(p) && past) S.from = past + column(p), S.from_stride = channels;
    if (in_place(p) && present) S.to = present + column(p), S.to_stride = channels;
    return S;
  }

  void open(int64_t first, int64_t last) const {
    for (int64_t p = first; p < last; ++p) {
      if (in_place(p) && past) continue;
      std::memset(own(p), 0, rows * kPanel * sizeof(float));
      for (int64_t i = 0; past && i < rows; ++i)
        std::memcpy(own(p) + i * kPanel, past + i * channels + column(p), columns(p) * sizeof(float));
    }
  }

  void close(int64_t first, int64_t last) const {
    for (int64_t p = first; present && p < last; ++p)
      for (int64_t i = 0; !in_place(p) && i < rows; ++i)
        std::memcpy(present + i * channels + column(p), own(p) + i * kPanel, columns(p) * sizeof(float));
  }
};
