// One call of CausalConvWithState as its kernels see it: sizes and tensors, channels before tokens or behind them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "operator.h"

namespace linexport {

struct Convolution {
  int64_t batch = 0, channels = 0, length = 0, size = 0;  // size: of the kernel
  int64_t width = 0, first = 0;                           // channels that the input has, and the first one that is read
  bool silu = false;

  const float *input = nullptr, *weight = nullptr, *bias = nullptr, *past = nullptr;
  const float* factor = nullptr;  // of each token's output, such as a mask
  float *output = nullptr, *present = nullptr;

  int64_t rows() const { return batch * channels; }
  // The values of one channel of one sequence, of an input with channels before tokens, or of one token.
  const float* row(int64_t index) const { return input + (index / channels * width + first + index % channels) * length; }
};

// Whether the activation of a node is SiLU.
bool has_silu(const Attributes& attributes);
// The inputs of a call, checked against each other; outputs are missing still. Of the input's channels those from
// `first` on are read, all where it is negative.
Convolution read_convolution(const Context& call, const Tensor& input, int64_t width, int64_t length, int64_t first = -1);
// Input and output have channels before tokens.
void convolve_channels_first(const Context& call, const Convolution& c, int threads);

}  // namespace linexport
