#include "elementwise_scan.h"

#include "division.h"

#define KERNEL "elementwise_scan_kernel.h"
#include "for_each_instruction_set.h"

namespace linexport {

constexpr int64_t kExponential = 8;  // multiplications that take the time of one

bool is_elementwise_scan(const Attention& a) {
  const auto fits = [&](int64_t heads) { return heads == 1 || heads == a.heads; };
  return a.causal && a.d_k == 1 && a.d_v == 1 && !a.has_beta && !a.decay_scale && fits(a.query_heads) &&
         fits(a.key_heads);
}

void elementwise_scan(const Context& call, const Attention& attention, int threads) {
  Attention a = attention;
  const int64_t rows = DISPATCH(row_vectors(a));
  const Division division(a.batch * rows, 1, a.batch * a.heads * a.keys * kExponential, threads);
  division.run(call, [&](const Part& part) { DISPATCH(run(a, part, memory(DISPATCH(memory_floats(a, part))))); });
}

}  // namespace linexport
