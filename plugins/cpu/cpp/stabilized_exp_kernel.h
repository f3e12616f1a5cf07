// StabilizedExp, a token of one head at a time. For key exponents a, query exponents b and decays g, of
// every feature on its own,
//
//   m'             = max(m + g, a)              the running maximum
//   key features   = exp(a - m')
//   decay          = g + m - m'
//   query features = exp(b + m' - max_j (b_j + m'_j))
//
// causal = 0: m' is the maximum of all keys, for every token. A part of the tokens begins with the maximum
// of those before it, which costs a tenth of their exponentials. Included per instruction set.

#include "head_rows.h"

constexpr int64_t kSegmentTokens = 64;  // the unit that a sequence is divided in
constexpr int64_t kTurn = 16;           // tokens of a stream's turn
constexpr int64_t kAhead = 4;           // tokens that are asked for ahead

static int64_t segments(const Exponents& x) { return (x.length + kSegmentTokens - 1) / kSegmentTokens; }

// A stream's keys and decays by token, and its running maximum, padded to whole vectors.
struct RunningMaximum {
  const Exponents& x;
  int64_t batch, head;
  float* m;

  int64_t place(int64_t t) const { return ((batch * x.length + t) * x.heads + head) * x.features; }
  bool masked(int64_t t) const { return x.key_mask && !x.key_mask[batch * x.length + t]; }
  Vector key(int64_t t, int64_t i, int64_t left) const {
    return masked(t) ? all(kLowest) : load_first(x.key + place(t) + i, left);
  }
  Vector decay(int64_t t, int64_t i, int64_t left) const {
    if (!x.decay || masked(t)) return Vector{};
    if (x.decay_per_feature) return load_first(x.decay + place(t) + i, left);
    return all(x.decay[(batch * x.length + t) * x.heads + head]);
  }

  void open() const {
    for (int64_t i = 0; i < x.features; i += kLanes) {
      const int64_t left = x.features - i;
      const float* past = x.past_max + (batch * x.heads + head) * x.features;
      store(m + i, x.past_max ? load_first(past + i, left) : all(kLowest));
    }
  }

  void pass(int64_t start, int64_t end) const {
    for (int64_t t = start; t < end; ++t)
      for (int64_t i = 0; i < x.features; i += kLanes) {
        const int64_t left = x.features - i;
        store(m + i, larger(load(m + i) + decay(t, i, left), key(t, i, left)));
      }
  }

  // The features of a token's key; where a sequence is causal the maximum goes on by it.
  void write_key(int64_t t) const {
    for (int64_t i = 0; i < x.features; i += kLanes) {
      const int64_t left = x.features - i;
      const Vector a = key(t, i, left), g = decay(t, i, left), before = load(m + i);
      const Vector after = x.causal ? larger(before + g, a) : before;
      store(m + i, after);
      store_first(x.key_features + place(t) + i, exponential(a - after), left);
      if (x.present_decay) store_first(x.present_decay + place(t) + i, x.causal ? g + before - after : Vector{}, left);
    }
  }

  void write_query(int64_t t, int64_t output_head, float* exponents) const {
    const int64_t token = batch * x.length + t, shared = x.output_heads() / x.query_heads;
    const float* query = x.query + (token * x.query_heads + output_head / shared) * x.features;
    float* features = x.query_features + (token * x.output_heads() + output_head) * x.features;
    Vector top = all(-INFINITY);
    for (int64_t i = 0; i < x.features; i += kLanes) {
      const Vector e = load_first(query + i, x.features - i, -INFINITY) + load(m + i);
      store(exponents + i, e);
      top = larger(top, e);
    }
    const Vector most = all(largest(top));
    for (int64_t i = 0; i < x.features; i += kLanes)
      store_first(features + i, exponential(load(exponents + i) - most), x.features - i);
  }

  // Ask for a token that is read soon: those of a head lie too far apart for the processor to foresee.
  void prefetch(int64_t t) const {
    const int64_t token = batch * x.length + t, count = x.group() * x.features * x.query_heads / x.output_heads();
    const float* query = x.query + (token * x.query_heads + head * x.query_heads / x.heads) * x.features;
    for (int64_t i = 0; i < x.features; i += 16) __builtin_prefetch(x.key + place(t) + i);
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(query + i);
  }

  void close() const {
    if (x.present_max)
      std::memcpy(x.present_max + (batch * x.heads + head) * x.features, m, x.features * sizeof(float));
  }
};

// The same for heads of few features, a power of two that divides kLanes: vectors are of neighbouring heads, whose
// exponents of one token lie side by side.
struct NarrowHeads {
  const Exponents& x;
  int64_t batch, first, last;  // features of all heads
  float* m;

  int64_t width() const { return x.heads * x.features; }
  int64_t left(int64_t i) const { return width() - i; }
  float* maximum(int64_t i) const { return m + i - first; }
  bool masked(int64_t token) const { return x.key_mask && !x.key_mask[token]; }

  void open() const {
    for (int64_t i = first; i < last; i += kLanes)
      store(maximum(i), x.past_max ? load_first(x.past_max + batch * width() + i, left(i)) : all(kLowest));
    for (int64_t t = 0; t < x.length && !x.causal; ++t)
      for (int64_t i = first; i < last; i += kLanes) store(maximum(i), larger(load(maximum(i)), key(batch * x.length + t, i)));
  }

  Vector key(int64_t token, int64_t i) const {
    return masked(token) ? all(kLowest) : load_first(x.key + token * width() + i, left(i));
  }

  void step(int64_t token) const {
    for (int64_t i = first; i < last; i += kLanes) {
      const int64_t place = token * width() + i;
      const Vector a = key(token, i), before = load(maximum(i));
      const Vector g = x.decay && !masked(token) ? load_first(x.decay + place, left(i)) : Vector{};
      const Vector after = x.causal ? larger(before + g, a) : before;
      store(maximum(i), after);
      store_first(x.key_features + place, exponential(a - after), left(i));
      if (x.present_decay) store_first(x.present_decay + place, x.causal ? g + before - after : Vector{}, left(i));
      const Vector exponents = load_first(x.query + place, left(i)) + after;
      store_first(x.query_features + place, exponential(exponents - largest_of_each(exponents, x.features)), left(i));
    }
  }

  void close() const {
    for (int64_t i = first; i < last && x.present_max; i += kLanes)
      store_first(x.present_max + batch * width() + i, load(maximum(i)), left(i));
  }
};

static bool is_narrow(const Exponents& x) {
  return x.features < kLanes && (x.features & (x.features - 1)) == 0 && x.query_heads == x.heads &&
         (!x.decay || x.decay_per_feature || x.features == 1);
}

static int64_t row_vectors(const Exponents& x) { return vectors(x.heads * x.features); }

// All tokens of a part, whose streams are vectors of heads.
static void run_narrow(const Exponents& x, const Part& part, float* memory) {
  each_row(part, row_vectors(x), [&](int64_t batch, int64_t first, int64_t last) {
    const NarrowHeads row = {x, batch, first, last, memory};
    row.open();
    for (int64_t t = 0; t < x.length; ++t) row.step(batch * x.length + t);
    row.close();
  });
}

// The maximum of each stream of a part, and a token's exponents.
static int64_t exponents_floats(const Exponents& x, const Part& part) {
  return (part.last_stream - part.first_stream + 1) * vectors(x.features) * kLanes;
}

// The tokens of a part, whose panels are segments of the sequence. Streams take turns: one token's heads are
// neighbours in memory.
static void run(const Exponents& x, const Part& part, float* memory) {
  const int64_t start = part.first_panel * kSegmentTokens, last = part.last_panel * kSegmentTokens;
  const int64_t end = last < x.length ? last : x.length, width = vectors(x.features) * kLanes;
  const auto running = [&](int64_t s) {
    return RunningMaximum{x, s / x.heads, s % x.heads, memory + (s - part.first_stream + 1) * width};
  };
  for (int64_t s = part.first_stream; s < part.last_stream; ++s) {
    running(s).open();
    running(s).pass(0, x.causal ? start : x.length);
  }
  for (int64_t first = start; first < end; first += kTurn)
    for (int64_t s = part.first_stream; s < part.last_stream; ++s) {
      const RunningMaximum of = running(s);
      for (int64_t t = first; t < end && t < first + kTurn; ++t) {
        if (t + kAhead < end) of.prefetch(t + kAhead);
        of.write_key(t);
        for (int64_t j = 0; j < x.group(); ++j) of.write_query(t, of.head * x.group() + j, memory);
      }
    }
  for (int64_t s = part.first_stream; s < part.last_stream && end == x.length; ++s) running(s).close();
}
