// MatMulNBits: integers of a block multiplied as bytes. Included per instruction set.
//
//   y_tn = sum_b step_tb scale_nb (sum_i q_ti w_ni - zero_nb sum_i q_ti),  x_ti ~ step_tb q_ti,  i in block b
//
// The second sum is known once a token is rounded. Of few tokens it is multiplied with the middle of the range as an
// integer, and with what a zero point differs from that at the end of a row. An instruction multiplies four neighbouring
// bytes of each lane and adds them to the lane: the four are a group. Of four bits a weight, a byte has two neighbours:
// lower halves of the bytes are even elements and upper halves odd ones, so even and odd elements of a token are kept apart.
//
// Few tokens: the lanes are neighbours of a row of weights, which is read once and as it lies; its sums are added up at
// the end of the row. Many tokens: the lanes are rows. Four-byte groups of kLanes rows are transposed for a slice of the
// width, which all tokens of the call read then: that costs a shuffle for each group, whatever the number of tokens.

constexpr int kBytes = 4 * kLanes;
constexpr int kPanel = 2 * kLanes;             // rows of weights that are multiplied at once
constexpr int64_t kSlice = 512;                // elements of the width whose panel fits a first cache
constexpr int kSliceBlocks = kSlice / 16;      // blocks of a slice, at most
constexpr int kTileTokens = kLanes == 16 ? 6 : 3;
constexpr int kRowsAtOnce = 4, kFewTokens = kLanes == 16 ? 4 : 2;  // a tile of few tokens
constexpr int64_t kNear = 8192;  // bytes that a first cache has room for

#if defined(LINEXPORT_VNNI)
typedef __m512i Bytes;
constexpr int kShift8 = 0;  // subtracted from weights of eight bits before they are multiplied
INLINE Bytes all_bytes(int x) { return _mm512_set1_epi8(x); }
INLINE Bytes load_bytes(const void* p) { return _mm512_loadu_si512(p); }
INLINE Bytes low_halves(Bytes x) { return _mm512_and_si512(x, all_bytes(15)); }
INLINE Bytes high_halves(Bytes x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), all_bytes(15)); }
INLINE Bytes shifted8(Bytes x) { return x; }
INLINE Bytes one_group(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}
template <int kBits>
INLINE Integers dot(Integers sum, Bytes weights, Bytes tokens) {
  return (Integers)_mm512_dpbusd_epi32((__m512i)sum, weights, tokens);
}
// sum + x y of lanes whose factors have 16 bits, and x zeros in its upper half.
INLINE Integers add_product(Integers sum, Integers x, Integers y) {
  return (Integers)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)x, (__m512i)y);
}
INLINE Vector to_floats(Integers x) { return _mm512_cvtepi32_ps((__m512i)x); }
// Bytes, and halves of bytes, as integers.
INLINE Integers widened8(const uint8_t* p) { return (Integers)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
INLINE Integers widened4(const uint8_t* p) {
  const __m512i pairs = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return (Integers)_mm512_or_si512(_mm512_and_si512(pairs, _mm512_set1_epi64(15)), _mm512_slli_epi64(_mm512_srli_epi64(pairs, 4), 32));
}
INLINE Integers to_integers(Vector x) { return (Integers)_mm512_cvtps_epi32(x); }
INLINE Vector taken(Vector x, Integers places) { return _mm512_permutexvar_ps((__m512i)places, x); }
INLINE float total_of(Vector x) { return _mm512_reduce_add_ps(x); }
typedef __mmask16 Mask;
INLINE Mask first_lanes(int64_t count) { return count >= kLanes ? 0xffff : (1u << count) - 1; }
INLINE Vector load_some(const float* p, Mask some) { return _mm512_maskz_loadu_ps(some, p); }
INLINE void store_bytes(int8_t* p, Integers x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)x)); }
// The first `left` bytes, zeros behind them; nothing behind them is read.
INLINE Bytes load_bytes(const uint8_t* p, int64_t left) {
  return _mm512_maskz_loadu_epi8(left >= kBytes ? ~0ull : (1ull << left) - 1, p);
}
#else
typedef __m256i Bytes;
constexpr int kShift8 = 128;
INLINE Bytes all_bytes(int x) { return _mm256_set1_epi8(x); }
INLINE Bytes load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
INLINE Bytes low_halves(Bytes x) { return _mm256_and_si256(x, all_bytes(15)); }
INLINE Bytes high_halves(Bytes x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), all_bytes(15)); }
INLINE Bytes shifted8(Bytes x) { return _mm256_xor_si256(x, all_bytes(-128)); }
INLINE Bytes one_group(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}
// Two products are added in 16 bits: of four bits at most 2 * 15 * 127, of eight bits less 128 at most 2 * 128 * 127.
template <int kBits>
INLINE Integers dot(Integers sum, Bytes weights, Bytes tokens) {
  const Bytes pairs = kBits == 4 ? _mm256_maddubs_epi16(weights, tokens)
                                 : _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(tokens, weights));
  return sum + (Integers)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
INLINE Integers add_product(Integers sum, Integers x, Integers y) {
  return sum + (Integers)_mm256_madd_epi16((__m256i)x, (__m256i)y);
}
INLINE Vector to_floats(Integers x) { return _mm256_cvtepi32_ps((__m256i)x); }
INLINE Integers widened8(const uint8_t* p) { return (Integers)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
INLINE Integers widened4(const uint8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  const __m256i pairs = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
  return (Integers)_mm256_or_si256(_mm256_and_si256(pairs, _mm256_set1_epi64x(15)), _mm256_slli_epi64(_mm256_srli_epi64(pairs, 4), 32));
}
INLINE Integers to_integers(Vector x) { return (Integers)_mm256_cvtps_epi32(x); }
INLINE Vector taken(Vector x, Integers places) { return _mm256_permutevar8x32_ps(x, (__m256i)places); }
INLINE float total_of(Vector x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
typedef __m256i Mask;
INLINE Mask first_lanes(int64_t count) { return (__m256i)(lane() < static_cast<int32_t>(count < kLanes ? count : kLanes)); }
INLINE Vector load_some(const float* p, Mask some) { return _mm256_maskload_ps(p, some); }
INLINE void store_bytes(int8_t* p, Integers x) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
INLINE Bytes load_bytes(const uint8_t* p, int64_t left) {
  if (left >= kBytes) return load_bytes(p);
  uint8_t part[kBytes] = {};
  std::memcpy(part, p, left);
  return load_bytes(part);
}
#endif

INLINE void store_vector(uint8_t* p, Bytes x) { std::memcpy(p, &x, kBytes); }
INLINE Integers load_integers(const int32_t* p) {
  Integers found;
  std::memcpy(&found, p, sizeof found);
  return found;
}
INLINE Integers all_integers(int32_t x) { return x - Integers{}; }

template <int kBits>
constexpr int kZero = kBits == 4 ? 8 : 128 - kShift8;  // what stands for 0 where the node has no zero points

template <int kBits>
INLINE int zero_point(const MatMulNBits& m, int64_t row, int64_t b) {
  const uint8_t* own = m.zero_points + row * m.zero_bytes();
  return kBits == 8 ? own[b] - kShift8 : (own[b / 2] >> (b % 2 * 4)) & 15;
}

// Vectors of a row's bytes; the last one may be a part.
INLINE int64_t pieces(const MatMulNBits& m) { return (m.row_bytes() + kBytes - 1) / kBytes; }
static bool few(const MatMulNBits& m) { return m.tokens <= (kLanes == 16 ? 12 : 6); }

// Numbers that a token has of each kind: of bytes, steps and offsets.
static int64_t rounded_bytes(const MatMulNBits& m) { return few(m) ? pieces(m) * kBytes * (8 / m.bits) : m.blocks * m.block; }
static int64_t step_count(const MatMulNBits& m) { return few(m) ? pieces(m) * kLanes : m.blocks; }
static int64_t sum_count(const MatMulNBits& m) { return few(m) && m.zero_points ? m.blocks : 0; }

// Round a block to integers of -127 to 127, and return its step; others behind the last element are 0. A block with a
// number that is infinite or none has a step that is none.
INLINE float round_block(const float* x, int64_t count, int64_t block, int8_t* rounded) {
  Vector most = {}, poison = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vector v = load_first(x + i, count - i);
    most = larger(most, larger(v, -v)), poison += v * 0.0f;
  }
  const float size = largest(most), wrong = total_of(poison);
  const Vector rate = all(size > 1e-35f ? 127 / size : 0);
  for (int64_t i = 0; i < block; i += kLanes) {
    const Vector v = i < count ? load_first(x + i, count - i) : Vector{};
    store_bytes(rounded + i, to_integers(v * rate));
  }
  return size / 127 + wrong;
}

// The elements of a block where its weights are multiplied: of four bits even ones, then odd ones `apart` bytes on.
template <int kBits>
INLINE void place(const int8_t* rounded, int64_t count, int8_t* to, int64_t apart) {
  if (kBits == 8) {
    std::memcpy(to, rounded, count);
  } else {
    for (int64_t i = 0; i < count / 2; ++i) to[i] = rounded[2 * i], to[i + apart] = rounded[2 * i + 1];
  }
}

INLINE int32_t sum_of(const int8_t* rounded, int64_t count) {
  int32_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += rounded[i];
  return total;
}

// Round a token for many: blocks one behind the other; steps and offsets by block.
template <int kBits>
static void round_for_many(const MatMulNBits& m, int64_t t) {
  int8_t rounded[256], *to = m.rounded + t * rounded_bytes(m);
  const int32_t weight = m.zero_points ? -1 : -kZero<kBits>;
  for (int64_t b = 0; b < m.blocks; ++b) {
    const int64_t start = b * m.block, left = m.width - start;
    m.steps[t * m.blocks + b] = round_block(m.x + t * m.width + start, left < m.block ? left : m.block, m.block, rounded);
    m.offsets[t * m.blocks + b] = weight * sum_of(rounded, m.block);
    place<kBits>(rounded, m.block, to + start, m.block / 2);
  }
}

// Round a token for few: by vectors of a row's bytes; steps and offsets by lane.
template <int kBits>
static void round_for_few(const MatMulNBits& m, int64_t t) {
  constexpr int kParts = 8 / kBits;
  int8_t rounded[256], *to = m.rounded + t * rounded_bytes(m);
  float* steps = m.steps + t * step_count(m);
  int32_t* offsets = m.offsets + t * step_count(m);
  const int64_t bytes = m.block / kParts, lanes = bytes / 4, count = pieces(m);
  std::memset(to, 0, rounded_bytes(m));
  std::memset(steps, 0, step_count(m) * sizeof(float));
  for (int64_t b = 0; b < m.blocks; ++b) {
    const int64_t start = b * m.block, left = m.width - start;
    const float step = round_block(m.x + t * m.width + start, left < m.block ? left : m.block, m.block, rounded);
    for (int64_t l = 0; l < lanes; ++l) steps[b * lanes + l] = step;
    if (m.zero_points) m.sums[t * m.blocks + b] = step * sum_of(rounded, m.block);
    for (int64_t i = 0; i < bytes; i += kBytes) {
      const int64_t at = b * bytes + i, some = bytes - i < kBytes ? bytes - i : kBytes;
      place<kBits>(rounded + i * kParts, some * kParts, to + at / kBytes * kBytes * kParts + at % kBytes, kBytes);
    }
  }
  const Integers weight = all_integers(-kZero<kBits>);
  for (int64_t c = 0; c < count; ++c) {
    Integers total = {};
    for (int part = 0; part < kParts; ++part) total = dot<4>(total, all_bytes(1), load_bytes(to + (c * kParts + part) * kBytes));
    total *= weight;
    std::memcpy(offsets + c * kLanes, &total, sizeof total);
  }
}

static void round_tokens(const MatMulNBits& m, const Part& part) {
  for (int64_t t = part.first_stream; t < part.last_stream; ++t) {
    if (few(m)) {
      m.bits == 4 ? round_for_few<4>(m, t) : round_for_few<8>(m, t);
    } else {
      m.bits == 4 ? round_for_many<4>(m, t) : round_for_many<8>(m, t);
    }
  }
}

// Where the scales of a vector's lanes are, from that of its first lane on.
struct LaneBlocks {
  Integers place;
  int shift;      // of a lane's number to that of its block
  int64_t count;  // blocks of a vector
};

INLINE LaneBlocks lane_blocks(const MatMulNBits& m) {
  const int shift = __builtin_ctzll(m.block * m.bits / 32);
  return {lane() >> shift, shift, kLanes >> shift > 1 ? kLanes >> shift : 1};
}

// What is read of kRows rows of weights, and of kTokens tokens.
template <int kRows, int kTokens>
struct Read {
  const uint8_t* weights[kRows];
  const float* scales[kRows];
  const int8_t* rounded[kTokens];
  const float* steps[kTokens];
  const int32_t* offsets[kTokens];
  int64_t ahead;  // bytes to the next rows
};

// Add the products of one vector of the rows' bytes; of the last one `left` bytes are there.
template <int kBits, bool kCut, int kRows, int kTokens>
INLINE void add_piece(Vector (&total)[kRows][kTokens], const Read<kRows, kTokens>& own, const LaneBlocks& blocks, int64_t c, Mask some, int64_t left) {
  constexpr int kParts = 8 / kBits;
  const int64_t first = c * kLanes >> blocks.shift;
  Bytes part[kRows][2];
  Vector scale[kRows];
  UNROLL for (int r = 0; r < kRows; ++r) {
    const uint8_t* at = own.weights[r] + c * kBytes;
    // In the order of memory, which is read fastest so, a group of rows ahead: as near as it fits.
    const uint8_t* next = own.weights[0] + own.ahead + (c * kRows + r) * kBytes;
    own.ahead <= kNear ? __builtin_prefetch(next, 0, 3) : __builtin_prefetch(next, 0, 2);
    const Bytes w = kCut ? load_bytes(at, left) : load_bytes(at);
    part[r][0] = kBits == 4 ? low_halves(w) : shifted8(w), part[r][1] = kBits == 4 ? high_halves(w) : w;
    scale[r] = taken(load_some(own.scales[r] + first, some), blocks.place);
  }
  UNROLL for (int t = 0; t < kTokens; ++t) {
    const Integers offset = load_integers(own.offsets[t] + c * kLanes);
    const Vector step = load(own.steps[t] + c * kLanes);
    Bytes given[kParts];
    UNROLL for (int p = 0; p < kParts; ++p) given[p] = load_bytes(own.rounded[t] + (c * kParts + p) * kBytes);
    UNROLL for (int r = 0; r < kRows; ++r) {
      Integers sum = offset;
      UNROLL for (int p = 0; p < kParts; ++p) sum = dot<kBits>(sum, part[r][p], given[p]);
      total[r][t] += to_floats(sum) * (scale[r] * step);
    }
  }
}

// What the zero points of a row's blocks from `b` on differ from the middle; nothing behind them is read.
template <int kBits>
INLINE Integers zeros_of(const MatMulNBits& m, int64_t row, int64_t b) {
  constexpr int kRead = kLanes * kBits / 8;
  const uint8_t* own = m.zero_points + row * m.zero_bytes() + b * kBits / 8;
  const int64_t left = m.zero_bytes() - b * kBits / 8;
  uint8_t part[kRead] = {};
  if (left < kRead) std::memcpy(part, own, left), own = part;
  return (kBits == 4 ? widened4(own) : widened8(own)) - all_integers(1 << (kBits - 1));
}

// The products of those with the sums of the tokens' blocks.
template <int kBits, int kRows, int kTokens>
INLINE void add_zeros(Vector (&total)[kRows][kTokens], const MatMulNBits& m, int64_t row, int64_t token) {
  for (int64_t b = 0; b < m.blocks; b += kLanes) {
    const Mask some = first_lanes(m.blocks - b);
    UNROLL for (int r = 0; r < kRows; ++r) {
      const Vector zero = to_floats(zeros_of<kBits>(m, row + r, b)) * load_some(m.scales + (row + r) * m.blocks + b, some);
      UNROLL for (int t = 0; t < kTokens; ++t) total[r][t] -= zero * load_some(m.sums + (token + t) * m.blocks + b, some);
    }
  }
}

// The products of kRows rows from `row` on with kTokens tokens from `token` on.
template <int kBits, bool kZeros, int kRows, int kTokens>
static void few_products(const MatMulNBits& m, const LaneBlocks& blocks, int64_t row, int64_t token) {
  const int64_t bytes = m.row_bytes(), count = pieces(m), whole = bytes / kBytes;
  Read<kRows, kTokens> own;
  own.ahead = kRows * bytes;
  UNROLL for (int r = 0; r < kRows; ++r) {
    own.weights[r] = m.weights + (row + r) * bytes, own.scales[r] = m.scales + (row + r) * m.blocks;
  }
  UNROLL for (int t = 0; t < kTokens; ++t) {
    own.rounded[t] = m.rounded + (token + t) * rounded_bytes(m);
    own.steps[t] = m.steps + (token + t) * count * kLanes, own.offsets[t] = m.offsets + (token + t) * count * kLanes;
  }
  Vector total[kRows][kTokens] = {};
  const Mask some = first_lanes(blocks.count);
  for (int64_t c = 0; c < whole; ++c) add_piece<kBits, false>(total, own, blocks, c, some, kBytes);
  if (whole < count) {
    const Mask last = first_lanes(m.blocks - (whole * kLanes >> blocks.shift));
    add_piece<kBits, true>(total, own, blocks, whole, last, bytes - whole * kBytes);
  }
  if (kZeros) add_zeros<kBits>(total, m, row, token);
  UNROLL for (int r = 0; r < kRows; ++r) UNROLL for (int t = 0; t < kTokens; ++t)
    m.y[(token + t) * m.outputs + row + r] = total_of(total[r][t]) + (m.bias ? m.bias[row + r] : 0);
}

// All tokens with kRows rows.
template <int kBits, bool kZeros, int kRows>
static void few_rows(const MatMulNBits& m, const LaneBlocks& blocks, int64_t row) {
  int64_t t = 0;
  for (; t + kFewTokens <= m.tokens; t += kFewTokens) few_products<kBits, kZeros, kRows, kFewTokens>(m, blocks, row, t);
  for (; t + 2 <= m.tokens; t += 2) few_products<kBits, kZeros, kRows, 2>(m, blocks, row, t);
  if (t < m.tokens) few_products<kBits, kZeros, kRows, 1>(m, blocks, row, t);
}

template <int kBits, bool kZeros>
static void multiply_few(const MatMulNBits& m, const Part& part) {
  const LaneBlocks blocks = lane_blocks(m);
  int64_t row = part.first_stream;
  for (; row + kRowsAtOnce <= part.last_stream; row += kRowsAtOnce) few_rows<kBits, kZeros, kRowsAtOnce>(m, blocks, row);
  for (; row < part.last_stream; ++row) few_rows<kBits, kZeros, 1>(m, blocks, row);
}

// The weights of a panel's rows in a slice of the width, transposed, with their scales and zero points.
struct Panel {
  alignas(64) uint8_t groups[kSlice / 4][kPanel * 4];
  alignas(64) float scales[kSliceBlocks][kPanel];
  alignas(64) int32_t zeros[kSliceBlocks][kPanel];
};

// Transpose kLanes groups of as many rows from `row` on, the last row again where there are fewer.
INLINE void transposed(const MatMulNBits& m, int64_t row, int64_t at, int64_t left, int64_t ahead, Vector (&groups)[kLanes]) {
  UNROLL for (int r = 0; r < kLanes; ++r) {
    const uint8_t* from = m.weights + (row + r < m.outputs ? row + r : m.outputs - 1) * m.row_bytes() + at;
    __builtin_prefetch(from + ahead);
    const Bytes loaded = left < kBytes ? load_bytes(from, left) : load_bytes(from);
    std::memcpy(&groups[r], &loaded, kBytes);
  }
  transpose(groups);
}

// The slice's bytes of kLanes rows. Of four bits, a block's even elements come before its odd ones.
template <int kBits>
INLINE void fill_groups(const MatMulNBits& m, int64_t row, int64_t start, int64_t width, Panel& panel, int place) {
  const int64_t begin = start * kBits / 8, end = begin + width * kBits / 8, of_block = m.block * kBits / 32;
  const int64_t ahead = end < m.row_bytes() ? end - begin : kPanel * m.row_bytes() - begin;  // to the next slice
  for (int64_t at = begin; at < end; at += kBytes) {
    Vector groups[kLanes];
    transposed(m, row, at, end - at, ahead, groups);
    UNROLL for (int g = 0; g < kLanes; ++g) {
      if (at + 4 * g >= end) break;
      const int64_t group = (at - begin) / 4 + g;
      Bytes w;
      std::memcpy(&w, &groups[g], kBytes);
      if (kBits == 4) {
        uint8_t* to = panel.groups[group + (group & -of_block)] + place * kBytes;
        store_vector(to, low_halves(w)), store_vector(to + of_block * 2 * kBytes, high_halves(w));
      } else {
        store_vector(panel.groups[group] + place * kBytes, shifted8(w));
      }
    }
  }
}

template <int kBits, bool kZeros>
static void fill_panel(const MatMulNBits& m, int64_t row, int64_t start, int64_t width, Panel& panel) {
  UNROLL for (int place = 0; place < 2; ++place) fill_groups<kBits>(m, row + place * kLanes, start, width, panel, place);
  const int64_t first = start / m.block, count = width / m.block;
  for (int r = 0; r < kPanel; ++r) {
    const int64_t own = row + r < m.outputs ? row + r : m.outputs - 1;
    for (int64_t b = 0; b < count; ++b) {
      panel.scales[b][r] = m.scales[own * m.blocks + first + b];
      if (kZeros) panel.zeros[b][r] = zero_point<kBits>(m, own, first + b) & 0xffff;
    }
  }
}

// Add the products of a panel to y, for kTokens tokens from `token` on.
template <int kBits, bool kZeros, int kTokens>
static void add_tile(const MatMulNBits& m, const Panel& panel, int64_t row, int64_t token, int64_t start, int64_t width) {
  const int64_t left = m.outputs - row, first = start / m.block, count = width / m.block, groups = m.block / 4;
  const int64_t bytes = m.blocks * m.block;
  float* y = m.y + token * m.outputs + row;
  Vector total[kTokens][2];
  UNROLL for (int t = 0; t < kTokens; ++t) UNROLL for (int p = 0; p < 2; ++p) {
    const float* from = start > 0 ? y + t * m.outputs : m.bias ? m.bias + row : nullptr;
    total[t][p] = from && left > p * kLanes ? load_first(from + p * kLanes, left - p * kLanes) : Vector{};
  }
  for (int64_t b = 0; b < count; ++b) {
    const uint8_t* w = panel.groups[b * groups];
    const int8_t* q = m.rounded + token * bytes + start + b * m.block;
    Integers sum[kTokens][2];
    UNROLL for (int t = 0; t < kTokens; ++t) {
      const Integers offset = all_integers(m.offsets[(token + t) * m.blocks + first + b]);
      UNROLL for (int p = 0; p < 2; ++p)
        sum[t][p] = kZeros ? add_product(Integers{}, load_integers(panel.zeros[b] + p * kLanes), offset) : offset;
    }
    for (int64_t g = 0; g < groups; g += 4) UNROLL for (int i = 0; i < 4; ++i) {
      const Bytes w0 = load_bytes(w + (g + i) * 2 * kBytes), w1 = load_bytes(w + (g + i) * 2 * kBytes + kBytes);
      UNROLL for (int t = 0; t < kTokens; ++t) {
        const Bytes given = one_group(q + t * bytes + 4 * (g + i));
        sum[t][0] = dot<kBits>(sum[t][0], w0, given), sum[t][1] = dot<kBits>(sum[t][1], w1, given);
      }
    }
    const Vector scale[2] = {load(panel.scales[b]), load(panel.scales[b] + kLanes)};
    UNROLL for (int t = 0; t < kTokens; ++t) {
      const float step = m.steps[(token + t) * m.blocks + first + b];
      UNROLL for (int p = 0; p < 2; ++p) total[t][p] += to_floats(sum[t][p]) * step * scale[p];
    }
  }
  UNROLL for (int t = 0; t < kTokens; ++t) UNROLL for (int p = 0; p < 2; ++p)
    if (left > p * kLanes) store_first(y + t * m.outputs + p * kLanes, total[t][p], left - p * kLanes);
}

template <int kBits, bool kZeros, int kTokens = kTileTokens>
INLINE void add_last_tile(const MatMulNBits& m, const Panel& panel, int64_t row, int64_t token, int64_t start, int64_t width) {
  if constexpr (kTokens > 0) {
    if (m.tokens - token == kTokens) return add_tile<kBits, kZeros, kTokens>(m, panel, row, token, start, width);
    add_last_tile<kBits, kZeros, kTokens - 1>(m, panel, row, token, start, width);
  }
}

// All tokens with the rows of some panels.
template <int kBits, bool kZeros>
static void multiply_many(const MatMulNBits& m, const Part& part, Panel& panel) {
  const int64_t padded = m.blocks * m.block;
  for (int64_t at = part.first_stream; at < part.last_stream; ++at) {
    const int64_t row = at * kPanel;
    for (int64_t start = 0; start < padded; start += kSlice) {
      const int64_t width = padded - start < kSlice ? padded - start : kSlice;
      fill_panel<kBits, kZeros>(m, row, start, width, panel);
      int64_t t = 0;
      for (; t + kTileTokens <= m.tokens; t += kTileTokens) add_tile<kBits, kZeros, kTileTokens>(m, panel, row, t, start, width);
      add_last_tile<kBits, kZeros>(m, panel, row, t, start, width);
    }
  }
}

// The parts that the rows of weights are divided into.
static int64_t row_groups(const MatMulNBits& m) {
  return few(m) ? m.outputs : (m.outputs + kPanel - 1) / kPanel;
}
static int64_t memory_floats(const MatMulNBits& m) {
  return few(m) ? 0 : static_cast<int64_t>(sizeof(Panel) / sizeof(float));
}

template <int kBits, bool kZeros>
INLINE void multiply(const MatMulNBits& m, const Part& part, float* memory) {
  few(m) ? multiply_few<kBits, kZeros>(m, part)
         : multiply_many<kBits, kZeros>(m, part, *reinterpret_cast<Panel*>(memory));
}

static void multiply(const MatMulNBits& m, const Part& part, float* memory) {
  if (m.bits == 4) return m.zero_points ? multiply<4, true>(m, part, memory) : multiply<4, false>(m, part, memory);
  m.zero_points ? multiply<8, true>(m, part, memory) : multiply<8, false>(m, part, memory);
}
