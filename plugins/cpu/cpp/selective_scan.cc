#include "selective_scan.h"

#include "division.h"

#define KERNEL "selective_scan_kernel.h"
#include "for_each_instruction_set.h"

namespace linexport {

constexpr int64_t kExponential = 8;  // multiplications that take the time of one

bool is_selective_scan(const Attention& a) {
  return a.d_v == 1 && a.has_decay && a.decay_scale && !a.has_beta && !a.normalize && a.map == Map::kIdentity &&
         a.query_heads == a.key_heads && !a.past_normalizer;
}

void selective_scan(const Context& call, const Attention& a, int threads) {
  const int64_t work = a.batch * a.heads * a.keys * a.d_k * kExponential;
  const Division division(DISPATCH(head_vectors(a)), 1, work, threads);
  division.run(call, [&](const Part& part) { DISPATCH(scan(a, part, memory(DISPATCH(scan_floats(a, part))))); });
}

}  // namespace linexport
