// One token of causal LinearAttention, by any rule: a form with a kernel of its own.
#pragma once

#include "linear_attention.h"
#include "operator.h"

namespace linexport {

bool is_decode_step(const Attention& a);
void decode_step(const Context& call, const Attention& a, int threads);

}  // namespace linexport
