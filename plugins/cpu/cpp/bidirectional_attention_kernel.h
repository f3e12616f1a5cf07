// LinearAttention with causal = 0: S = sum_s k_s v_s^T and z = sum_s k_s of all keys, then every query reads them. Included per
// instruction set, behind attention_block.h.

static void add_keys(const AttentionStream& stream, const Layout& at, float* memory, int64_t start, int64_t count) {
  const Attention& a = stream.a;
  const int64_t b = stream.batch(), h = stream.head();
  load_keys(a, at, memory, b, h, start, count);
  float* keys = memory + at.key;
  std::memset(keys + count * at.width, 0, (kTokens - count) * at.width * sizeof(float));
  for (int64_t i = 0; i < at.width; i += kLanes) {
    Vector total = {};  // of a block, so that a long sum is one of few numbers
    for (int64_t t = 0; t < count; ++t) total += load(keys + t * at.width + i);
    store(stream.z + i, load(stream.z + i) + total);
  }
  for (int64_t p = stream.part.first_panel; p < stream.part.last_panel; ++p)
    for (int64_t t = 0; t < count; t += kRows) {
      const float* value = a.value + ((b * a.keys + start + t) * a.heads + h) * a.d_v + p * kPanel;
      const int64_t left = count - t, stride = a.heads * a.d_v;
      Tile<kRows> u = nothing<kRows>();
      if (left >= kRows)
        u = load_tile<kRows>(value, stride, stream.state().columns(p));
      else
        for (int64_t r = 0; r < left; ++r) {
          const Tile<1> one = load_tile<1>(value + r * stride, stride, stream.state().columns(p));
          for (int j = 0; j < kColumns; ++j) u.at[r][j] = one.at[0][j];
        }
      write<kRows, false, false>(nullptr, keys + t * at.width, nullptr, at.width, at.rows, stream.state().panel(p), u);
    }
}

static void answer_queries(const AttentionStream& stream, const Layout& at, float* memory, int64_t start, int64_t count) {
  const Attention& a = stream.a;
  const int64_t b = stream.batch(), h = stream.head();
  const int64_t shared = a.query_heads < a.heads ? a.heads / a.query_heads : 1;
  float* query = memory + at.query;
  for (int64_t head = h * at.heads; head < (h + 1) * at.heads; ++head) {
    std::memset(query, 0, kRows * at.width * sizeof(float));
    load_queries(a, at, memory, b, head / shared, start, count);
    float factor[kRows];
    for (int64_t r = 0; r < kRows; ++r) {
      Vector below = {};
      for (int64_t i = 0; i < at.width; i += kLanes) below += load(query + r * at.width + i) * load(stream.z + i);
      factor[r] = a.normalize ? 1.0f / (sum(below) + a.eps) : 1.0f;
    }
    for (int64_t p = stream.part.first_panel; p < stream.part.last_panel; ++p) {
      const Tile<kRows> sums = read<kRows>(query, at.width, at.rows, stream.state().panel(p));
      for (int64_t r = 0; r < count; ++r)
        for (int64_t j = 0; j < kColumns && j * kLanes < stream.state().columns(p); ++j)
          store_first(a.output + ((b * a.queries + start + r) * a.output_heads() + head) * a.d_v + p * kPanel +
                          j * kLanes,
                      sums.at[r][j] * factor[r], stream.state().columns(p) - j * kLanes);
    }
  }
}

static void run_both_ways(const Attention& a, const Part& part, float* memory) {
  const Layout at(a);
  const AttentionStreams streams = {a, part, memory + at.floats, false};
  for (int64_t s = part.first_stream; s < part.last_stream; ++s) {
    const AttentionStream stream = streams[s];
    stream.open();
    for (int64_t start = 0; start < a.keys; start += kTokens)
      add_keys(stream, at, memory, start, a.keys - start < kTokens ? a.keys - start : kTokens);
    for (int64_t start = 0; start < a.queries; start += kRows)
      answer_queries(stream, at, memory, start, a.queries - start < kRows ? a.queries - start : kRows);
    stream.close();
  }
}
