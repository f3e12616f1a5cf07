// LinearAttention whose map's kernel is a polynomial of q . k: a form with a kernel of its own.
#pragma once

#include <string>

#include "linear_attention.h"
#include "operator.h"

namespace linexport {

// kernel = sum_n about[n] (q . k + shift)^n, and its features.
struct Polynomial {
  static constexpr int kMostTerms = 16;
  int terms = 0;
  float shift = 0, about[kMostTerms] = {};
  // Of degree 2: features are a constant, all components and all pairs of them, ordered by i, then j >= i.
  bool pairs = false;
  // Otherwise: the components that each feature multiplies, (degree, features), width for the number 1, and the
  // square of its factor.
  const int64_t* components = nullptr;
  int64_t degree = 0;
  const float* squares = nullptr;
  const int64_t* multiplicities = nullptr;  // in their place
  int64_t width = 0, features = 0;

  bool has_first() const { return shift != 0 || about[0] != 0; }
  int64_t first() const { return !pairs ? features : has_first() ? 1 + width : 0; }
  float square(int64_t i) const { return squares ? squares[i] : static_cast<float>(multiplicities[i]); }
};

// Whether a map of that name is of this form.
bool is_polynomial(const std::string& map);

// The polynomial of a node for heads of that width, from the map's parameters, which are the inputs from
// `parameters` on.
Polynomial read_polynomial(const Context& call, const std::string& map, int64_t width, size_t parameters);
void polynomial_attention(const Context& call, const Attention& a, const Polynomial& map, int threads);

}  // namespace linexport
