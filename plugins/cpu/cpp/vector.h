// Vectors of kLanes floats, by the vector extensions of GCC and Clang. Included per instruction set.

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef float Unaligned __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

INLINE Vector load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
INLINE void store(float* p, Vector v) { *reinterpret_cast<Unaligned*>(p) = v; }
INLINE Vector all(float x) { return x - Vector{}; }
INLINE int64_t vectors(int64_t count) { return (count + kLanes - 1) / kLanes; }

// The first count floats (at most kLanes), others set behind them; nothing behind them is read.
INLINE Vector load_first(const float* p, int64_t count, float others = 0) {
  if (count >= kLanes) return load(p);
  float part[kLanes];
  *reinterpret_cast<Unaligned*>(part) = all(others);
  std::memcpy(part, p, count * sizeof(float));
  return load(part);
}

INLINE void store_first(float* p, Vector v, int64_t count) {
  if (count >= kLanes) return store(p, v);
  float part[kLanes];
  store(part, v);
  std::memcpy(p, part, count * sizeof(float));
}

INLINE float sum(Vector v) {
  float total = 0;
  UNROLL for (int width = kLanes / 2; width > 0; width /= 2) UNROLL for (int i = 0; i < width; ++i) v[i] += v[i + width];
  total = v[0];
  return total;
}

INLINE Vector larger(Vector x, Vector y) { return x > y ? x : y; }
INLINE Vector smaller(Vector x, Vector y) { return x < y ? x : y; }

INLINE float largest(Vector v) {
  float found = v[0];
  UNROLL for (int i = 1; i < kLanes; ++i) found = v[i] > found ? v[i] : found;
  return found;
}

template <int... I>
INLINE Integers numbers(std::integer_sequence<int, I...>) {
  return Integers{I...};
}

// 0, 1, ... kLanes - 1.
INLINE Integers lane() { return numbers(std::make_integer_sequence<int, kLanes>()); }

// Lanes of a and b such that exchange(1), (2), (4) ... of all pairs transpose: with S = 1 and four lanes
// a0 b0 a2 b2, and with kHigh a1 b1 a3 b3.
template <int S, bool kHigh, int... I>
INLINE Vector exchange(Vector a, Vector b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, ((I & S) ? kLanes + I - (kHigh ? 0 : S) : I + (kHigh ? S : 0))...);
#else
  return __builtin_shuffle(a, b, Integers{((I & S) ? kLanes + I - (kHigh ? 0 : S) : I + (kHigh ? S : 0))...});
#endif
}

template <int S>
INLINE void exchange(Vector (&x)[kLanes]) {
  const std::make_integer_sequence<int, kLanes> lanes;
  if constexpr (S < kLanes) UNROLL for (int i = 0; i < kLanes; ++i) {
      if (i & S) continue;
      const Vector a = x[i], b = x[i + S];
      x[i] = exchange<S, false>(a, b, lanes), x[i + S] = exchange<S, true>(a, b, lanes);
    }
}

INLINE void transpose(Vector (&x)[kLanes]) { exchange<1>(x), exchange<2>(x), exchange<4>(x), exchange<8>(x); }

// In every lane the largest of its group of `count` neighbours, a power of two up to kLanes.
template <int S = 1>
INLINE Vector largest_of_each(Vector x, int64_t count) {
  const std::make_integer_sequence<int, kLanes> lanes;
  if constexpr (S < kLanes)
    if (S < count) return largest_of_each<2 * S>(larger(exchange<S, false>(x, x, lanes), exchange<S, true>(x, x, lanes)), count);
  return x;
}

// The sums of kLanes vectors, each in its lane.
INLINE Vector sums(Vector (&x)[kLanes]) {
  transpose(x);
  UNROLL for (int count = kLanes / 2; count > 0; count /= 2) UNROLL for (int i = 0; i < count; ++i) x[i] += x[i + count];
  return x[0];
}

// The value, as no constant: GCC makes one instruction of a comparison and a choice between two registers only.
INLINE Vector in_register(Vector v) {
#if defined(__x86_64__)
  asm("" : "+x"(v));
#endif
  return v;
}

// A NaN is kept: comparisons with it are false, and the second operand is x.
INLINE Vector at_least(Vector x, float low) { return larger(in_register(all(low)), x); }
INLINE Vector at_most(Vector x, float high) { return smaller(in_register(all(high)), x); }

// exp(x) = 2^n e^r, n = round(x / ln 2), |r| <= ln 2 / 2; within 2 units in the last place, for
// -87.3 <= x <= 88.7. n is read from the mantissa of a sum with 3 * 2^22.
INLINE Vector exponential_within_range(Vector x) {
  const Vector shift = all(12582912.0f), shifted = x * 1.44269504f + shift, n = shifted - shift;
  const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector p = all(1.98756915e-4f);
  p = p * r + 1.39819995e-3f;
  p = p * r + 8.33345190e-3f;
  p = p * r + 4.16657959e-2f;
  p = p * r + 1.66666655e-1f;
  p = p * r + 0.5f;
  p = (p * r) * r + r + 1.0f;
  Integers bits, power;
  std::memcpy(&bits, &p, sizeof p);
  std::memcpy(&power, &shifted, sizeof p);
  bits += power << 23;
  std::memcpy(&p, &bits, sizeof p);
  return p;
}

// 0 below -87.3 and infinity above 88.7.
INLINE Vector exponential(Vector x) {
  const Vector p = x < all(-87.3f) ? Vector{} : exponential_within_range(at_most(at_least(x, -87.3f), 88.7228f));
  return x > all(88.7228f) ? all(INFINITY) : p;
}

// The same for x <= 0 by 2^(n / kLanes) e^r, n = round(x kLanes / ln 2): |r| is so small that a cubic polynomial is
// enough, and 2^(k / kLanes) for k < kLanes is a table in a register. ln 2 is 2.7e-9 from a float, and n ln 2 is not
// rounded before it is subtracted: r needs no second part of ln 2. Within 4e-7 of the value.
#if defined(__clang__)  // which has no builtin that takes elements by numbers of another vector
constexpr float kRate = 1;
INLINE Vector exponential_by_table(Vector x) { return exponential_within_range(x); }
INLINE Vector exponential_of_product(Vector x, Vector y) { return exponential_within_range(x * y); }
#else
template <int... I>
INLINE Vector roots(std::integer_sequence<int, I...>) {
  return Vector{__builtin_exp2f(static_cast<float>(I) / kLanes)...};
}

// x y + z, rounded once: without -O2 GCC makes no such instruction of a product and a sum. Those of few lanes have none.
template <class V>
INLINE V fused(V x, V y, V z) {
#if defined(__x86_64__)
  if constexpr (kLanes == 16) return _mm512_fmadd_ps(x, y, z);
  if constexpr (kLanes == 8) return _mm256_fmadd_ps(x, y, z);
#endif
  return x * y + z;
}

constexpr float kQuadratic = 0.5f + 0.693147181f * 0.693147181f / (96 * kLanes * kLanes);  // of r^2, for |r| <= ln 2 / (2 kLanes)

// 2^(n / kLanes), from the mantissa of n + 3 * 2^22.
INLINE Vector power_by_table(Vector shifted) {
  constexpr int kShift = kLanes == 16 ? 19 : kLanes == 8 ? 20 : 21;
  Vector root = roots(std::make_integer_sequence<int, kLanes>());
  Integers table, power;
  std::memcpy(&table, &root, sizeof root);
  std::memcpy(&power, &shifted, sizeof root);
  table = __builtin_shuffle(table - (lane() << kShift), power) + (power << kShift);
  std::memcpy(&root, &table, sizeof root);
  return root;
}

INLINE Vector exponential_by_table(Vector x) {
  const Vector shift = all(12582912.0f), shifted = x * (1.44269504f * kLanes) + shift, n = shifted - shift;
  const Vector r = fused(n, all(-0.693147182f / kLanes), x);
  Vector p = r * (1.0f / 6) + kQuadratic;
  p = (p * r) * r + r;
  const Vector root = power_by_table(shifted);
  return root * p + root;
}

// e^(x y / kRate) for |x y| <= 87 kRate, y being rounded as a product with kRate: then n and r need no product of their
// own, and the product of x and y is not rounded.
constexpr float kRate = kLanes >= 8 ? kLanes / 0.693147181f : 1;

INLINE Vector exponential_of_product(Vector x, Vector y) {
  if constexpr (kLanes < 8) return exponential_within_range(x * y);
  constexpr float kOne = 1 / kRate;
  const Vector shift = all(12582912.0f), shifted = fused(x, y, shift), n = shifted - shift, r = fused(x, y, -n);
  const Vector p = (r * (kOne * kOne * kOne / 6) + kOne * kOne * kQuadratic) * r + kOne;
  const Vector root = power_by_table(shifted);
  return (root * r) * p + root;
}
#endif

// For x <= 0; 1.2e-38 below -87.3.
INLINE Vector exponential_of_negative(Vector x) {
  const Vector clamped = at_least(x, -87.3f);
  return kLanes >= 8 ? exponential_by_table(clamped) : exponential_within_range(clamped);
}

// Between 1.2e-38 below -87.3 and 3.0e38 above 88.6: of decays, which multiply a state that is a number. From 88.68 on
// the power of eight lanes' table would be infinite.
INLINE Vector exponential_of_decay(Vector x) { return exponential_of_negative(at_most(x, 88.6f)); }

// log(1 + u) for 0 <= u <= 1: 2 artanh(s) with s = u / (2 + u) <= 1/3, as a series.
INLINE Vector log_one_plus(Vector u) {
  const Vector s = u / (u + 2.0f), t = s * s;
  Vector p = all(2.0f / 15);
  for (int n = 13; n >= 3; n -= 2) p = p * t + 2.0f / n;
  return p * t * s + 2.0f * s;
}
