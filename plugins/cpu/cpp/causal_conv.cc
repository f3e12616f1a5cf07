// CausalConvWithState: a depthwise convolution over the preceding tokens, with its activation.
#include "causal_conv.h"

#include "division.h"

#define KERNEL "causal_conv_kernel.h"
#include "for_each_instruction_set.h"

namespace linexport {
namespace {

enum Input { kInput, kWeight, kBias, kPast };

void expect(bool holds, const char* what) {
  if (!holds) throw Error(std::string("CausalConvWithState: ") + what);
}

class CausalConvWithState : public Kernel {
 public:
  explicit CausalConvWithState(const Attributes& attributes) : threads_(attributes.threads) {
    const std::string activation = attributes.text("activation", "none");
    silu_ = activation == "silu" || activation == "swish";
    expect(silu_ || activation == "none", "unknown activation");
  }

  void compute(Context& call) const override {
    const Tensor input = call.input(kInput), weight = call.input(kWeight), bias = call.input(kBias);
    const Tensor past = call.input(kPast);
    expect(input.rank == 3, "input has three dimensions");
    Convolution c;
    c.batch = input.dims[0], c.channels = input.dims[1], c.length = input.dims[2], c.silu = silu_;
    expect(weight.rank == 3 && weight.dims[0] == c.channels && weight.dims[1] == 1 && weight.dims[2] > 0,
           "weight has a wrong shape");
    c.size = weight.dims[2];
    expect(!bias || bias.has_shape({c.channels}), "bias has a wrong shape");
    expect(!past || past.has_shape({c.batch, c.channels, c.size - 1}), "past_state has a wrong shape");
    c.input = input.in<float>(), c.weight = weight.in<float>(), c.bias = bias.in<float>(), c.past = past.in<float>();
    c.output = call.output(0, {c.batch, c.channels, c.length}).out<float>();
    c.present = call.output(1, {c.batch, c.channels, c.size - 1}).out<float>();
    const Division division(c.rows(), 1, c.rows() * c.length * (c.size + 16), threads_);
    division.run(call, [&](const Part& part) { DISPATCH(convolve(c, part)); });
  }

 private:
  bool silu_ = false;
  int threads_;
};

const Registered registered({"CausalConvWithState",
                             {{"input", kActivation}, {"weight", kActivation}, {"bias", kActivation, true}, {"past_state", kActivation, true}},
                             {{"output", kActivation}, {"present_state", kActivation, true}},
                             make<CausalConvWithState>});

}  // namespace
}  // namespace linexport
