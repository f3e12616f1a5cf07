// Normalised causal attention with exponential features of projected queries and keys: what FeatureMap of both, StabilizedExp
// and LinearAttention compute.
#pragma once

#include <string>

#include "linear_attention.h"
#include "operator.h"

namespace linexport {

// Exponents of x, with y = factor x:  y . w_j - norm |y|^2 / 2 - constant  for j < columns; with `opposites` those of -w_j
// behind them; with `floored` one more, the number `floor`.
struct ExponentialMap {
  int64_t width = 0, columns = 0;
  bool opposites = false, floored = false;
  float factor = 1, norm = 1, constant = 0, floor = 0;
  const float* weights = nullptr;  // (width, columns)

  int64_t features() const { return columns * (opposites ? 2 : 1) + (floored ? 1 : 0); }
};

struct ExponentialAttention {
  Attention given, mapped;  // d_k is the width of a head as it is given, and the number of features
  ExponentialMap map;
  const float* past_max = nullptr;
  float* present_max = nullptr;
};

}  // namespace linexport
