// One call of LinearAttention as its kernels see it: sizes, flags and packed tensors.
#pragma once

#include <cstddef>
#include <cstdint>

#include "feature_map.h"

namespace linexport {

struct Attention {
  int64_t batch = 0, queries = 0, keys = 0;           // keys differ from queries in cross attention only
  int64_t query_heads = 0, key_heads = 0, heads = 0;  // heads: of values and states
  int64_t d_k = 0, d_v = 0;
  bool has_decay = false, decay_per_channel = false, has_beta = false, beta_per_head = true;
  bool causal = true, normalize = false;
  float scale = 1, eps = 0;
  Map map = Map::kIdentity;

  const float *query = nullptr, *key = nullptr, *value = nullptr;
  const float *past_state = nullptr, *past_normalizer = nullptr;
  const float *decay = nullptr, *beta = nullptr, *decay_scale = nullptr;
  const bool* key_mask = nullptr;
  float *output = nullptr, *present_state = nullptr, *present_normalizer = nullptr;

  int64_t output_heads() const { return query_heads > heads ? query_heads : heads; }
  int64_t group() const { return output_heads() / heads; }  // heads of the output for one state
  int64_t streams() const { return batch * heads; }         // states, each a sequence of its own
};

}  // namespace linexport
