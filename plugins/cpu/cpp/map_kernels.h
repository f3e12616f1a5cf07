// The elementwise maps of linexport.models.feature_maps on a vector. Included per instruction set.

INLINE Vector relu(Vector x) { return at_least(x, 0); }

template <Map kMap>
INLINE Vector mapped(Vector x) {
  if constexpr (kMap == Map::kElu1) return relu(x) + exponential_of_negative(at_most(x, 0));
  if constexpr (kMap == Map::kExp) return exponential(x);
  if constexpr (kMap == Map::kRelu) return relu(x);
  if constexpr (kMap == Map::kSquaredRelu) return relu(x) * relu(x);
  if constexpr (kMap == Map::kSoftplus) return relu(x) + log_one_plus(exponential_of_negative(x < Vector{} ? x : -x));
  return x;
}

// y = factor phi(x) for one head of width d; y is padded with zeros to whole vectors.
template <Map kMap>
static void map_head(const float* x, float* y, int64_t d, float factor) {
  int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes) store(y + i, mapped<kMap>(load(x + i)) * factor);
  if (i == d) return;
  store(y + i, Vector{});
  store_first(y + i, mapped<kMap>(load_first(x + i, d - i)) * factor, d - i);
}

static void map_head(Map map, const float* x, float* y, int64_t d, float factor) {
  switch (map) {
    case Map::kElu1: return map_head<Map::kElu1>(x, y, d, factor);
    case Map::kExp: return map_head<Map::kExp>(x, y, d, factor);
    case Map::kRelu: return map_head<Map::kRelu>(x, y, d, factor);
    case Map::kSquaredRelu: return map_head<Map::kSquaredRelu>(x, y, d, factor);
    case Map::kSoftplus: return map_head<Map::kSoftplus>(x, y, d, factor);
    case Map::kIdentity: return map_head<Map::kIdentity>(x, y, d, factor);
  }
}
