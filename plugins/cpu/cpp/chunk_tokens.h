// Tokens of a chunk in the inputs and the output of LinearAttention. Included per instruction set.

// Tokens of a stream: the first one's rows in the inputs and the output.
struct Tokens {
  const float *query, *key, *value;
  float* output;
  const bool* mask;
  const float* decay;
  int64_t count;

  Tokens(const Attention& a, const Turn& turn)
      : count(a.keys <= turn.start ? 0 : a.keys - turn.start < kChunk ? a.keys - turn.start : kChunk) {
    const int64_t h = turn.stream % a.heads, token = turn.stream / a.heads * a.keys + turn.start;
    query = a.query + (token * a.query_heads + h * a.query_heads / a.heads) * a.d_k;
    key = a.key + (token * a.key_heads + h / (a.heads / a.key_heads)) * a.d_k;
    value = a.value + (token * a.heads + h) * a.d_v;
    output = a.output + (token * a.output_heads() + h * a.group()) * a.d_v;
    mask = a.key_mask ? a.key_mask + token : nullptr;
    decay = a.has_decay ? a.decay + token * a.heads + h : nullptr;
  }
  bool masked(int64_t t) const { return t >= count || (mask && !mask[t]); }

  // Those from `start` on before `end`.
  Tokens some(const Attention& a, int64_t start, int64_t end) const {
    Tokens own = *this;
    own.query += start * a.query_heads * a.d_k, own.key += start * a.key_heads * a.d_k;
    own.value += start * a.heads * a.d_v, own.output += start * a.output_heads() * a.d_v;
    own.mask = mask ? mask + start : nullptr, own.decay = decay ? decay + start * a.heads : nullptr;
    own.count = end - start;
    return own;
  }
};

// Asks for what tokens read and write while others are computed: rows of a head lie too far apart for the
// processor to foresee.
struct Ahead {
  const Attention& a;
  const Tokens next;
  int64_t rows, row;  // rows that are asked for in a turn; tokens that are done

  Ahead(const Attention& a, const Tokens& next, int64_t turns)
      : a(a), next(next), rows((next.count + turns - 1) / turns), row(0) {}

  static INLINE_MEMBER void ask(const float* x, int64_t floats) {
    for (int64_t i = 0; i < floats; i += 16) __builtin_prefetch(x + i);
  }

  void advance() {
    for (int64_t end = row + rows < next.count ? row + rows : next.count; row < end; ++row) {
      ask(next.query + row * a.query_heads * a.d_k, (a.query_heads > a.heads ? a.group() : 1) * a.d_k);
      ask(next.key + row * a.key_heads * a.d_k, a.d_k);
      ask(next.value + row * a.heads * a.d_v, a.d_v);
      float* output = next.output + row * a.output_heads() * a.d_v;
      for (int64_t i = 0; i < a.group() * a.d_v; i += 16) __builtin_prefetch(output + i, 1);
    }
  }
};
