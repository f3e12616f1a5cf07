// Chain: nodes of the library that lead to each other, as one node. ONNX Runtime takes microseconds for each node, which
// for one token is more than most of them compute.
#include <cstdlib>
#include <cstring>

#include "division.h"

namespace linexport {
namespace {

constexpr int kMostPlaces = 64;
constexpr int64_t kMostKept = 1 << 24;  // floats that a thread keeps for a value between steps; more are given back

void expect(bool holds, const char* what) {
  if (!holds) throw Error(std::string("Chain: ") + what);
}

// Words of the text. Not by a stream, whose locale is not there where the C++ library is linked into this one.
class Words {
 public:
  explicit Words(const std::string& text) : at_(text.c_str()) {}
  int whole(long least, long most) {
    char* end = nullptr;
    const long value = std::strtol(at_, &end, 10);
    expect(end != at_ && (!*end || *end == ' ') && value >= least && value <= most, "the steps are damaged");
    at_ = end;
    return static_cast<int>(value);
  }
  std::string name() {
    at_ += std::strspn(at_, " ");
    const std::string word(at_, std::strcspn(at_, " "));
    at_ += word.size();
    return word;
  }

 private:
  const char* at_;
};

// A node: the places of its inputs and outputs, -1 where it has none, and rooms of which it is the last to read.
struct Step {
  const Declaration* declaration = nullptr;
  std::unique_ptr<Kernel> kernel;
  std::vector<int> inputs, outputs, free;
};

// Values of a call by place: the inputs of the chain, then its outputs, then what only its steps read, in rooms that
// serve again.
struct Values {
  Tensor tensors[kMostPlaces];
  std::unique_ptr<float[]> longer[kMostPlaces];  // memory of rooms that is not kept

  float* memory(int room, int64_t count) {
    static thread_local std::vector<float> kept[kMostPlaces];
    if (count <= kMostKept) return aligned(kept[room], count);
    longer[room].reset(new float[count]);
    return longer[room].get();
  }
};

// A call as the kernel of one step sees it.
class StepContext : public Context {
 public:
  StepContext(Context& whole, const Step& step, Values& values, const std::vector<int>& rooms, int inputs)
      : Context(whole), whole_(whole), step_(step), values_(values), rooms_(rooms), inputs_(inputs) {}

  Tensor input(size_t place) const override {
    const int from = place < step_.inputs.size() ? step_.inputs[place] : -1;
    if (from < 0) return Tensor();
    const int type = step_.declaration->inputs[place].type;
    const int wanted = type == kActivation || type == kStored ? kFloat : type;
    expect(wanted == kUndefined || values_.tensors[from].type == wanted, "an input is of another type");
    return values_.tensors[from];
  }

  Tensor output(size_t place, const int64_t* dims, size_t rank) override {
    const int to = place < step_.outputs.size() ? step_.outputs[place] : -1;
    if (to < 0) return Tensor();
    Tensor& made = values_.tensors[to];
    if (rooms_[to] < 0) {
      made = whole_.output(to - inputs_, dims, rank);
      expect(!!made, "the node has fewer outputs than its steps");
    } else {
      made.rank = static_cast<int>(rank), made.present = true;
      std::copy(dims, dims + rank, made.dims);
      made.data = values_.memory(rooms_[to], made.count());
    }
    made.type = kFloat;
    return made;
  }

 private:
  Context& whole_;
  const Step& step_;
  Values& values_;
  const std::vector<int>& rooms_;
  const int inputs_;
};

// The text: how many inputs, outputs and steps; of each step its name, and how many inputs and outputs with their places.
class Chain : public Kernel {
 public:
  explicit Chain(const Attributes& attributes) {
    const std::string text = attributes.text("steps", "");
    Words words(text);
    inputs_ = words.whole(1, kMostTensors);
    outputs_ = words.whole(1, kMostTensors);
    const int count = words.whole(1, kMostPlaces);
    std::vector<bool> made(kMostPlaces, false);
    std::fill_n(made.begin(), inputs_, true);
    for (int i = 0; i < count; ++i)
      steps_.push_back(read(words, attributes.part("step" + std::to_string(i) + "_"), made));
    for (int i = 0; i < outputs_; ++i) expect(made[inputs_ + i], "no step makes an output");
    assign_rooms();
  }

  void compute(Context& call) const override {
    Values values;
    for (int i = 0; i < inputs_; ++i) {
      values.tensors[i] = call.input(i);
      expect(!!values.tensors[i], "an input is missing");
    }
    for (const Step& step : steps_) {
      StepContext own(call, step, values, rooms_, inputs_);
      step.kernel->compute(own);
      for (int room : step.free) values.longer[room].reset();
    }
  }

 private:
  // A room for each value that is neither input nor output of the chain, free again behind the last step that has it.
  void assign_rooms() {
    std::vector<size_t> last(kMostPlaces, 0);
    for (size_t i = 0; i < steps_.size(); ++i)
      for (const auto* places : {&steps_[i].inputs, &steps_[i].outputs})
        for (int place : *places)
          if (place >= 0) last[place] = i;
    int count = 0;
    std::vector<int> free;
    for (size_t i = 0; i < steps_.size(); ++i) {
      for (int place : steps_[i].outputs) {
        if (place < inputs_ + outputs_) continue;
        if (free.empty()) free.push_back(count++);
        rooms_[place] = free.back(), free.pop_back();
      }
      for (int place = inputs_ + outputs_; place < kMostPlaces; ++place)
        if (rooms_[place] >= 0 && last[place] == i) steps_[i].free.push_back(rooms_[place]);
      free.insert(free.end(), steps_[i].free.begin(), steps_[i].free.end());
    }
  }

  Step read(Words& words, const Attributes& attributes, std::vector<bool>& made) const {
    Step step;
    const std::string name = words.name();
    for (const Declaration& one : declarations())
      if (name == one.name && name != "Chain") step.declaration = &one;
    if (!step.declaration) throw Error("Chain: unknown step " + name);
    const auto& given = step.declaration->inputs;
    step.inputs.resize(words.whole(0, given.size()));
    for (int& place : step.inputs) {
      place = words.whole(-1, kMostPlaces - 1);
      expect(place < 0 || made[place], "a step reads what none has made");
    }
    for (size_t i = 0; i < given.size(); ++i)
      expect(given[i].optional || (i < step.inputs.size() && step.inputs[i] >= 0), "an input of a step is missing");
    step.outputs.resize(words.whole(1, step.declaration->outputs.size()));
    for (int& place : step.outputs) {
      place = words.whole(-1, kMostPlaces - 1);
      expect(place < 0 || !made[place], "two steps make one value");
      if (place >= 0) made[place] = true;
    }
    const auto& results = step.declaration->outputs;
    for (size_t i = 0; i < results.size(); ++i)
      expect(results[i].optional || (i < step.outputs.size() && step.outputs[i] >= 0), "an output of a step is missing");
    step.kernel = step.declaration->create(attributes);
    return step;
  }

  int inputs_, outputs_;
  std::vector<Step> steps_;
  std::vector<int> rooms_ = std::vector<int>(kMostPlaces, -1);  // by place
};

const Registered registered({"Chain",
                             std::vector<Argument>(kMostTensors, {"x", kUndefined, true}),
                             std::vector<Argument>(kMostTensors, {"y", kFloat, true}),
                             make<Chain>,
                             kFusedDomain});

}  // namespace
}  // namespace linexport
