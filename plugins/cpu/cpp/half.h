// Numbers of 16 bits in memory, which kernels see as float32.
#pragma once

#include <cstdint>

namespace linexport {

// `type` is kFloat16 or kBFloat16. To 16 bits the nearest is taken, of two the even one.
void widen(int type, const uint16_t* from, float* to, int64_t count);
void narrow(int type, const float* from, uint16_t* to, int64_t count);

}  // namespace linexport
