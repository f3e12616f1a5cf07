// One call of CausalConvWithState as its kernels see it: sizes and tensors, channels before tokens or behind them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "operator.h"

namespace linexport {

struct Convolution {
  int64_t batch = 0, channels = 0, length = 0, size = 0;  // size: of the kernel
  bool silu = false;

  const float *input = nullptr, *weight = nullptr, *bias = nullptr, *past = nullptr;
  float *output = nullptr, *present = nullptr;

  int64_t rows() const { return batch * channels; }
};

// Whether the activation of a node is SiLU.
bool has_silu(const Attributes& attributes);
// The inputs of a call, checked against each other; outputs are missing still.
Convolution read_convolution(const Context& call, const Tensor& input, int64_t channels, int64_t length);
// Input and output have channels before tokens.
void convolve_channels_first(const Context& call, const Convolution& c, int threads);

}  // namespace linexport
