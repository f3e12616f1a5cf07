// LinearAttention of one token, by the recurrence itself:
//
//   u = v                                      linear, gated
//   u = beta (v - (alpha o k)^T S)             delta rules
//   S <- alpha o S + k u^T                     and z likewise with u = 1
//   o = q^T S                                  divided by q . z + eps
//
// What takes time is S on its way through the processor: its rows are read and written as they lie in memory, kWide
// vectors of them at a time, which is a whole row of most heads. Included per instruction set.

#include "map_kernels.h"

constexpr int kWide = 8;
constexpr int64_t kWidest = kWide * kLanes;

// Floats of a thread's memory that a token of a stream is prepared in; vectors are padded with zeros.
struct Step {
  int64_t width, heads;
  float *queries, *key, *decay, *decayed_key, *normalizer, *reciprocals, *state;

  Step(const Attention& a, float* memory) : width(vectors(a.d_k) * kLanes), heads(a.group()) {
    queries = memory, key = queries + heads * width, decay = key + width, decayed_key = decay + width;
    normalizer = decayed_key + width, state = normalizer + width, reciprocals = state + a.d_k * a.d_v;
  }
  static int64_t floats(const Attention& a) {
    return (a.group() + 4) * vectors(a.d_k) * kLanes + a.d_k * a.d_v + a.group();
  }
};

// exp(decay) of a head by key channel.
static void load_decays(const Attention& a, int64_t b, int64_t h, float* decay) {
  if (!a.decay_per_channel) {
    const Vector one = exponential(all(a.decay[b * a.heads + h]));
    for (int64_t i = 0; i < a.d_k; i += kLanes) store(decay + i, one);
    return;
  }
  const float* x = a.decay_scale ? a.decay_scale + h * a.d_k : a.decay + (b * a.heads + h) * a.d_k;
  const float factor = a.decay_scale ? a.decay[b * a.heads + h] : 1.0f;
  for (int64_t i = 0; i < a.d_k; i += kLanes) store(decay + i, exponential(load_first(x + i, a.d_k - i) * factor));
}

// The token's key, decays and queries; a masked one leaves the state as it is.
static void prepare(const Attention& a, int64_t b, int64_t h, const Step& s) {
  const bool masked = a.key_mask && !a.key_mask[b];
  const int64_t key_head = h / (a.heads / a.key_heads);
  if (masked)
    std::memset(s.key, 0, s.width * sizeof(float));
  else
    map_head(a.map, a.key + (b * a.key_heads + key_head) * a.d_k, s.key, a.d_k, 1.0f);
  if (a.has_decay && !masked)
    load_decays(a, b, h, s.decay);
  else
    for (int64_t i = 0; i < s.width; i += kLanes) store(s.decay + i, all(1.0f));
  for (int64_t i = 0; i < s.width; i += kLanes) store(s.decayed_key + i, load(s.decay + i) * load(s.key + i));
  const int64_t shared = a.query_heads < a.heads ? a.heads / a.query_heads : 1;
  for (int64_t j = 0; j < s.heads; ++j) {
    const int64_t query_head = (h * s.heads + j) / shared;
    map_head(a.map, a.query + (b * a.query_heads + query_head) * a.d_k, s.queries + j * s.width, a.d_k, a.scale);
  }
}

// The next z, and the reciprocals of what outputs are divided by.
static void normalize(const Attention& a, int64_t stream, bool writes, const Step& s) {
  const float* past = a.past_normalizer ? a.past_normalizer + stream * a.d_k : nullptr;
  for (int64_t i = 0; i < a.d_k; i += kLanes) {
    const Vector z = past ? load_first(past + i, a.d_k - i) : Vector{};
    store(s.normalizer + i, load(s.decay + i) * z + load(s.key + i));
  }
  if (a.present_normalizer && writes)
    std::memcpy(a.present_normalizer + stream * a.d_k, s.normalizer, a.d_k * sizeof(float));
  for (int64_t j = 0; j < s.heads; ++j) {
    Vector total = {};
    for (int64_t i = 0; a.normalize && i < s.width; i += kLanes)
      total += load(s.queries + j * s.width + i) * load(s.normalizer + i);
    s.reciprocals[j] = a.normalize ? 1.0f / (sum(total) + a.eps) : 1.0f;
  }
}

// Some columns of a stream: J vectors, or where kCut is set the first `columns` floats of one.
struct Columns {
  const float *value, *from;
  float *output, *to;
  int64_t columns, rows, stride;
  float beta;
};

template <bool kCut>
INLINE Vector load_some(const float* p, int64_t count) {
  return kCut ? load_first(p, count) : load(p);
}

template <bool kCut>
INLINE void store_some(float* p, Vector v, int64_t count) {
  kCut ? store_first(p, v, count) : store(p, v);
}

// The sums over rows of x_i and row i.
template <int J, bool kCut>
INLINE void read_rows(Vector (&sums)[J], const float* x, const float* S, const Columns& c) {
  UNROLL for (int j = 0; j < J; ++j) sums[j] = Vector{};
  for (int64_t i = 0; i < c.rows; ++i, S += c.stride) {
    const float factor = x[i];
    UNROLL for (int j = 0; j < J; ++j) sums[j] += factor * load_some<kCut>(S + j * kLanes, c.columns);
  }
}

template <int J, bool kCut>
INLINE void put_output(const Vector (&sums)[J], const Columns& c, int64_t head, float reciprocal) {
  float* output = c.output + head * c.stride;
  UNROLL for (int j = 0; j < J; ++j) store_some<kCut>(output + j * kLanes, sums[j] * reciprocal, c.columns);
}

template <int J, bool kCut, bool kDecay, bool kDelta>
static void update(const Step& s, const Columns& c) {
  Vector u[J], sums[J];
  UNROLL for (int j = 0; j < J; ++j) u[j] = load_some<kCut>(c.value + j * kLanes, c.columns);
  if constexpr (kDelta) {
    read_rows<J, kCut>(sums, s.decayed_key, c.from, c);
    UNROLL for (int j = 0; j < J; ++j) u[j] = c.beta * (u[j] - sums[j]);
  }
  UNROLL for (int j = 0; j < J; ++j) sums[j] = Vector{};
  const float* from = c.from;
  float* to = c.to;
  for (int64_t i = 0; i < c.rows; ++i, from += c.stride, to += c.stride) {
    const float key = s.key[i], query = s.queries[i], decay = s.decay[i];
    UNROLL for (int j = 0; j < J; ++j) {
      Vector x = load_some<kCut>(from + j * kLanes, c.columns);
      if constexpr (kDecay) x *= decay;
      x += key * u[j];
      store_some<kCut>(to + j * kLanes, x, c.columns);
      sums[j] += query * x;
    }
  }
  put_output<J, kCut>(sums, c, 0, s.reciprocals[0]);
  for (int64_t h = 1; h < s.heads; ++h) {
    read_rows<J, kCut>(sums, s.queries + h * s.width, c.to, c);
    put_output<J, kCut>(sums, c, h, s.reciprocals[h]);
  }
}

template <bool kDecay, bool kDelta>
static void update(const Step& s, Columns c, int64_t columns) {
  for (int64_t done; columns > 0; columns -= done) {
    c.columns = columns;
    if (columns >= 8 * kLanes)
      update<8, false, kDecay, kDelta>(s, c), done = 8 * kLanes;
    else if (columns >= 4 * kLanes)
      update<4, false, kDecay, kDelta>(s, c), done = 4 * kLanes;
    else if (columns >= kLanes)
      update<1, false, kDecay, kDelta>(s, c), done = kLanes;
    else
      update<1, true, kDecay, kDelta>(s, c), done = columns;
    c.value += done, c.from += done, c.output += done, c.to += done;
  }
}

static void run_stream(const Attention& a, const Part& part, int64_t stream, const Step& s) {
  const int64_t b = stream / a.heads, h = stream % a.heads, size = a.d_k * a.d_v;
  const int64_t first = part.first_panel * kWidest;
  const int64_t last = part.last_panel * kWidest < a.d_v ? part.last_panel * kWidest : a.d_v;
  prepare(a, b, h, s);
  normalize(a, stream, part.first_panel == 0, s);
  float* to = a.present_state ? a.present_state + stream * size : s.state;
  const float* from = a.past_state ? a.past_state + stream * size : to;
  if (!a.past_state)
    for (int64_t i = 0; i < a.d_k; ++i) std::memset(to + i * a.d_v + first, 0, (last - first) * sizeof(float));
  const float beta = a.has_beta ? a.beta[a.beta_per_head ? stream : b] : 1.0f;
  const Columns c = {a.value + stream * a.d_v + first,
                     from + first,
                     a.output + stream * s.heads * a.d_v + first,
                     to + first,
                     0,
                     a.d_k,
                     a.d_v,
                     beta};
  if (a.has_beta)
    a.has_decay ? update<true, true>(s, c, last - first) : update<false, true>(s, c, last - first);
  else
    a.has_decay ? update<true, false>(s, c, last - first) : update<false, false>(s, c, last - first);
}

static void run(const Attention& a, const Part& part, float* memory) {
  const Step s(a, memory);
  for (int64_t stream = part.first_stream; stream < part.last_stream; ++stream) run_stream(a, part, stream, s);
}

static int64_t memory_floats(const Attention& a) { return Step::floats(a); }
static int64_t panels(const Attention& a) { return (a.d_v + kWidest - 1) / kWidest; }
