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
// processor to foresee. First for the beginning of every row, so that addresses of pages are found in time; of so
// many at once the processor may drop some. Then for a row at a time.
struct Ahead {
  struct Rows {
    const float* first;
    int64_t stride, floats;
  };
  static constexpr int64_t kWritten = 3;
  Rows rows[4];  // of keys, values, queries and outputs
  int64_t tokens, kinds, done = 0, each;  // the first so many of them; rows that were asked for, and those of a turn

  // With `outputs` or for the state alone.
  Ahead(const Attention& a, const Tokens& x, int64_t turns, bool outputs = true)
      : rows{{x.key, a.key_heads * a.d_k, a.d_k},
             {x.value, a.heads * a.d_v, a.d_v},
             {x.query, a.query_heads * a.d_k, (a.query_heads > a.heads ? a.group() : 1) * a.d_k},
             {x.output, a.output_heads() * a.d_v, a.group() * a.d_v}},
        tokens(x.count),
        kinds(outputs ? 4 : 2),
        each((kinds * x.count + turns - 1) / turns) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < kinds && i < kWritten; ++i) __builtin_prefetch(rows[i].first + t * rows[i].stride);
      if (outputs) __builtin_prefetch(rows[kWritten].first + t * rows[kWritten].stride, 1);
    }
  }

  template <int kWrite>
  static void ask(const Rows& rows, int64_t t) {
    const float* row = rows.first + t * rows.stride;
    for (int64_t i = 0; i < rows.floats; i += 16) __builtin_prefetch(row + i, kWrite);
    __builtin_prefetch(row + rows.floats - 1, kWrite);  // of another line where rows are not aligned
  }

  void advance() {
    for (const int64_t end = done + each; done < end && done < kinds * tokens; ++done) {
      if (kinds == 2)
        ask<0>(rows[done % 2], done / 2);
      else if (done % 4 < kWritten)
        ask<0>(rows[done % 4], done / 4);
      else
        ask<1>(rows[kWritten], done / 4);
    }
  }
};
