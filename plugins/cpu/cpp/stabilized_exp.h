// One call of StabilizedExp as its kernel sees it: sizes and packed tensors.
#pragma once

#include <cstddef>
#include <cstdint>

#include "operator.h"

namespace linexport {

constexpr float kLowest = -1e30f;  // the maximum of no keys

struct Exponents {
  int64_t batch = 0, length = 0, query_heads = 0, heads = 0, features = 0;
  bool causal = true, decay_per_feature = false;

  const float *query = nullptr, *key = nullptr, *past_max = nullptr, *decay = nullptr;
  const bool* key_mask = nullptr;
  float *query_features = nullptr, *key_features = nullptr, *present_decay = nullptr, *present_max = nullptr;

  int64_t output_heads() const { return query_heads > heads ? query_heads : heads; }
  int64_t group() const { return output_heads() / heads; }  // heads of the output for one maximum
  int64_t streams() const { return batch * heads; }         // maxima, each of a sequence of its own
};

void stabilize(const Context& call, const Exponents& exponents, int threads);

}  // namespace linexport
