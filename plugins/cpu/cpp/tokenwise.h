// A program of elementwise operators, and of means and sums over the last axis, that every token runs by itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace linexport {

constexpr int kAxes = 4, kMostSources = 3;

enum class Code {
  kCopy, kNeg, kExp, kLog, kSigmoid, kSoftplus, kSqrt, kSquare, kReciprocal, kRelu, kAbs,  // of one number
  kAdd, kSub, kMul, kDiv, kMax, kMin, kGreater,                                             // of two
  kWhere,                                                                                   // of three
  kSum, kMean                                                                               // over the last axis
};

// A tensor's place: number `base` of the program's memories, first element, and steps along the axes.
struct Operand {
  int32_t base, offset, steps[kAxes];
};

struct Instruction {
  Code code;
  int32_t sizes[kAxes];
  int sources;
  Operand to, from[kMostSources];
};

// Memories of a token, in this order: inputs, outputs, constants, and room for what is computed meanwhile. An input
// that all tokens share, a weight, has the width 0 and some floats.
struct Memory {
  int64_t width, floats;
};

struct TokenProgram {
  std::vector<Memory> memories;
  std::vector<std::vector<int64_t>> outputs;  // axes behind those of batch and token
  size_t inputs = 0;
  std::vector<float> constants;
  std::vector<Instruction> instructions;

  // Throws Error where the text is no program, or one that leaves its memories.
  explicit TokenProgram(const std::string& text);
  size_t constants_at() const { return inputs + outputs.size(); }
  size_t room_at() const { return constants_at() + 1; }
  int64_t operations() const;  // of one token
};

// The memories of a call: where they begin.
struct TokenRun {
  const TokenProgram& program;
  float* const* starts;
};

}  // namespace linexport
