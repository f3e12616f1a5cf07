// GeneralizedDeltaRule: decay per key channel, and a state read along a and written along b.
#include "generalized_delta_rule.h"

#include <algorithm>

#include "division.h"

#define KERNEL "generalized_delta_rule_kernel.h"
#include "for_each_instruction_set.h"

namespace linexport {
namespace {

enum Input { kQuery, kKey, kValue, kDecay, kA, kB, kPastState, kKeyMask };

void expect(bool holds, const char* what) {
  if (!holds) throw Error(std::string("GeneralizedDeltaRule: ") + what);
}

class GeneralizedDeltaRule : public Kernel {
 public:
  explicit GeneralizedDeltaRule(const Attributes& attributes) : threads_(attributes.threads) {
    node_.heads = attributes.heads("num_heads");
    node_.scale = attributes.number("scale", 1.0f);
    expect(node_.heads > 0, "num_heads must be at least 1");
  }

  void compute(Context& call) const override {
    DeltaRule d = node_;
    read(call, d);
    d.output = call.output(0, {d.batch, d.length, d.heads * d.d_v}).out<float>();
    d.present_state = call.output(1, {d.batch, d.heads, d.d_k, d.d_v}).out<float>();
    const int64_t work = 4 * d.streams() * d.length * d.d_k * d.d_v;
    const Division division(d.streams(), DISPATCH(panels(d)), work, threads_, kTurns);
    division.run(call, [&](const Part& part) { DISPATCH(run(d, part, memory(DISPATCH(memory_floats(d, part))))); });
  }

 private:
  // The sizes that the inputs imply, each checked against the others.
  static void read(const Context& call, DeltaRule& d) {
    const Tensor query = call.input(kQuery), value = call.input(kValue);
    expect(query.rank == 3 && value.rank == 3, "query and value have three dimensions");
    d.batch = query.dims[0], d.length = query.dims[1];
    d.d_k = query.dims[2] / d.heads, d.d_v = value.dims[2] / d.heads;
    expect(d.d_k > 0 && query.dims[2] == d.d_k * d.heads, "query's width is no multiple of num_heads");
    expect(d.d_v > 0 && value.dims[2] == d.d_v * d.heads, "value's width is no multiple of num_heads");
    const int64_t width = query.dims[2];
    d.query = query.in<float>();
    d.key = of_shape(call, kKey, {d.batch, d.length, width}, "key").in<float>();
    d.value = of_shape(call, kValue, {d.batch, d.length, value.dims[2]}, "value").in<float>();
    d.decay = of_shape(call, kDecay, {d.batch, d.length, width}, "decay").in<float>();
    d.a = of_shape(call, kA, {d.batch, d.length, width}, "a").in<float>();
    d.b = of_shape(call, kB, {d.batch, d.length, width}, "b").in<float>();
    d.past_state = of_shape(call, kPastState, {d.batch, d.heads, d.d_k, d.d_v}, "past_state").in<float>();
    d.key_mask = of_shape(call, kKeyMask, {d.batch, d.length}, "key_mask").in<bool>();
  }

  static Tensor of_shape(const Context& call, int place, std::initializer_list<int64_t> dims, const char* name) {
    const Tensor tensor = call.input(place);
    if (tensor && !tensor.has_shape(dims)) throw Error(std::string("GeneralizedDeltaRule: ") + name + " has a wrong shape");
    return tensor;
  }

  DeltaRule node_;
  int threads_;
};

const Registered registered({"GeneralizedDeltaRule",
                             {{"query", kActivation},
                              {"key", kActivation},
                              {"value", kActivation},
                              {"decay", kActivation},
                              {"a", kActivation},
                              {"b", kActivation},
                              {"past_state", kFloat, true},
                              {"key_mask", kBool, true}},
                             {{"output", kActivation}, {"present_state", kFloat, true}},
                             make<GeneralizedDeltaRule>});

}  // namespace
}  // namespace linexport
