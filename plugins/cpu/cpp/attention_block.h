// A block of tokens prepared for the tiles of linear_attention_kernel.h: mapped queries and keys with their decays, and the
// products P and K of its header. Included per instruction set.

#include "attention_stream.h"
#include "map_kernels.h"

// What is prepared of a block, by places in floats of a thread's memory; its streams lie behind.
struct Layout : MemoryLayout {
  int64_t width, rows, heads;
  int64_t query, key, alpha, seen, from_start, store, decay, pairs, keys, reciprocal;

  explicit Layout(const Attention& a) {
    width = AttentionStream::width(a);
    rows = a.d_k;
    heads = a.group();
    const int64_t tokens = kTokens * width;
    query = take(kRows * width);
    key = take(tokens);
    alpha = take(a.has_decay ? tokens : 0);
    seen = take(tokens * heads);
    from_start = take(a.has_beta ? tokens : 0);
    store = take(tokens);
    decay = take(a.has_decay ? tokens : 0);
    pairs = take(kTokens * kRows * heads);
    keys = take(kTokens * kRows);
    reciprocal = take(kTokens * heads);
  }
};

// P, K, and tokens with their decays, of one query head: the sums over key channels of the header.
template <int R, bool kDecay, bool kDelta>
static void prepare(const Layout& at, float* memory, float* z, int64_t token, int64_t head, const Attention& a) {
  const int64_t width = at.width;
  const float *q = memory + at.query, *k = memory + at.key + token * width;
  const float* alpha = memory + at.alpha + token * width;
  float* seen = memory + at.seen + (head * kTokens + token) * width;
  float *from_start = memory + at.from_start + token * width, *stored = memory + at.store + token * width;
  float* decay = memory + at.decay + token * width;
  Vector pairs[R][R], keys[R][R], below[R];
  UNROLL for (int r = 0; r < R; ++r) {
    below[r] = Vector{};
    UNROLL for (int s = 0; s <= r; ++s) pairs[r][s] = keys[r][s] = Vector{};
  }
  for (int64_t i = 0; i < width; i += kLanes) {
    Vector query[R], past = all(1.0f), total = Vector{};
    const Vector before = load(z + i);
    UNROLL for (int r = 0; r < R; ++r) {
      query[r] = load(q + r * width + i);
      if constexpr (kDecay) past *= load(alpha + r * width + i);
      const Vector now = kDecay ? query[r] * past : query[r];
      store(seen + r * width + i, now);
      below[r] += now * before;
    }
    UNROLL for (int s = 0; s < R; ++s) {
      Vector x = load(k + s * width + i);
      pairs[s][s] += query[s] * x;
      UNROLL for (int r = s + 1; r < R; ++r) {
        if constexpr (kDecay) x *= load(alpha + r * width + i);
        pairs[r][s] += query[r] * x;
        if constexpr (kDelta) keys[r][s] += load(k + r * width + i) * x;
      }
      store(stored + s * width + i, x);
      total += x;
    }
    if constexpr (kDelta) {
      Vector so_far = all(1.0f);
      UNROLL for (int r = 0; r < R; ++r) {
        if constexpr (kDecay) so_far *= load(alpha + r * width + i);
        store(from_start + r * width + i, load(k + r * width + i) * so_far);
      }
    }
    if constexpr (kDecay) store(decay + i, past);
    if (head == at.heads - 1) store(z + i, past * before + total);
  }
  float* P = memory + at.pairs + (head * kTokens + token) * kRows;
  float* K = memory + at.keys + token * kRows;
  float* reciprocal = memory + at.reciprocal + head * kTokens + token;
  UNROLL for (int r = 0; r < R; ++r) {
    float denominator = a.normalize ? sum(below[r]) + a.eps : 1.0f;
    UNROLL for (int s = 0; s <= r; ++s) {
      P[r * kRows + s] = sum(pairs[r][s]);
      if (a.normalize) denominator += P[r * kRows + s];
      if constexpr (kDelta)
        if (s < r) K[r * kRows + s] = sum(keys[r][s]);
    }
    reciprocal[r] = 1.0f / denominator;
  }
}

// exp(decay) of one token by key channel; 1 for one that is masked.
static void decays(const Attention& a, int64_t b, int64_t t, int64_t h, float* alpha) {
  const int64_t token = b * a.keys + t;
  if (a.key_mask && !a.key_mask[token]) {
    for (int64_t i = 0; i < a.d_k; i += kLanes) store(alpha + i, all(1.0f));
    return;
  }
  if (!a.decay_per_channel) {
    const Vector one = exponential(all(a.decay[token * a.heads + h]));
    for (int64_t i = 0; i < a.d_k; i += kLanes) store(alpha + i, one);
    return;
  }
  const float* x = a.decay_scale ? a.decay_scale + h * a.d_k : a.decay + (token * a.heads + h) * a.d_k;
  const float factor = a.decay_scale ? a.decay[token * a.heads + h] : 1.0f;
  for (int64_t i = 0; i < a.d_k; i += kLanes)
    store(alpha + i, exponential(load_first(x + i, a.d_k - i) * factor));
}

// Keys and decays of a block of tokens.
static void load_keys(const Attention& a, const Layout& at, float* memory, int64_t b, int64_t h, int64_t start,
                      int64_t count) {
  const int64_t key_head = h / (a.heads / a.key_heads);
  for (int64_t t = 0; t < count; ++t) {
    const int64_t token = b * a.keys + start + t;
    float* k = memory + at.key + t * at.width;
    if (a.key_mask && !a.key_mask[token])
      std::memset(k, 0, at.width * sizeof(float));
    else
      map_head(a.map, a.key + (token * a.key_heads + key_head) * a.d_k, k, a.d_k, 1.0f);
    if (a.has_decay) decays(a, b, start + t, h, memory + at.alpha + t * at.width);
  }
}

static void load_queries(const Attention& a, const Layout& at, float* memory, int64_t b, int64_t query_head,
                         int64_t start, int64_t count) {
  for (int64_t t = 0; t < count; ++t)
    map_head(a.map, a.query + ((b * a.queries + start + t) * a.query_heads + query_head) * a.d_k,
             memory + at.query + t * at.width, a.d_k, a.scale);
}
