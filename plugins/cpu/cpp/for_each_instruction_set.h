// Include the file KERNEL once for each instruction set of this architecture, in a namespace each,
// within an unnamed one: kernels of different files may give their parts the same names.
//
//   #define KERNEL "attention_kernel.h"
//   #include "for_each_instruction_set.h"
//   ... DISPATCH(run(problem)) ...
//
// KERNEL sees Vector, kLanes and the rest of vector.h. It includes no header itself (they are included
// by its .cc file before this one): what is compiled in here runs only where the instructions exist.
// kRows and kColumns are the tokens and vectors of a tile, chosen by the number of vector registers.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "instruction_set.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace linexport::avx2 {
namespace {
constexpr int kLanes = 8, kRows = 3, kColumns = 2;
#include "vector.h"
#include KERNEL
}  // namespace
}  // namespace linexport::avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")
#endif
namespace linexport::avx512 {
namespace {
constexpr int kLanes = 16, kRows = 4, kColumns = 2;
#include "vector.h"
#include KERNEL
}  // namespace
}  // namespace linexport::avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace linexport::base {
namespace {
constexpr int kLanes = 4, kRows = 3, kColumns = 2;
#include "vector.h"
#include KERNEL
}  // namespace
}  // namespace linexport::base

#define DISPATCH(call)                                                         \
  (linexport::instruction_set() == linexport::InstructionSet::kAvx512          \
       ? linexport::avx512::call                                               \
       : linexport::instruction_set() == linexport::InstructionSet::kAvx2      \
             ? linexport::avx2::call                                           \
             : linexport::base::call)

#else  // of other architectures the compiler's default: NEON is part of every 64-bit ARM

namespace linexport::base {
namespace {
constexpr int kLanes = 4, kRows = 4, kColumns = 2;
#include "vector.h"
#include KERNEL
}  // namespace
}  // namespace linexport::base

#define DISPATCH(call) linexport::base::call

#endif
