// float16 and bfloat16 from and to float32, by integers: the same on every machine. Included per instruction set.
//
// bfloat16 is the upper half of a float32. A float16 of exponent e has bias 15 where float32 has 127: its bits,
// moved up by 13, are the number times 2^-112, also where it is subnormal.

typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

constexpr int32_t kInfinity = 0x7f800000, kMagnitude = 0x7fffffff;

INLINE Vector floats(Integers bits) {
  Vector x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

INLINE Integers bits(Vector x) {
  Integers found;
  std::memcpy(&found, &x, sizeof x);
  return found;
}

template <int kType>
INLINE Vector widened(Integers half) {
  if constexpr (kType == kBFloat16) return floats(half << 16);
  const Integers magnitude = (half & 0x7fff) << 13, sign = (half & 0x8000) << 16;
  const Integers finite = bits(floats(magnitude) * 0x1p112f);
  return floats((magnitude >= 0x7c00 << 13 ? magnitude | kInfinity : finite) | sign);
}

// The nearest: half of the last place is added, and a little less to an even number.
INLINE Integers rounded(Integers magnitude, int places) {
  return (magnitude + (((magnitude >> places) & 1) + ((1 << (places - 1)) - 1))) >> places;
}

template <int kType>
INLINE Integers narrowed(Vector x) {
  const Integers magnitude = bits(x) & kMagnitude, sign = (bits(x) >> 16) & 0x8000;
  if constexpr (kType == kBFloat16) return (magnitude > kInfinity ? (magnitude >> 16) | 0x40 : rounded(magnitude, 16)) | sign;
  const Integers normal = rounded(magnitude - (112 << 23), 13);
  const Integers subnormal = bits(floats(magnitude) + 0.5f) - 0x3f000000;  // 0.5 has its last place at 2^-24
  const Integers finite = magnitude < 0x38800000 ? subnormal : normal;
  const Integers large = magnitude > kInfinity ? Integers{} + 0x7e00 : Integers{} + 0x7c00;
  return (magnitude >= 0x47800000 ? large : finite) | sign;
}

// A copy of constant size is an instruction, one of any other a call for every vector.
template <int kType>
static void widen(const uint16_t* from, float* to, int64_t count) {
  Halves half = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    std::memcpy(&half, from + i, sizeof half);
    store(to + i, widened<kType>(__builtin_convertvector(half, Integers)));
  }
  std::memcpy(&half, from + i, (count - i) * sizeof(uint16_t));
  store_first(to + i, widened<kType>(__builtin_convertvector(half, Integers)), count - i);
}

template <int kType>
static void narrow(const float* from, uint16_t* to, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Halves half = __builtin_convertvector(narrowed<kType>(load(from + i)), Halves);
    std::memcpy(to + i, &half, sizeof half);
  }
  const Halves half = __builtin_convertvector(narrowed<kType>(load_first(from + i, count - i)), Halves);
  std::memcpy(to + i, &half, (count - i) * sizeof(uint16_t));
}
