// CausalConvWithState, a row (one channel of one sequence) at a time.
//
//   y_t = f(bias + sum_j w_j x_(t - (k-1) + j))   j = 0 ... k-1,   x_t of the past for t < 0
//   f   = identity, or silu(y) = y / (1 + exp(-y)), of all rows of a part at once: with one token a row is
//         one value.
//
// Vectors are of tokens. Included per instruction set.

// The last values of a past and of what follows it; past and present may be the same memory.
static void keep_last(const Convolution& c, const float* past, const float* x, float* present) {
  const int64_t before = c.size - 1, kept = c.length < before ? before - c.length : 0;
  for (int64_t i = 0; i < kept; ++i) present[i] = past ? past[c.length + i] : 0.0f;
  for (int64_t i = kept; i < before; ++i) present[i] = x[c.length - before + i];
}

static void convolve_row(const Convolution& c, int64_t row) {
  const int64_t channel = row % c.channels, before = c.size - 1;
  const float *x = c.row(row), *weight = c.weight + channel * c.size;
  const float* past = c.past ? c.past + row * before : nullptr;
  float* y = c.output + row * c.length;
  const float bias = c.bias ? c.bias[channel] : 0.0f;
  for (int64_t t = 0; t < c.length && t < before; ++t) {
    float sum = bias;
    for (int64_t j = 0; past && j < before - t; ++j) sum += weight[j] * past[t + j];
    for (int64_t j = before - t; j < c.size; ++j) sum += weight[j] * x[t + j - before];
    y[t] = sum;
  }
  for (int64_t t = before; t < c.length; t += kLanes) {
    Vector sum = all(bias);
    for (int64_t j = 0; j < c.size; ++j) sum += weight[j] * load_first(x + t - before + j, c.length - t);
    store_first(y + t, sum, c.length - t);
  }
  if (c.present) keep_last(c, past, x, c.present + row * before);
}

// One token of kSize - 1 before it: past, weight and present are so short that they are read value by value, and a
// past is read whole before the present, which may be the same memory, is written.
template <int kSize>
static void convolve_token(const Convolution& c, int64_t row) {
  constexpr int kBefore = kSize - 1;
  const int64_t channel = row % c.channels;
  const float* weight = c.weight + channel * kSize;
  float seen[kSize] = {};
  if (c.past) UNROLL for (int j = 0; j < kBefore; ++j) seen[j] = c.past[row * kBefore + j];
  seen[kBefore] = *c.row(row);
  float sum = c.bias ? c.bias[channel] : 0.0f;
  UNROLL for (int j = 0; j < kSize; ++j) sum += weight[j] * seen[j];
  c.output[row] = sum;
  if (c.present) UNROLL for (int j = 0; j < kBefore; ++j) c.present[row * kBefore + j] = seen[j + 1];
}

template <int kSize>
static void convolve_tokens(const Convolution& c, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) convolve_token<kSize>(c, row);
}

static void convolve_rows(const Convolution& c, int64_t first, int64_t last) {
  switch (c.length == 1 ? c.size : 0) {
    case 2: return convolve_tokens<2>(c, first, last);
    case 3: return convolve_tokens<3>(c, first, last);
    case 4: return convolve_tokens<4>(c, first, last);
    default:
      for (int64_t row = first; row < last; ++row) convolve_row(c, row);
  }
}

static void convolve(const Convolution& c, const Part& part) {
  convolve_rows(c, part.first_stream, part.last_stream);
  float* y = c.output + part.first_stream * c.length;
  const int64_t count = (part.last_stream - part.first_stream) * c.length;
  for (int64_t i = 0; c.silu && i < count; i += kLanes) {
    const Vector x = load_first(y + i, count - i);
    store_first(y + i, x / (exponential(-x) + 1.0f), count - i);
  }
}
