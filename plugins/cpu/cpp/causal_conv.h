// One call of CausalConvWithState as its kernel sees it: sizes and tensors, channels before tokens.
#pragma once

#include <cstddef>
#include <cstdint>

namespace linexport {

struct Convolution {
  int64_t batch = 0, channels = 0, length = 0, size = 0;  // size: of the kernel
  bool silu = false;

  const float *input = nullptr, *weight = nullptr, *bias = nullptr, *past = nullptr;
  float *output = nullptr, *present = nullptr;

  int64_t rows() const { return batch * channels; }
};

}  // namespace linexport
