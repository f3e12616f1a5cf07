// MixtureOfExperts: every token through the experts its router chose.
#include "mixture_of_experts.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "division.h"
#include "half.h"

#define KERNEL "mixture_of_experts_kernel.h"
#include "for_each_instruction_set.h"

namespace linexport {
namespace {

enum Input { kX, kIndex, kWeight, kUp, kDown };

constexpr int64_t kMostHidden = 1 << 24;  // floats between the products; more tokens take turns

void expect(bool holds, const char* what) {
  if (!holds) throw Error(std::string("MixtureOfExperts: ") + what);
}

ExpertActivation activation_named(const std::string& name) {
  if (name == "silu") return ExpertActivation::kSilu;
  if (name == "relu2") return ExpertActivation::kSquaredRelu;
  expect(name == "gelu", ("unknown activation " + name).c_str());
  return ExpertActivation::kGelu;
}

// Pairs of token and expert in the order of the experts, those of an expert in the order of the tokens.
class SortedPairs {
 public:
  void sort(const int64_t* index, const float* weight, const Experts& m) {
    const int64_t pairs = m.tokens * m.chosen;
    ends_.assign(m.experts + 1, 0);
    token_.resize(pairs), weight_.resize(pairs);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      expect(index[pair] >= 0 && index[pair] < m.experts, "index names an expert that is not there");
      ++ends_[index[pair] + 1];
    }
    for (int64_t e = 1; e < m.experts; ++e) ends_[e] += ends_[e - 1];
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int64_t place = ends_[index[pair]]++;
      token_[place] = pair / m.chosen, weight_[place] = weight[pair];
    }
  }
  void give(Experts& m) const { m.token = token_.data(), m.weight = weight_.data(), m.ends = ends_.data(); }

 private:
  std::vector<int64_t> ends_, token_;
  std::vector<float> weight_;
};

class MixtureOfExperts : public Kernel {
 public:
  explicit MixtureOfExperts(const Attributes& attributes) : threads_(attributes.threads) {
    node_.activation = activation_named(attributes.text("activation", "silu"));
    node_.gated = attributes.integer("gated", 1) != 0;
    node_.gate_cap = attributes.number("gate_cap", 0), node_.value_cap = attributes.number("value_cap", 0);
    for (const float cap : {node_.gate_cap, node_.value_cap}) expect(cap >= 0 && std::isfinite(cap), "a cap is no positive number");
    expect(node_.gated || node_.value_cap == 0, "value_cap needs a gate");
  }

  void compute(Context& call) const override {
    Experts m = node_;
    Routes routes = read(call, m);
    m.y = call.output(0, {m.tokens, m.outputs}).out<float>();
    const int64_t tokens = m.tokens, most = std::max<int64_t>(1, kMostHidden / std::max<int64_t>(1, m.chosen * m.inner));
    for (int64_t first = 0; first < tokens; first += most) {
      m.tokens = std::min(most, tokens - first);
      multiply(call, m, routes);
      const int64_t pairs = m.tokens * m.chosen;
      m.x += m.tokens * m.width, m.y += m.tokens * m.outputs, routes.index += pairs, routes.weight += pairs;
    }
  }

 private:
  // Experts of the pairs, and what each counts, in the order of the tokens.
  struct Routes {
    const int64_t* index;
    const float* weight;
  };

  // The sizes that the inputs imply, each checked against the others.
  static Routes read(const Context& call, Experts& m) {
    const Tensor x = call.input(kX), index = call.input(kIndex), weight = call.input(kWeight);
    const Tensor up = call.input(kUp), down = call.input(kDown);
    expect(x.rank == 2 && index.rank == 2 && up.rank == 3 && down.rank == 3, "x and index have two dimensions, up and down three");
    m.tokens = x.dims[0], m.width = x.dims[1], m.chosen = index.dims[1];
    m.experts = down.dims[0], m.outputs = down.dims[1], m.inner = down.dims[2];
    expect(index.dims[0] == m.tokens && weight.has_shape({m.tokens, m.chosen}), "x, index and weight differ in tokens or experts");
    expect(up.has_shape({m.experts, m.gated ? 2 * m.inner : m.inner, m.width}), "up has a wrong shape");
    m.x = x.in<float>();
    m.up = up.data, m.down = down.data, m.stored = up.type;
    return {index.in<int64_t>(), weight.in<float>()};
  }

  void multiply(const Context& call, Experts& m, const Routes& routes) const {
    static thread_local SortedPairs pairs;
    static thread_local std::vector<float> hidden;
    const int64_t count = m.tokens * m.chosen;
    pairs.sort(routes.index, routes.weight, m);
    pairs.give(m);
    m.hidden = aligned(hidden, count * m.inner);
    const Division up(DISPATCH(groups(m.inner)), 1, count * m.width * m.inner * (m.gated ? 2 : 1), threads_);
    up.run(call, [&](const Part& part) { DISPATCH(fill_hidden(m, part, memory(DISPATCH(memory_floats(m))))); }, Subnormals::kKept);
    const Division down(DISPATCH(groups(m.outputs)), 1, count * m.inner * m.outputs, threads_);
    down.run(call, [&](const Part& part) { DISPATCH(fill_outputs(m, part, memory(DISPATCH(memory_floats(m))))); }, Subnormals::kKept);
  }

  Experts node_;
  const int threads_;
};

const Registered registered({"MixtureOfExperts",
                             {{"x", kActivation}, {"index", kInt64}, {"weight", kActivation}, {"up", kStored}, {"down", kStored}},
                             {{"y", kActivation}},
                             make<MixtureOfExperts>});

}  // namespace
}  // namespace linexport
