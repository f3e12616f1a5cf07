// StabilizedExp: exponential features relative to a running maximum, both ways.
#include "stabilized_exp.h"

#include <algorithm>

#include "division.h"

#define KERNEL "stabilized_exp_kernel.h"
#include "for_each_instruction_set.h"

namespace linexport {
namespace {

enum Input { kQuery, kKey, kPastMax, kKeyMask, kDecay };
constexpr int64_t kExponential = 8;  // multiplications that take the time of one

void expect(bool holds, const char* what) {
  if (!holds) throw Error(std::string("StabilizedExp: ") + what);
}

class StabilizedExp : public Kernel {
 public:
  explicit StabilizedExp(const Attributes& attributes) : threads_(attributes.threads) {
    node_.query_heads = attributes.heads("q_num_heads");
    node_.heads = attributes.heads("k_num_heads");
    node_.causal = attributes.integer("causal", 1) != 0;
    expect(node_.query_heads > 0 && node_.heads > 0, "head counts must be at least 1");
    expect(std::max(node_.query_heads, node_.heads) % std::min(node_.query_heads, node_.heads) == 0,
           "one head count must be a multiple of the other");
  }

  void compute(Context& call) const override {
    Exponents x = node_;
    read(call, x);
    const int64_t width = x.heads * x.features;
    x.query_features = call.output(0, {x.batch, x.length, x.output_heads() * x.features}).out<float>();
    x.key_features = call.output(1, {x.batch, x.length, width}).out<float>();
    x.present_decay = call.output(2, {x.batch, x.length, width}).out<float>();
    x.present_max = call.output(3, {x.batch, x.heads, x.features}).out<float>();
    stabilize(call, x, threads_);
  }

 private:
  // The sizes that the inputs imply, each checked against the others.
  static void read(const Context& call, Exponents& x) {
    const Tensor query = call.input(kQuery), key = call.input(kKey), past = call.input(kPastMax);
    const Tensor mask = call.input(kKeyMask), decay = call.input(kDecay);
    expect(query.rank == 3 && key.rank == 3, "query and key have three dimensions");
    x.batch = query.dims[0], x.length = query.dims[1], x.features = query.dims[2] / x.query_heads;
    expect(x.features > 0 && query.dims[2] == x.features * x.query_heads, "query's width is no multiple of q_num_heads");
    expect(key.has_shape({x.batch, x.length, x.heads * x.features}),
           "key has a wrong shape");
    expect(x.causal || (!past && !decay), "causal=0 takes no past and no decay");
    expect(!past || past.has_shape({x.batch, x.heads, x.features}), "past_key_max has a wrong shape");
    expect(!mask || mask.has_shape({x.batch, x.length}), "key_mask has a wrong shape");
    if (decay) {
      const bool fits = decay.rank == 3 && decay.dims[0] == x.batch && decay.dims[1] == x.length;
      x.decay_per_feature = fits && decay.dims[2] != x.heads;
      expect(fits && (!x.decay_per_feature || decay.dims[2] == x.heads * x.features), "decay has a wrong shape");
    }
    x.query = query.in<float>(), x.key = key.in<float>(), x.past_max = past.in<float>();
    x.key_mask = mask.in<bool>(), x.decay = decay.in<float>();
  }

  Exponents node_;
  int threads_;
};

const Registered registered({"StabilizedExp",
                             {{"query", kFloat},
                              {"key", kFloat},
                              {"past_key_max", kFloat, true},
                              {"key_mask", kBool, true},
                              {"decay", kFloat, true}},
                             {{"query_features", kFloat},
                              {"key_features", kFloat},
                              {"present_decay", kFloat, true},
                              {"present_key_max", kFloat, true}},
                             make<StabilizedExp>});

}  // namespace

void stabilize(const Context& call, const Exponents& exponents, int threads) {
  Exponents x = exponents;
  const int64_t work = x.streams() * x.length * x.features * (x.group() + 1) * kExponential;
  if (DISPATCH(is_narrow(x))) {
    const Division division(x.batch * DISPATCH(row_vectors(x)), 1, work, threads);
    return division.run(call, [&](const Part& part) { DISPATCH(run_narrow(x, part, memory(DISPATCH(row_floats(part))))); });
  }
  const Division division(x.streams(), DISPATCH(segments(x)), work, threads, kTurns);
  x.past_max = division.apart(x.past_max, x.present_max, x.streams() * x.features);
  division.run(call, [&](const Part& part) { DISPATCH(run(x, part, memory(DISPATCH(exponents_floats(x, part))))); });
}

}  // namespace linexport
