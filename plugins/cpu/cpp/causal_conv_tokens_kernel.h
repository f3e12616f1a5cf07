// CausalConvWithState on tokens before channels: vectors are of neighbouring channels. Included per instruction set.

constexpr int64_t kBlock = 8 * kLanes;  // neighbouring channels that a thread has
constexpr int64_t kConvolved = 16;      // tokens of them that stay in the first cache

// Some neighbouring channels of a batch entry, with their weights (size, count) and past tokens (size - 1, count).
struct Channels {
  const Convolution& c;
  int64_t batch, first, count;
  float *weights, *before;

  const float* token(int64_t t) const {
    return t < 0 ? before + (t + c.size - 1) * count : c.input + (batch * c.length + t) * c.width + c.first + first;
  }
  // Where a state of these channels begins, of `size - 1` tokens each.
  int64_t state() const { return (batch * c.channels + first) * (c.size - 1); }

  void open() const {
    const int64_t past = c.size - 1;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = 0; j < c.size; ++j) weights[j * count + i] = c.weight[(first + i) * c.size + j];
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = 0; j < past; ++j) before[j * count + i] = c.past ? c.past[state() + i * past + j] : 0.0f;
  }

  void close() const {
    const int64_t past = c.size - 1;
    for (int64_t j = 0; c.present && j < past; ++j) {
      const float* last = token(c.length - past + j);
      for (int64_t i = 0; i < count; ++i) c.present[state() + i * past + j] = last[i];
    }
  }

  float* output(int64_t t) const { return c.output + (batch * c.length + t) * c.channels + first; }
  INLINE_MEMBER Vector bias(int64_t i) const { return c.bias ? load_first(c.bias + first + i, count - i) : Vector{}; }
  INLINE_MEMBER Vector result(Vector x, int64_t t) const {
    const float factor = c.factor ? c.factor[batch * c.length + t] : 1.0f;
    return (c.silu ? x / (exponential(-x) + 1.0f) : x) * factor;
  }

  // The vector of channels from i on, of tokens start ... end - 1.
  void convolve(int64_t i, int64_t start, int64_t end) const {
    const int64_t left = count - i;
    for (int64_t t = start; t < end; ++t) {
      Vector sum = bias(i);
      for (int64_t j = 0; j < c.size; ++j)
        sum += load_first(weights + j * count + i, left) * load_first(token(t - c.size + 1 + j) + i, left);
      store_first(output(t) + i, result(sum, t), left);
    }
  }

  // The same of a whole vector, whose weights and last tokens are in registers.
  template <int kSize>
  void convolve(int64_t i, int64_t start, int64_t end) const {
    Vector weight[kSize], seen[kSize];
    UNROLL for (int j = 0; j < kSize; ++j) weight[j] = load(weights + j * count + i);
    UNROLL for (int j = 1; j < kSize; ++j) seen[j] = load(token(start - kSize + j) + i);
    const Vector first_sum = bias(i);
    const float* x = token(start) + i;
    float* y = output(start) + i;
    for (int64_t t = start; t < end; ++t, x += c.width, y += c.channels) {
      UNROLL for (int j = 1; j < kSize; ++j) seen[j - 1] = seen[j];
      seen[kSize - 1] = load(x);
      Vector sum = first_sum;
      UNROLL for (int j = 0; j < kSize; ++j) sum += weight[j] * seen[j];
      store(y, result(sum, t));
    }
  }

  void convolve(int64_t start, int64_t end) const {
    for (int64_t i = 0; i < count; i += kLanes) switch (count - i < kLanes ? 0 : c.size) {
        case 2: convolve<2>(i, start, end); break;
        case 3: convolve<3>(i, start, end); break;
        case 4: convolve<4>(i, start, end); break;
        default: convolve(i, start, end);
      }
  }
};

static int64_t blocks(const Convolution& c) { return (c.channels + kBlock - 1) / kBlock; }
static int64_t memory_floats(const Convolution& c) { return 2 * c.size * kBlock; }

static void convolve(const Convolution& c, const Part& part, float* memory) {
  for (int64_t index = part.first_stream; index < part.last_stream; ++index) {
    const int64_t first = index % blocks(c) * kBlock, left = c.channels - first;
    const Channels own = {c, index / blocks(c), first, left < kBlock ? left : kBlock, memory, memory + c.size * kBlock};
    own.open();
    for (int64_t t = 0; t < c.length; t += kConvolved) own.convolve(t, std::min(t + kConvolved, c.length));
    own.close();
  }
}
