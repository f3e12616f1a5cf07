// LinearAttention with values of width one and a decay of two factors (Mamba's selective scan).
//
//   S_n <- exp(g A_n) S_n + v k_n,   y = sum_n q_n S_n        per head, n = 1 ... d_k
//
// and z, where it is asked for, likewise with v = 1. Nothing is divided by it.
//
// Every element of a state is a recurrence of its own. Vectors are of neighbouring heads, which share
// query and key: g and v are loaded as they lie, A and S are transposed once, and nothing is summed across
// a vector. A few tokens are not worth the transposition: then vectors are of a head's elements. Included
// per instruction set.

constexpr int kFewTokens = 4;
constexpr int64_t kScanned = 16;  // tokens of a block: their keys stay in the first cache

// Vectors of heads: the first one of each, of those that share a key head.
struct HeadVectors {
  int64_t served, in_group;
  explicit HeadVectors(const Attention& a) : served(a.heads / a.key_heads), in_group(vectors(served)) {}
  int64_t count(const Attention& a) const { return a.batch * a.key_heads * in_group; }
};

struct Heads {
  int64_t batch, key_head, first, count;

  Heads(const Attention& a, int64_t index) {
    const HeadVectors all(a);
    const int64_t group = index / all.in_group, inside = index % all.in_group * kLanes;
    batch = group / a.key_heads, key_head = group % a.key_heads;
    first = key_head * all.served + inside;
    count = all.served - inside < kLanes ? all.served - inside : kLanes;
  }
};

static int64_t head_vectors(const Attention& a) { return HeadVectors(a).count(a); }

// Whether heads share nothing. Of the last state's z is nothing known then but that nobody asks for it.
static bool has_own_keys(const Attention& a) { return a.heads == a.key_heads && !a.present_normalizer; }

static int64_t scan_floats(const Attention& a, const Part& part) {
  const int64_t row = vectors(a.d_k) * kLanes;
  if (a.keys >= kFewTokens && has_own_keys(a)) return (part.last_stream - part.first_stream) * (2 * row + 1);
  return a.keys < kFewTokens ? 2 * row : 3 * (part.last_stream - part.first_stream) * a.d_k * kLanes;
}

// Rows of width floats as columns of vectors, and back.
static void transpose(const float* rows, int64_t count, int64_t width, float* columns) {
  for (int64_t i = 0; i < width; ++i)
    for (int64_t r = 0; r < kLanes; ++r) columns[i * kLanes + r] = r < count && rows ? rows[r * width + i] : 0.0f;
}

static void transpose_back(const float* columns, int64_t count, int64_t width, float* rows) {
  for (int64_t r = 0; r < count; ++r)
    for (int64_t i = 0; i < width; ++i) rows[r * width + i] = columns[i * kLanes + r];
}

// Whether no exponent of these tokens is so large that it has to be cut; a NaN makes no difference.
static bool are_moderate(const Attention& a, const Heads& at, int64_t start, int64_t end, const float* rates) {
  Vector steps = {}, rate = {};
  for (int64_t i = 0; i < a.d_k; ++i) rate = larger(larger(load(rates + i * kLanes), -load(rates + i * kLanes)), rate);
  for (int64_t t = start; t < end; ++t) {
    const Vector g = load_first(a.decay + (at.batch * a.keys + t) * a.heads + at.first, at.count);
    steps = larger(larger(g, -g), steps);
  }
  return largest(steps * rate) <= 87 * kRate;
}

// Tokens start ... end - 1 of a vector of heads, whose rates (times kRate), state and z are given by columns.
template <bool kNormalizer, bool kModerate>
static void scan_block(const Attention& a, const Heads& at, int64_t start, int64_t end, const float* rates, float* S,
                       float* z) {
  for (int64_t t = start; t < end; ++t) {
    const int64_t token = at.batch * a.keys + t, place = token * a.heads + at.first;
    // Tokens lie too far apart for the processor to foresee, and few fit the first cache: two ahead.
    __builtin_prefetch(a.decay + place + 2 * a.heads);
    __builtin_prefetch(a.value + place + 2 * a.heads);
    const bool masked = a.key_mask && !a.key_mask[token];
    const Vector g = masked ? Vector{} : load_first(a.decay + place, at.count);
    const Vector v = masked ? Vector{} : load_first(a.value + place, at.count);
    const float* key = a.key + (token * a.key_heads + at.key_head) * a.d_k;
    const float* query = a.query + (token * a.key_heads + at.key_head) * a.d_k;
    Vector y = {};
    for (int64_t i = 0; i < a.d_k; ++i) {
      const Vector rate = load(rates + i * kLanes);
      const Vector kept = kModerate ? exponential_of_product(g, rate) : exponential_of_decay(g * (rate * (1 / kRate)));
      const float k = masked ? 0.0f : key[i];
      const Vector s = kept * load(S + i * kLanes) + v * k;
      store(S + i * kLanes, s);
      if constexpr (kNormalizer) store(z + i * kLanes, kept * load(z + i * kLanes) + k);
      y += s * query[i];
    }
    store_first(a.output + place, y * a.scale, at.count);
  }
}

static void scan_many(const Attention& a, const Part& part, float* memory) {
  const int64_t size = a.d_k * kLanes;
  auto rates = [&](int64_t index) { return memory + 3 * (index - part.first_stream) * size; };
  auto state = [&](int64_t index) { return rates(index) + size; };
  auto normalizer = [&](int64_t index) { return state(index) + size; };
  for (int64_t index = part.first_stream; index < part.last_stream; ++index) {
    const Heads at(a, index);
    const int64_t place = (at.batch * a.heads + at.first) * a.d_k;
    transpose(a.decay_scale + at.first * a.d_k, at.count, a.d_k, rates(index));
    transpose(a.past_state ? a.past_state + place : nullptr, at.count, a.d_k, state(index));
    for (int64_t i = 0; i < size; i += kLanes) store(rates(index) + i, load(rates(index) + i) * kRate);
    transpose(nullptr, 0, a.d_k, normalizer(index));
  }
  const auto block = a.present_normalizer ? scan_block<true, false> : scan_block<false, false>;
  const auto moderate = a.present_normalizer ? scan_block<true, true> : scan_block<false, true>;
  for (int64_t start = 0; start < a.keys; start += kScanned)
    for (int64_t index = part.first_stream; index < part.last_stream; ++index) {
      const Heads at(a, index);
      const int64_t end = start + kScanned < a.keys ? start + kScanned : a.keys;
      (are_moderate(a, at, start, end, rates(index)) ? moderate : block)(a, at, start, end, rates(index), state(index),
                                                                         normalizer(index));
    }
  for (int64_t index = part.first_stream; index < part.last_stream; ++index) {
    const Heads at(a, index);
    const int64_t place = (at.batch * a.heads + at.first) * a.d_k;
    if (a.present_state) transpose_back(state(index), at.count, a.d_k, a.present_state + place);
    if (a.present_normalizer) transpose_back(normalizer(index), at.count, a.d_k, a.present_normalizer + place);
  }
}

// One head, its state a row in memory.
static void scan_head(const Attention& a, const Heads& at, int64_t head, float* S, float* z) {
  const int64_t place = (at.batch * a.heads + head) * a.d_k;
  if (a.past_state)
    std::memmove(S, a.past_state + place, a.d_k * sizeof(float));
  else
    std::memset(S, 0, a.d_k * sizeof(float));
  std::memset(z, 0, a.d_k * sizeof(float));
  for (int64_t t = 0; t < a.keys; ++t) {
    const int64_t token = at.batch * a.keys + t, shared = (token * a.key_heads + at.key_head) * a.d_k;
    const bool masked = a.key_mask && !a.key_mask[token];
    const float g = masked ? 0.0f : a.decay[token * a.heads + head], v = a.value[token * a.heads + head];
    Vector y = {};
    for (int64_t i = 0; i < a.d_k; i += kLanes) {
      const int64_t left = a.d_k - i;
      const Vector kept = exponential(load_first(a.decay_scale + head * a.d_k + i, left) * g);
      const Vector k = masked ? Vector{} : load_first(a.key + shared + i, left);
      store_first(S + i, kept * load_first(S + i, left) + k * v, left);
      store_first(z + i, kept * load_first(z + i, left) + k, left);
      // As it was stored: behind the end is what an infinite g makes of a rate of zero.
      y += load_first(S + i, left) * load_first(a.query + shared + i, left);
    }
    a.output[token * a.heads + head] = sum(y) * a.scale;
  }
}

static void scan_few(const Attention& a, const Part& part, float* memory) {
  for (int64_t index = part.first_stream; index < part.last_stream; ++index) {
    const Heads at(a, index);
    for (int64_t head = at.first; head < at.first + at.count; ++head) {
      const int64_t place = (at.batch * a.heads + head) * a.d_k;
      scan_head(a, at, head, a.present_state ? a.present_state + place : memory,
                a.present_normalizer ? a.present_normalizer + place : memory + vectors(a.d_k) * kLanes);
    }
  }
}

// Tokens start ... end - 1 of a head with a key of its own. Its decays are kept while g is what it was for the
// token before, as in every token of a state space whose rates are constant.
static void scan_own_block(const Attention& a, int64_t head, int64_t start, int64_t end, float* decays, float* S, float* last) {
  const int64_t whole = a.d_k / kLanes * kLanes, left = a.d_k - whole, stream = head % a.heads;
  const float* rates = a.decay_scale + stream * a.d_k;
  for (int64_t t = start; t < end; ++t) {
    const int64_t place = (head / a.heads * a.keys + t) * a.heads + stream;
    const bool masked = a.key_mask && !a.key_mask[place / a.heads];
    const float g = masked ? 0.0f : a.decay[place], v = masked ? 0.0f : a.value[place];
    const float *query = a.query + place * a.d_k, *key = a.key + place * a.d_k;
    if (!(g == *last)) {
      for (int64_t i = 0; i < a.d_k; i += kLanes)
        store_first(decays + i, exponential(load_first(rates + i, a.d_k - i) * g), a.d_k - i);
      *last = g;
    }
    Vector y = {};
    for (int64_t i = 0; i < whole; i += kLanes) {
      const Vector k = masked ? Vector{} : load(key + i);
      const Vector s = load(decays + i) * load(S + i) + k * v;
      store(S + i, s);
      y += s * load(query + i);
    }
    if (left) {
      const Vector k = masked ? Vector{} : load_first(key + whole, left);
      store_first(S + whole, load_first(decays + whole, left) * load_first(S + whole, left) + k * v, left);
      // As it was stored: behind the end is what an infinite value makes of a key of zero.
      y += load_first(S + whole, left) * load_first(query + whole, left);
    }
    a.output[place] = sum(y) * a.scale;
  }
}

static void scan_own(const Attention& a, const Part& part, float* memory) {
  const int64_t row = vectors(a.d_k) * kLanes, count = part.last_stream - part.first_stream;
  auto decays = [&](int64_t head) { return memory + 2 * (head - part.first_stream) * row; };
  auto state = [&](int64_t head) { return decays(head) + row; };
  auto last = [&](int64_t head) { return memory + 2 * count * row + head - part.first_stream; };
  for (int64_t head = part.first_stream; head < part.last_stream; ++head) {
    *last(head) = NAN;
    if (a.past_state)
      std::memcpy(state(head), a.past_state + head * a.d_k, a.d_k * sizeof(float));
    else
      std::memset(state(head), 0, a.d_k * sizeof(float));
  }
  for (int64_t start = 0; start < a.keys; start += kScanned)
    for (int64_t head = part.first_stream; head < part.last_stream; ++head)
      scan_own_block(a, head, start, start + kScanned < a.keys ? start + kScanned : a.keys, decays(head), state(head), last(head));
  for (int64_t head = part.first_stream; a.present_state && head < part.last_stream; ++head)
    std::memcpy(a.present_state + head * a.d_k, state(head), a.d_k * sizeof(float));
}

static void scan(const Attention& a, const Part& part, float* memory) {
  if (a.keys < kFewTokens) return scan_few(a, part, memory);
  has_own_keys(a) ? scan_own(a, part, memory) : scan_many(a, part, memory);
}
