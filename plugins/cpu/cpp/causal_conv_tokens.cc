// CausalConvTokens: CausalConvWithState on tokens before channels, between whose transposes models have it, times a factor
// of each token.
#include "causal_conv.h"
#include "division.h"

#define KERNEL "causal_conv_tokens_kernel.h"
#include "for_each_instruction_set.h"

namespace linexport {
namespace {

class CausalConvTokens : public Kernel {
 public:
  explicit CausalConvTokens(const Attributes& attributes)
      : silu_(has_silu(attributes)), first_(attributes.integer("first_channel", -1)), threads_(attributes.threads) {}

  void compute(Context& call) const override {
    const Tensor input = call.input(0);
    if (input.rank != 3) throw Error("CausalConvTokens: input has three dimensions");
    Convolution c = read_convolution(call, input, input.dims[2], input.dims[1], first_);
    c.silu = silu_;
    const Tensor factor = call.input(4);
    if (factor && !factor.has_shape({c.batch, c.length, 1})) throw Error("CausalConvTokens: factor has a wrong shape");
    c.factor = factor.in<float>();
    c.output = call.output(0, {c.batch, c.length, c.channels}).out<float>();
    c.present = call.output(1, {c.batch, c.channels, c.size - 1}).out<float>();
    if (c.length == 1) return convolve_token(call, c);
    const Division division(c.batch * DISPATCH(blocks(c)), 1, c.rows() * c.length * (c.size + 16), threads_);
    const auto run = [&](const Part& part) { DISPATCH(convolve(c, part, memory(DISPATCH(memory_floats(c))))); };
    division.run(call, run, Subnormals::kKept);
  }

 private:
  void convolve_token(const Context& call, const Convolution& c) const {
    convolve_channels_first(call, c, threads_);  // the same layout
    for (int64_t i = 0; c.factor && i < c.rows(); ++i) c.output[i] *= c.factor[i / c.channels];
  }

  const bool silu_;
  const int64_t first_;
  const int threads_;
};

const Registered registered({"CausalConvTokens",
                             {{"input", kActivation},
                              {"weight", kActivation},
                              {"bias", kActivation, true},
                              {"past_state", kActivation, true},
                              {"factor", kActivation, true}},
                             {{"output", kActivation}, {"present_state", kActivation, true}},
                             make<CausalConvTokens>,
                             kFusedDomain});

}  // namespace
}  // namespace linexport
