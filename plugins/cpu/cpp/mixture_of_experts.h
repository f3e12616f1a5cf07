// One call of MixtureOfExperts as its kernel sees it: y_n = sum_j weight_nj down_e f(up_e x_n), e = index_nj.
#pragma once

#include <cstdint>

namespace linexport {

enum class ExpertActivation { kSilu, kSquaredRelu, kGelu };

struct Experts {
  int64_t tokens = 0, chosen = 0, experts = 0;  // pairs of token and expert: tokens * chosen
  int64_t width = 0, inner = 0, outputs = 0;    // of x, of what goes from up to down, and of y
  bool gated = true;
  ExpertActivation activation = ExpertActivation::kSilu;
  float gate_cap = 0, value_cap = 0;  // of gates and of their factors; 0: none
  int stored = 0;  // type of the weights of experts

  const float* x = nullptr;
  const void *up = nullptr, *down = nullptr;
  float* y = nullptr;

  // Pairs in the order of their experts: token and weight of each, and where those of an expert end.
  const int64_t *token = nullptr, *ends = nullptr;
  const float* weight = nullptr;
  float* hidden = nullptr;  // (pairs, inner)
};

}  // namespace linexport
