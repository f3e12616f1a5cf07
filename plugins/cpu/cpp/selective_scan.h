// Values of width one and decays in two factors: a form of LinearAttention with a kernel of its own.
#pragma once

#include "linear_attention.h"
#include "operator.h"

namespace linexport {

// Whether the call is of that form.
bool is_selective_scan(const Attention& a);
void selective_scan(const Context& call, const Attention& a, int threads);

}  // namespace linexport
