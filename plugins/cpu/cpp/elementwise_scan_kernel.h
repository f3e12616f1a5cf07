// LinearAttention by the linear or the gated rule with keys and values of width one: for each head on its own
//
//   S <- exp(g) S + k v          and z likewise with v = 1
//   y  = q S                     divided by q z + eps
//
// Vectors are of neighbouring heads, whose numbers of one token lie side by side. Included per instruction set.

#include "head_rows.h"
#include "map_kernels.h"

static int64_t row_vectors(const Attention& a) { return vectors(a.heads); }

static int64_t memory_floats(const Attention&, const Part& part) { return 2 * row_floats(part); }

// Neighbouring vectors of a sequence, their states S and normalisers z.
struct Row {
  const Attention& a;
  int64_t batch, first, last;  // heads
  float *S, *z;

  int64_t left(int64_t h) const { return a.heads - h; }
  float* state(int64_t h) const { return S + h - first; }
  float* normalizer(int64_t h) const { return z + h - first; }
  bool sums_keys() const { return a.normalize || a.present_normalizer; }

  static void copy(const float* from, float* to, int64_t count) {
    from ? std::memmove(to, from, count * sizeof(float)) : std::memset(to, 0, count * sizeof(float));
  }

  void open() const {
    const int64_t place = batch * a.heads + first, heads = (last < a.heads ? last : a.heads) - first;
    for (int64_t h = first; h < last; h += kLanes) store(state(h), Vector{}), store(normalizer(h), Vector{});
    copy(a.past_state ? a.past_state + place : nullptr, S, heads);
    copy(a.past_normalizer ? a.past_normalizer + place : nullptr, z, heads);
  }

  void close() const {
    const int64_t place = batch * a.heads + first, heads = (last < a.heads ? last : a.heads) - first;
    if (a.present_state) copy(S, a.present_state + place, heads);
    if (a.present_normalizer) copy(z, a.present_normalizer + place, heads);
  }

  // Queries or keys of a token: one number for all heads, or one for each.
  template <Map kMap>
  Vector features(const float* x, int64_t heads, int64_t token, int64_t h) const {
    return mapped<kMap>(heads == 1 ? all(x[token]) : load_first(x + token * heads + h, left(h)));
  }

  template <Map kMap>
  void step(int64_t token) const {
    const bool masked = a.key_mask && !a.key_mask[token];
    for (int64_t h = first; h < last; h += kLanes) {
      const int64_t place = token * a.heads + h;
      Vector s = load(state(h)), sum = load(normalizer(h));
      if (!masked) {
        const Vector kept = a.has_decay ? exponential(load_first(a.decay + place, left(h))) : all(1.0f);
        const Vector k = features<kMap>(a.key, a.key_heads, token, h);
        store(state(h), s = kept * s + k * load_first(a.value + place, left(h)));
        if (sums_keys()) store(normalizer(h), sum = kept * sum + k);
      }
      const Vector q = features<kMap>(a.query, a.query_heads, token, h) * a.scale;
      const Vector y = a.normalize ? q * s / (q * sum + a.eps) : q * s;
      store_first(a.output + place, y, left(h));
    }
  }

  template <Map kMap>
  void scan() const {
    for (int64_t t = 0; t < a.keys; ++t) step<kMap>(batch * a.keys + t);
  }

  void scan() const {
    switch (a.map) {
      case Map::kElu1: return scan<Map::kElu1>();
      case Map::kExp: return scan<Map::kExp>();
      case Map::kRelu: return scan<Map::kRelu>();
      case Map::kSquaredRelu: return scan<Map::kSquaredRelu>();
      case Map::kSoftplus: return scan<Map::kSoftplus>();
      case Map::kIdentity: return scan<Map::kIdentity>();
    }
  }
};

static void run(const Attention& a, const Part& part, float* memory) {
  each_row(part, row_vectors(a), [&](int64_t batch, int64_t first, int64_t last) {
    const Row row = {a, batch, first, last, memory, memory + row_floats(part)};
    row.open();
    row.scan();
    row.close();
  });
}
