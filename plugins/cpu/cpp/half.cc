#include "half.h"

#include "onnxruntime_api.h"

#define KERNEL "half_kernel.h"
#include "for_each_instruction_set.h"

namespace linexport {

void widen(int type, const uint16_t* from, float* to, int64_t count) {
  type == kFloat16 ? DISPATCH(widen<kFloat16>(from, to, count)) : DISPATCH(widen<kBFloat16>(from, to, count));
}

void narrow(int type, const float* from, uint16_t* to, int64_t count) {
  type == kFloat16 ? DISPATCH(narrow<kFloat16>(from, to, count)) : DISPATCH(narrow<kBFloat16>(from, to, count));
}

}  // namespace linexport
