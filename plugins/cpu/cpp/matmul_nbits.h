// One call of MatMulNBits as its kernel sees it: y = x W^T + bias, W_ni = scale_nb (w_ni - zero_nb) for i in block b.
//
// Activations are rounded to int8 with a step for each token and block, and products within a block are sums of
// integers. Weights are read as ONNX Runtime's MatMulNBits stores them: nothing is packed when a session is opened.
#pragma once

#include <cstdint>

namespace linexport {

// Whether this machine runs the kernel.
bool multiplies_integers();

struct MatMulNBits {
  int bits = 4;                                // of a weight: 4 or 8
  int64_t tokens = 0, width = 0, outputs = 0;  // rows of x, its columns, and those of y
  int64_t block = 0, blocks = 0;               // weights that share a scale, and blocks of a row

  const float* x = nullptr;
  const uint8_t* weights = nullptr;      // (outputs, blocks, block * bits / 8)
  const float* scales = nullptr;         // (outputs, blocks)
  const uint8_t* zero_points = nullptr;  // (outputs, ceil(blocks * bits / 8)), or none: half of the range
  const float* bias = nullptr;           // (outputs), or none
  float* y = nullptr;

  // What the tokens are rounded to, in the order in which weights are read; see the kernel.
  int8_t* rounded = nullptr;
  float* steps = nullptr;
  int32_t* offsets = nullptr;
  float* sums = nullptr;

  int64_t row_bytes() const { return blocks * block * bits / 8; }
  int64_t zero_bytes() const { return (blocks * bits + 7) / 8; }
};

}  // namespace linexport
