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
  explicit CausalConvWithState(const Attributes& attributes) : silu_(has_silu(attributes)), threads_(attributes.threads) {}

  void compute(Context& call) const override {
    const Tensor input = call.input(kInput);
    expect(input.rank == 3, "input has three dimensions");
    Convolution c = read_convolution(call, input, input.dims[1], input.dims[2]);
    c.silu = silu_;
    c.output = call.output(0, {c.batch, c.channels, c.length}).out<float>();
    c.present = call.output(1, {c.batch, c.channels, c.size - 1}).out<float>();
    convolve_channels_first(call, c, threads_);
  }

 private:
  const bool silu_;
  const int threads_;
};

const Registered registered({"CausalConvWithState",
                             {{"input", kActivation}, {"weight", kActivation}, {"bias", kActivation, true}, {"past_state", kActivation, true}},
                             {{"output", kActivation}, {"present_state", kActivation, true}},
                             make<CausalConvWithState>});

}  // namespace

bool has_silu(const Attributes& attributes) {
  const std::string activation = attributes.text("activation", "none");
  const bool silu = activation == "silu" || activation == "swish";
  expect(silu || activation == "none", "unknown activation");
  return silu;
}

Convolution read_convolution(const Context& call, const Tensor& input, int64_t width, int64_t length, int64_t first) {
  const Tensor weight = call.input(kWeight), bias = call.input(kBias), past = call.input(kPast);
  Convolution c;
  expect(weight.rank == 3 && weight.dims[1] == 1 && weight.dims[2] > 0, "weight has a wrong shape");
  c.batch = input.dims[0], c.channels = weight.dims[0], c.length = length, c.size = weight.dims[2];
  c.width = width, c.first = std::max<int64_t>(first, 0);
  expect(first < 0 ? c.channels == width : first <= width - c.channels, "weight has other channels than the input");
  expect(!bias || bias.has_shape({c.channels}), "bias has a wrong shape");
  expect(!past || past.has_shape({c.batch, c.channels, c.size - 1}), "past_state has a wrong shape");
  c.input = input.in<float>(), c.weight = weight.in<float>(), c.bias = bias.in<float>(), c.past = past.in<float>();
  return c;
}

void convolve_channels_first(const Context& call, const Convolution& c, int threads) {
  const Division division(c.rows(), 1, c.rows() * c.length * (c.size + 16), threads);
  division.run(call, [&](const Part& part) { DISPATCH(convolve(c, part)); }, Subnormals::kKept);
}

}  // namespace linexport
