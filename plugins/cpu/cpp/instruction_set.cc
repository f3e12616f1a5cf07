#include "instruction_set.h"

#include <cstdlib>
#include <cstring>

namespace linexport {
namespace {

constexpr const char* kNames[] = {"base", "avx2", "avx512"};

int best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl"))
    return 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}

int chosen() {
  int found = best();
  const char* wish = std::getenv("LINEXPORT_INSTRUCTION_SET");
  for (int i = 0; wish && i < found; ++i)
    if (!std::strcmp(wish, kNames[i])) return i;
  return found;
}

}  // namespace

InstructionSet instruction_set() {
  static const InstructionSet found = static_cast<InstructionSet>(chosen());
  return found;
}

const char* instruction_set_name() { return kNames[static_cast<int>(instruction_set())]; }

}  // namespace linexport
