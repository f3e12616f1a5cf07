// Tokens of a program, one after another: all that one token computes is in the first caches. Included per instruction
// set.

// The natural logarithm: of m 2^e with m in (0.7, 1.5) it is e ln 2 + 2 artanh(s), s = (m - 1) / (m + 1).
INLINE Vector logarithm(Vector x) {
  const Vector smallest = all(1.17549435e-38f), scaled = x < smallest ? x * 16777216.0f : x;
  Integers bits;
  std::memcpy(&bits, &scaled, sizeof x);
  const Integers exponent = (bits - 0x3f3504f3) >> 23;
  bits -= exponent << 23;
  Vector m;
  std::memcpy(&m, &bits, sizeof x);
  Vector e = __builtin_convertvector(exponent, Vector);
  e = x < smallest ? e - 24.0f : e;
  const Vector s = (m - 1.0f) / (m + 1.0f), t = s * s;
  Vector p = all(2.0f / 9);
  for (int n = 7; n >= 3; n -= 2) p = p * t + 2.0f / n;
  const Vector found = e * 0.693147181f + (p * t * s + 2.0f * s);
  const Vector ends = x == Vector{} ? all(-INFINITY) : x;  // infinity and NaN are their own logarithms
  const Vector of_positive = ((x > Vector{}) & (x < all(INFINITY))) ? found : ends;
  return x < Vector{} ? all(NAN) : of_positive;
}

INLINE Vector softplus(Vector x) {
  const Vector negative = x < Vector{} ? x : -x;
  return (Vector{} > x ? Vector{} : x) + log_one_plus(exponential(negative));
}

template <Code kCode>
INLINE Vector applied(Vector x, Vector y, Vector z) {
  if constexpr (kCode == Code::kNeg) return -x;
  if constexpr (kCode == Code::kExp) return exponential(x);
  if constexpr (kCode == Code::kLog) return logarithm(x);
  if constexpr (kCode == Code::kSigmoid) return 1.0f / (exponential(-x) + 1.0f);
  if constexpr (kCode == Code::kSoftplus) return softplus(x);
  if constexpr (kCode == Code::kSquare) return x * x;
  if constexpr (kCode == Code::kReciprocal) return 1.0f / x;
  if constexpr (kCode == Code::kRelu) return Vector{} > x ? Vector{} : x;
  if constexpr (kCode == Code::kAbs) return x < Vector{} ? -x : x;
  if constexpr (kCode == Code::kAdd) return x + y;
  if constexpr (kCode == Code::kSub) return x - y;
  if constexpr (kCode == Code::kMul) return x * y;
  if constexpr (kCode == Code::kDiv) return x / y;
  if constexpr (kCode == Code::kMax) return ((x < y) | (y != y)) ? y : x;  // a NaN of either is kept
  if constexpr (kCode == Code::kMin) return ((y < x) | (y != y)) ? y : x;
  if constexpr (kCode == Code::kGreater) return x > y ? all(1.0f) : Vector{};
  if constexpr (kCode == Code::kWhere) return x != Vector{} ? y : z;
  if constexpr (kCode == Code::kSqrt) UNROLL for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}

// Some numbers of a source: one behind the other, or the same one.
struct Source {
  const float* at;
  bool moves;

  INLINE_MEMBER Vector get(int64_t i) const { return moves ? load(at + i) : all(*at); }
  INLINE_MEMBER Vector get(int64_t i, int64_t left) const { return moves ? load_first(at + i, left) : all(*at); }
};

template <Code kCode>
static void apply(float* to, Source x, Source y, Source z, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, applied<kCode>(x.get(i), y.get(i), z.get(i)));
  if (i == count) return;
  const int64_t left = count - i;
  store_first(to + i, applied<kCode>(x.get(i, left), y.get(i, left), z.get(i, left)), left);
}

static float total(const float* x, int64_t count) {
  Vector sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes)
    UNROLL for (int j = 0; j < 4; ++j) sums[j] += load(x + i + j * kLanes);
  for (; i < count; i += kLanes) sums[0] += load_first(x + i, count - i);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

static void apply(Code code, float* to, const Source (&x)[kMostSources], int64_t count) {
  switch (code) {
#define CASE(name) \
  case Code::name: return apply<Code::name>(to, x[0], x[1], x[2], count);
    CASE(kCopy) CASE(kNeg) CASE(kExp) CASE(kLog) CASE(kSigmoid) CASE(kSoftplus) CASE(kSqrt) CASE(kSquare)
    CASE(kReciprocal) CASE(kRelu) CASE(kAbs) CASE(kAdd) CASE(kSub) CASE(kMul) CASE(kDiv) CASE(kMax) CASE(kMin)
    CASE(kGreater) CASE(kWhere)
#undef CASE
    case Code::kSum: *to = total(x[0].at, count); return;
    case Code::kMean: *to = total(x[0].at, count) / static_cast<float>(count); return;
  }
}

static void execute(const Instruction& one, float* const* memories) {
  const int32_t *n = one.sizes, *step = one.to.steps;
  constexpr int last = kAxes - 1;
  for (int32_t i = 0; i < n[0]; ++i)
    for (int32_t j = 0; j < n[1]; ++j)
      for (int32_t k = 0; k < n[2]; ++k) {
        float* to = memories[one.to.base] + one.to.offset + i * step[0] + j * step[1] + k * step[2];
        Source from[kMostSources];
        for (int s = 0; s < kMostSources; ++s) {
          const Operand& x = one.from[s < one.sources ? s : 0];
          from[s] = {memories[x.base] + x.offset + i * x.steps[0] + j * x.steps[1] + k * x.steps[2], x.steps[last] != 0};
        }
        apply(one.code, to, from, n[last]);
      }
}

static void run(const TokenRun& run, int64_t first, int64_t last, float* room) {
  const TokenProgram& program = run.program;
  float* at[2 * kMostTensors + 2];
  for (int64_t token = first; token < last; ++token) {
    for (size_t m = 0; m < program.room_at(); ++m) at[m] = run.starts[m] + token * program.memories[m].width;
    at[program.room_at()] = room;
    for (const Instruction& one : program.instructions) execute(one, at);
  }
}
