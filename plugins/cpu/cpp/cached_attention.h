// Softmax attention over a cache of keys and values, to which a call's tokens are added.
#pragma once

#include <cstdint>

namespace linexport {

constexpr int kFew = 16;  // rows of queries that take their scores with all keys at once

struct CachedAttention {
  int64_t batch = 0, queries = 0, past = 0, query_heads = 0, heads = 0, d_k = 0, d_v = 0;
  int64_t past_capacity = 0, capacity = 0;  // tokens that a head has memory for, in the past and the present cache
  float scale = 1;
  const float *query = nullptr, *key = nullptr, *value = nullptr;  // (batch, queries, heads, channels)
  const float *past_key = nullptr, *past_value = nullptr;          // (batch, heads, past_capacity, channels)
  const float* mask = nullptr;                                     // added to scores: (batch or 1, queries, keys())
  int64_t mask_of_batch = 0;                                       // floats between masks, 0 where there is one
  const float* seen = nullptr;                                     // where there is no mask: (batch, keys()), 0 or `low`
  float low = 0;                                                   // then added where a key is behind its query
  float *output = nullptr;
  float *present_key = nullptr, *present_value = nullptr;          // (batch, heads, capacity, channels); may be the past's

  int64_t keys() const { return past + queries; }
  int64_t streams() const { return batch * heads; }
  int64_t group() const { return query_heads / heads; }
  int64_t rows() const { return queries * group(); }
};

}  // namespace linexport
