// LinearAttention: all four rules and both ways, with normaliser, mask, shared heads, elementwise
// maps and those of polynomials.
#include "linear_attention.h"

#include <algorithm>

#include "chunked_attention.h"
#include "decode_step.h"
#include "division.h"
#include "elementwise_scan.h"
#include "polynomial_attention.h"
#include "selective_scan.h"

#define KERNEL "linear_attention_kernel.h"
#include "for_each_instruction_set.h"

namespace linexport {
namespace {

enum Input { kQuery, kKey, kValue, kPastState, kPastNormalizer, kDecay, kBeta, kKeyMask, kParameters, kDecayScale = 12 };

void expect(bool holds, const char* what) {
  if (!holds) throw Error(std::string("LinearAttention: ") + what);
}

class LinearAttention : public Kernel {
 public:
  explicit LinearAttention(const Attributes& attributes) : threads_(attributes.threads) {
    node_.query_heads = attributes.heads("q_num_heads");
    node_.heads = attributes.heads("kv_num_heads");
    node_.causal = attributes.integer("causal", 1) != 0;
    node_.normalize = attributes.integer("normalize", 0) != 0;
    node_.scale = attributes.number("scale", 1.0f);
    node_.eps = attributes.number("eps", 0.0f);
    const std::string map = attributes.text("feature_map", "");
    if (is_polynomial(map))
      polynomial_ = map;
    else
      node_.map = map_named(map);
    const std::string rule = attributes.text("update_rule", "linear");
    node_.has_decay = rule == "gated" || rule == "gated_delta";
    node_.has_beta = rule == "delta" || rule == "gated_delta";
    expect(node_.has_decay || node_.has_beta || rule == "linear", "unknown update_rule");
    expect(node_.query_heads > 0 && node_.heads > 0, "head counts must be at least 1");
    expect(std::max(node_.query_heads, node_.heads) % std::min(node_.query_heads, node_.heads) == 0,
           "one head count must be a multiple of the other");
    expect(node_.causal || rule == "linear", "causal=0 is of the linear rule");
    expect(!(node_.has_beta && node_.normalize), "a delta rule is not normalised");
    expect(polynomial_.empty() || (node_.causal && rule == "linear"),
           (polynomial_ + " is computed causally, by the linear rule").c_str());
  }

  void compute(Context& call) const override {
    Attention a = node_;
    Polynomial polynomial;
    read(call, a, polynomial);
    const int64_t state = a.d_k, channels = a.d_v;
    a.output = call.output(0, {a.batch, a.queries, a.output_heads() * channels}).out<float>();
    a.present_state = call.output(1, {a.batch, a.heads, state, channels}).out<float>();
    a.present_normalizer = call.output(2, {a.batch, a.heads, state}).out<float>();
    if (!polynomial_.empty())
      polynomial_attention(call, a, polynomial, threads_);
    else if (is_selective_scan(a))
      selective_scan(call, a, threads_);
    else if (is_elementwise_scan(a))
      elementwise_scan(call, a, threads_);
    else if (is_decode_step(a))
      decode_step(call, a, threads_);
    else if (is_chunked(a))
      chunked_attention(call, a, threads_);
    else
      share(call, a);
  }

 private:
  // The sizes that the inputs imply, each checked against the others.
  void read(const Context& call, Attention& a, Polynomial& polynomial) const {
    const Tensor query = call.input(kQuery), key = call.input(kKey), value = call.input(kValue);
    expect(query.rank == 3 && key.rank == 3 && value.rank == 3, "query, key and value have three dimensions");
    a.batch = query.dims[0];
    a.queries = query.dims[1], a.keys = key.dims[1];
    a.d_k = query.dims[2] / a.query_heads, a.d_v = value.dims[2] / a.heads;
    expect(a.d_k > 0 && query.dims[2] == a.d_k * a.query_heads, "query's width is no multiple of q_num_heads");
    expect(a.d_v > 0 && value.dims[2] == a.d_v * a.heads, "value's width is no multiple of kv_num_heads");
    a.key_heads = key.dims[2] / a.d_k;
    expect(a.key_heads > 0 && key.dims[2] == a.key_heads * a.d_k && a.heads % a.key_heads == 0,
           "key's heads do not divide kv_num_heads");
    expect((a.keys == a.queries || !a.causal) && key.dims[0] == a.batch && value.dims[0] == a.batch &&
               value.dims[1] == a.keys,
           "query, key and value differ in batch or length");
    if (!polynomial_.empty()) {
      polynomial = read_polynomial(call, polynomial_, a.d_k, kParameters);
      a.d_k = polynomial.features;
    }
    a.query = query.in<float>(), a.key = key.in<float>(), a.value = value.in<float>();
    a.past_state = of_shape(call, kPastState, {a.batch, a.heads, a.d_k, a.d_v}, "past_state");
    a.past_normalizer = of_shape(call, kPastNormalizer, {a.batch, a.heads, a.d_k}, "past_normalizer");
    a.decay_scale = of_shape(call, kDecayScale, {a.heads, a.d_k}, "decay_scale");
    read_gates(call, a);
  }

  static void read_gates(const Context& call, Attention& a) {
    const Tensor decay = call.input(kDecay), beta = call.input(kBeta), mask = call.input(kKeyMask);
    expect(!!decay == a.has_decay && !!beta == a.has_beta, "decay or beta is missing, or is not read by the rule");
    if (decay) {
      const int64_t width = per_token(decay, a);
      a.decay_per_channel = width != a.heads || a.decay_scale;
      expect(width == a.heads || (width == a.heads * a.d_k && !a.decay_scale), "decay has a wrong width");
      a.decay = decay.in<float>();
    }
    if (beta) {
      const int64_t width = per_token(beta, a);
      a.beta_per_head = width == a.heads;
      expect(width == a.heads || width == 1, "beta has a wrong width");
      a.beta = beta.in<float>();
    }
    if (mask) {
      expect(mask.has_shape({a.batch, a.keys}), "key_mask has a wrong shape");
      a.key_mask = mask.in<bool>();
    }
  }

  static int64_t per_token(const Tensor& tensor, const Attention& a) {
    expect(tensor.rank == 3 && tensor.dims[0] == a.batch && tensor.dims[1] == a.keys,
           "decay or beta differs from key in batch or length");
    return tensor.dims[2];
  }

  static const float* of_shape(const Context& call, int place, std::initializer_list<int64_t> dims, const char* name) {
    const Tensor tensor = call.input(place);
    if (!tensor) return nullptr;
    if (!tensor.has_shape(dims)) throw Error(std::string("LinearAttention: ") + name + " has a wrong shape");
    return tensor.in<float>();
  }

  void share(const Context& call, Attention& a) const {
    const int64_t streams = a.streams();
    const Division division(streams, DISPATCH(panels(a)), streams * (a.keys + a.queries) * a.d_k * a.d_v, threads_, kTurns);
    a.past_normalizer = division.apart(a.past_normalizer, a.present_normalizer, streams * a.d_k);
    division.run(call, [&](const Part& part) { DISPATCH(run(a, part, memory(DISPATCH(memory_floats(a, part))))); });
  }

  Attention node_;
  std::string polynomial_;  // name of the map where that is one
  int threads_;
};

const Registered registered({"LinearAttention",
                             {{"query", kActivation},
                              {"key", kActivation},
                              {"value", kActivation},
                              {"past_state", kFloat, true},
                              {"past_normalizer", kFloat, true},
                              {"decay", kActivation, true},
                              {"beta", kActivation, true},
                              {"key_mask", kBool, true},
                              {"parameter_0", kUndefined, true},
                              {"parameter_1", kUndefined, true},
                              {"parameter_2", kUndefined, true},
                              {"parameter_3", kUndefined, true},
                              {"decay_scale", kFloat, true}},
                             {{"output", kActivation}, {"present_state", kFloat, true}, {"present_normalizer", kFloat, true}},
                             make<LinearAttention>});

}  // namespace
}  // namespace linexport
