// Causal LinearAttention by the linear rule, or the gated one with a decay per head: a form with a kernel of its own.
#pragma once

#include "linear_attention.h"
#include "operator.h"

namespace linexport {

constexpr int64_t kChunk = 16;  // tokens whose products with each other are computed

// Tokens first ... last - 1 of a stream.
struct Segment {
  int64_t first, last;
};

// Whether the call is of that form, and long enough to gain by it.
bool is_chunked(const Attention& a);
void chunked_attention(const Context& call, const Attention& a, int threads);

}  // namespace linexport
