// Tokenwise: a program that every token runs by itself, in the place of the nodes that the function has.
#include "tokenwise.h"

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>

#include "division.h"

#define KERNEL "tokenwise_kernel.h"
#include "for_each_instruction_set.h"

namespace linexport {
namespace {

constexpr int64_t kMostFloats = 1 << 22, kMostInstructions = 4096;  // of a token

const char* const kNames[] = {"Copy", "Neg", "Exp", "Log", "Sigmoid", "Softplus", "Sqrt", "Square", "Reciprocal", "Relu", "Abs",
                              "Add",  "Sub", "Mul", "Div", "Max",     "Min",      "Greater", "Where", "Sum", "Mean"};

void expect(bool holds, const char* what) {
  if (!holds) throw Error(std::string("Tokenwise: ") + what);
}

int sources_of(Code code) { return code == Code::kWhere ? 3 : code >= Code::kAdd && code < Code::kWhere ? 2 : 1; }
bool reduces(Code code) { return code == Code::kSum || code == Code::kMean; }

// Words of the text: whole numbers between bounds, the bits of floats as such numbers, and names.
class Reader {
 public:
  explicit Reader(const std::string& text) : at_(text.c_str()) {}
  int64_t whole(int64_t least, int64_t most) {
    char* end = nullptr;
    const int64_t value = std::strtoll(at_, &end, 10);
    expect(end != at_ && (!*end || *end == ' ') && value >= least && value <= most, "the program is damaged");
    at_ = end;
    return value;
  }
  float number() {
    const uint32_t bits = static_cast<uint32_t>(whole(0, UINT32_MAX));
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  Code code() {
    at_ += std::strspn(at_, " ");
    const std::string word(at_, std::strcspn(at_, " "));
    at_ += word.size();
    for (size_t i = 0; i < std::size(kNames); ++i)
      if (word == kNames[i]) return static_cast<Code>(i);
    throw Error("Tokenwise: unknown instruction " + word);
  }

 private:
  const char* at_;
};

Operand read_operand(Reader& words, const TokenProgram& program, const Instruction& one, bool writes) {
  Operand x;
  const int64_t first = writes ? program.inputs : 0;
  x.base = words.whole(first, program.memories.size() - 1);
  expect(!writes || x.base != static_cast<int64_t>(program.constants_at()), "the program writes to a constant");
  x.offset = words.whole(0, kMostFloats);
  int64_t end = x.offset;
  for (int i = 0; i < kAxes; ++i) {
    x.steps[i] = words.whole(0, i == kAxes - 1 ? 1 : kMostFloats);
    end += (one.sizes[i] - 1) * static_cast<int64_t>(x.steps[i]);
  }
  const Memory& memory = program.memories[x.base];
  expect(end < memory.floats, "the program leaves its memory");
  const int64_t step = reduces(one.code) != writes;
  expect(x.steps[kAxes - 1] == step || (!writes && !reduces(one.code)), "the program writes to one place twice");
  return x;
}

Instruction read_instruction(Reader& words, const TokenProgram& program) {
  Instruction one;
  one.code = words.code();
  one.sources = sources_of(one.code);
  int64_t steps = 1;
  for (int32_t& size : one.sizes) {
    size = words.whole(1, kMostFloats);
    expect((steps *= size) <= kMostFloats, "an instruction has too many steps");
  }
  one.to = read_operand(words, program, one, true);
  for (int i = 0; i < one.sources; ++i) one.from[i] = read_operand(words, program, one, false);
  return one;
}

}  // namespace

TokenProgram::TokenProgram(const std::string& text) {
  Reader words(text);
  inputs = words.whole(1, kMostTensors);
  for (size_t i = 0; i < inputs; ++i) {
    const int64_t width = words.whole(0, kMostFloats);
    memories.push_back({width, width ? width : words.whole(1, kMostFloats)});
  }
  outputs.resize(words.whole(1, kMostTensors));
  for (auto& dims : outputs) {
    dims.resize(words.whole(1, Tensor::kMaxRank - 2));
    int64_t width = 1;
    for (int64_t& dim : dims) {
      dim = words.whole(1, kMostFloats);
      expect((width *= dim) <= kMostFloats, "an output is too wide");
    }
    memories.push_back({width, width});
  }
  constants.resize(words.whole(0, kMostFloats));
  for (float& value : constants) value = words.number();
  memories.push_back({0, static_cast<int64_t>(constants.size())});
  memories.push_back({0, words.whole(0, kMostFloats)});
  const int64_t count = words.whole(1, kMostInstructions);
  for (int64_t i = 0; i < count; ++i) instructions.push_back(read_instruction(words, *this));
}

int64_t TokenProgram::operations() const {
  int64_t count = 0;
  for (const Instruction& one : instructions) {
    int64_t own = 1;
    for (int64_t size : one.sizes) own *= size;
    count += own;
  }
  return count;
}

namespace {

// The program of this text: layers that are alike share it, so that one finds in the caches what the last one ran.
std::shared_ptr<const TokenProgram> shared_program(const std::string& text) {
  static std::mutex lock;
  static std::map<std::string, std::weak_ptr<const TokenProgram>> known;
  std::lock_guard<std::mutex> hold(lock);
  std::shared_ptr<const TokenProgram> program = known[text].lock();
  if (!program) known[text] = program = std::make_shared<const TokenProgram>(text);
  return program;
}

class Tokenwise : public Kernel {
 public:
  explicit Tokenwise(const Attributes& attributes)
      : shared_(shared_program(attributes.text("program", ""))), program_(*shared_), threads_(attributes.threads) {}

  void compute(Context& call) const override {
    int64_t batch = -1, length = 0;
    float* starts[2 * kMostTensors + 1];
    size_t place = 0;
    for (; place < program_.inputs; ++place) {
      const Tensor x = call.input(place);
      const Memory& memory = program_.memories[place];
      expect(!!x, "an input is missing");
      if (memory.width == 0) {
        expect(x.count() == memory.floats, "a weight has a wrong size");
      } else {
        expect(x.rank > 2, "an input has no axes of batch and token");
        if (batch < 0) batch = x.dims[0], length = x.dims[1];
        expect(x.dims[0] == batch && x.dims[1] == length && x.count() == batch * length * memory.width,
               "inputs differ in batch, length or width");
      }
      starts[place] = static_cast<float*>(x.data);
    }
    expect(batch >= 0, "no input has tokens");
    for (size_t i = 0; i < program_.outputs.size(); ++i) starts[place++] = output(call, i, batch, length);
    starts[place] = const_cast<float*>(program_.constants.data());
    share(call, starts, batch * length);
  }

 private:
  static constexpr int64_t kOperation = 4;  // multiplications that take the time of one

  float* output(Context& call, size_t place, int64_t batch, int64_t length) const {
    const auto& behind = program_.outputs[place];
    int64_t dims[Tensor::kMaxRank] = {batch, length};
    std::copy(behind.begin(), behind.end(), dims + 2);
    const Tensor y = call.output(place, dims, 2 + behind.size());
    expect(!!y, "an output is missing");
    return y.out<float>();
  }

  void share(const Context& call, float* const* starts, int64_t tokens) const {
    const TokenRun whole = {program_, starts};
    const Division division(tokens, 1, tokens * program_.operations() * kOperation, threads_);
    const auto run_part = [&](const Part& part) {
      float* room = memory(program_.memories.back().floats);
      DISPATCH(run(whole, part.first_stream, part.last_stream, room));
    };
    division.run(call, run_part, Subnormals::kKept);
  }

  const std::shared_ptr<const TokenProgram> shared_;
  const TokenProgram& program_;
  const int threads_;
};

std::vector<Argument> arguments(const char* name) { return std::vector<Argument>(kMostTensors, {name, kFloat, true}); }

const Registered registered({"Tokenwise", arguments("x"), arguments("y"), make<Tokenwise>, kFusedDomain});

}  // namespace
}  // namespace linexport
