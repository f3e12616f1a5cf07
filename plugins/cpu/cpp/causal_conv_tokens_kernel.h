// CausalConvWithState on tokens before channels: vectors are of neighbouring channels. Included per instruction set.

constexpr int64_t kBlock = 8 * kLanes;  // channels whose tokens stay in the first cache

// Some neighbouring channels of a batch entry, with their weights (size, count) and past tokens (size - 1, count).
struct Channels {
  const Convolution& c;
  int64_t batch, first, count;
  float *weights, *before;

  const float* token(int64_t t) const {
    return t < 0 ? before + (t + c.size - 1) * count : c.input + (batch * c.length + t) * c.channels + first;
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

  void convolve(int64_t t) const {
    float* y = c.output + (batch * c.length + t) * c.channels + first;
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t left = count - i;
      Vector sum = c.bias ? load_first(c.bias + first + i, left) : Vector{};
      for (int64_t j = 0; j < c.size; ++j)
        sum += load_first(weights + j * count + i, left) * load_first(token(t - c.size + 1 + j) + i, left);
      store_first(y + i, c.silu ? sum / (exponential(-sum) + 1.0f) : sum, left);
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
    for (int64_t t = 0; t < c.length; ++t) own.convolve(t);
    own.close();
  }
}
