// The instruction sets that kernels are compiled for, and the best one of this machine.
#pragma once

namespace linexport {

enum class InstructionSet { kBase, kAvx2, kAvx512 };

// The best of this machine, or a lesser one named by LINEXPORT_INSTRUCTION_SET (base, avx2, avx512).
InstructionSet instruction_set();
const char* instruction_set_name();

}  // namespace linexport
