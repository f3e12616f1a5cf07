// One call of GeneralizedDeltaRule as its kernel sees it: sizes and packed tensors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace linexport {

struct DeltaRule {
  int64_t batch = 0, length = 0, heads = 0, d_k = 0, d_v = 0;
  float scale = 1;

  const float *query = nullptr, *key = nullptr, *value = nullptr, *decay = nullptr, *a = nullptr, *b = nullptr;
  const float* past_state = nullptr;
  const bool* key_mask = nullptr;
  float *output = nullptr, *present_state = nullptr;

  int64_t streams() const { return batch * heads; }
};

}  // namespace linexport
