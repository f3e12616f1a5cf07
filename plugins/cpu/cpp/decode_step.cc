#include "decode_step.h"

#include "division.h"

#define KERNEL "decode_step_kernel.h"
#include "for_each_instruction_set.h"

namespace linexport {

bool is_decode_step(const Attention& a) { return a.causal && a.keys == 1; }

void decode_step(const Context& call, const Attention& attention, int threads) {
  Attention a = attention;
  const int64_t streams = a.streams();
  const Division division(streams, DISPATCH(panels(a)), streams * (2 + kMoved) * a.d_k * a.d_v, threads);
  a.past_normalizer = division.apart(a.past_normalizer, a.present_normalizer, streams * a.d_k);
  division.run(call, [&](const Part& part) { DISPATCH(run(a, part, memory(DISPATCH(memory_floats(a))))); });
}

}  // namespace linexport
