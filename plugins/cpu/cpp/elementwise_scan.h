// Keys and values of width one: a form of LinearAttention with a kernel of its own.
#pragma once

#include "linear_attention.h"
#include "operator.h"

namespace linexport {

// Whether the call is of that form, each head with a query and a key of its own, or all with one.
bool is_elementwise_scan(const Attention& a);
void elementwise_scan(const Context& call, const Attention& a, int threads);

}  // namespace linexport
