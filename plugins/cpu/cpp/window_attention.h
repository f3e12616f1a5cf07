// One call of WindowAttention as its kernel sees it: sizes, packed tensors, and which rows there are.
#pragma once

#include <cstdint>

namespace linexport {

constexpr float kNoKey = -1e30f;   // the maximum of no keys
constexpr int64_t kFewQueries = 16;  // rows of queries that take their scores with all keys at once

struct WindowAttention {
  int64_t batch = 0, length = 0, query_heads = 0, heads = 0, d_k = 0, d_v = 0, window = 0, sinks = 0;
  float scale = 1;
  const float *query = nullptr, *key = nullptr, *value = nullptr;  // (batch, length, heads, channels)
  const float *past_key = nullptr, *past_value = nullptr;          // (batch, window, heads, channels); none: no row is seen
  const float* seen = nullptr;                                     // (batch, window + length): 0, or -inf for rows of no token
  const float* const* sink_keys = nullptr;                         // (batch, sinks): rows of all heads
  const float* const* sink_values = nullptr;
  const float* since = nullptr;                                    // (batch, sinks): the first query that sees the sink
  float *output = nullptr, *maximum = nullptr, *total = nullptr;

  int64_t streams() const { return batch * heads; }
  int64_t group() const { return query_heads / heads; }
  int64_t rows() const { return length * group(); }
};

}  // namespace linexport
