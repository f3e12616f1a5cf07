#include "chunked_attention.h"

#include "division.h"

#define KERNEL "chunked_attention_kernel.h"
#include "for_each_instruction_set.h"

namespace linexport {

bool is_chunked(const Attention& a) {
  return a.causal && !a.has_beta && !a.decay_per_channel && a.keys >= kChunk;
}

void chunked_attention(const Context& call, const Attention& attention, int threads) {
  Attention a = attention;
  const int64_t streams = a.streams();
  const Division division(streams, DISPATCH(panels(a)), streams * 2 * a.keys * a.d_k * a.d_v, threads, kTurns);
  a.past_normalizer = division.apart(a.past_normalizer, a.present_normalizer, streams * a.d_k);
  division.run(call, [&](const Part& part) { DISPATCH(run(a, part, memory(DISPATCH(memory_floats(a, part))))); });
}

}  // namespace linexport
