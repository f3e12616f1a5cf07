// Chain: nodes of the library that lead to each other, as one node. ONNX Runtime takes microseconds for each node, which
// for one token is more than most of them compute.
#include <sstream>

#include "division.h"

namespace linexport {
namespace {

constexpr int kMostPlaces = 64;
constexpr int64_t kMostKept = 1 << 14;  // floats of a value between steps that a thread keeps the memory of

void expect(bool holds, const char* what) {
  if (!holds) throw Error(std::string("Chain: ") + what);
}

// A node: the places of its inputs and outputs, -1 where it has none, and those that no later one reads.
struct Step {
  const Declaration* declaration = nullptr;
  std::unique_ptr<Kernel> kernel;
  std::vector<int> inputs, outputs, last;
};

// Values of a call by place: the inputs of the chain, then its outputs, then what only its steps read.
struct Values {
  Tensor tensors[kMostPlaces];
  std::unique_ptr<float[]> longer[kMostPlaces];  // memory of those that are not kept

  float* memory(int place, int64_t count) {
    static thread_local std::vector<float> kept[kMostPlaces];
    if (count <= kMostKept) return aligned(kept[place], count);
    longer[place].reset(new float[count]);
    return longer[place].get();
  }
};

// A call as the kernel of one step sees it.
class StepContext : public Context {
 public:
  StepContext(Context& whole, const Step& step, Values& values, int inputs, int outputs)
      : Context(whole), whole_(whole), step_(step), values_(values), inputs_(inputs), outputs_(outputs) {}

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
    if (to < inputs_ + outputs_) {
      made = whole_.output(to - inputs_, dims, rank);
    } else {
      made.rank = static_cast<int>(rank), made.present = true;
      std::copy(dims, dims + rank, made.dims);
      made.data = values_.memory(to, made.count());
    }
    made.type = kFloat;
    return made;
  }

 private:
  Context& whole_;
  const Step& step_;
  Values& values_;
  const int inputs_, outputs_;
};

// The text: how many inputs, outputs and steps; of each step its name, and how many inputs and outputs with their places.
class Chain : public Kernel {
 public:
  explicit Chain(const Attributes& attributes) {
    std::istringstream words(attributes.text("steps", ""));
    inputs_ = whole(words, 1, kMostTensors);
    outputs_ = whole(words, 1, kMostTensors);
    const int count = whole(words, 1, kMostPlaces);
    std::vector<bool> made(kMostPlaces, false);
    std::fill_n(made.begin(), inputs_, true);
    for (int i = 0; i < count; ++i)
      steps_.push_back(read(words, attributes.part("step" + std::to_string(i) + "_"), made));
    for (int i = 0; i < outputs_; ++i) expect(made[inputs_ + i], "no step makes an output");
    std::vector<bool> read_later(kMostPlaces, false);
    for (auto step = steps_.rbegin(); step != steps_.rend(); ++step)
      for (const auto* places : {&step->inputs, &step->outputs})
        for (int place : *places) {
          if (place >= inputs_ + outputs_ && !read_later[place]) step->last.push_back(place);
          if (place >= 0) read_later[place] = true;
        }
  }

  void compute(Context& call) const override {
    Values values;
    for (int i = 0; i < inputs_; ++i) {
      values.tensors[i] = call.input(i);
      expect(!!values.tensors[i], "an input is missing");
    }
    for (const Step& step : steps_) {
      StepContext own(call, step, values, inputs_, outputs_);
      step.kernel->compute(own);
      for (int place : step.last) values.longer[place].reset();
    }
  }

 private:
  static int whole(std::istringstream& words, int least, int most) {
    int value = least - 1;
    words >> value;
    expect(words && value >= least && value <= most, "the steps are damaged");
    return value;
  }

  Step read(std::istringstream& words, const Attributes& attributes, std::vector<bool>& made) const {
    Step step;
    std::string name;
    words >> name;
    for (const Declaration& one : declarations())
      if (name == one.name && name != "Chain") step.declaration = &one;
    if (!step.declaration) throw Error("Chain: unknown step " + name);
    const auto& given = step.declaration->inputs;
    step.inputs.resize(whole(words, 0, static_cast<int>(given.size())));
    for (int& place : step.inputs) {
      place = whole(words, -1, kMostPlaces - 1);
      expect(place < 0 || made[place], "a step reads what none has made");
    }
    for (size_t i = 0; i < given.size(); ++i)
      expect(given[i].optional || (i < step.inputs.size() && step.inputs[i] >= 0), "an input of a step is missing");
    step.outputs.resize(whole(words, 1, static_cast<int>(step.declaration->outputs.size())));
    for (int& place : step.outputs) {
      place = whole(words, -1, kMostPlaces - 1);
      expect(place < 0 || !made[place], "two steps make one value");
      if (place >= 0) made[place] = true;
    }
    step.kernel = step.declaration->create(attributes);
    return step;
  }

  int inputs_, outputs_;
  std::vector<Step> steps_;
};

const Registered registered({"Chain",
                             std::vector<Argument>(kMostTensors, {"x", kUndefined, true}),
                             std::vector<Argument>(kMostTensors, {"y", kFloat, true}),
                             make<Chain>,
                             kFusedDomain});

}  // namespace
}  // namespace linexport
