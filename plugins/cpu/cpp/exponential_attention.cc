// ExponentialAttention: FeatureMap of queries and keys, StabilizedExp and LinearAttention as one node.
#include "exponential_attention.h"

#include <cmath>

#include "chunked_attention.h"
#include "decode_step.h"
#include "division.h"
#include "stabilized_exp.h"

#define KERNEL "exponential_attention_kernel.h"
#include "for_each_instruction_set.h"

namespace linexport {
namespace {

enum Input { kQuery, kKey, kValue, kPastState, kPastNormalizer, kPastMax, kKeyMask, kParameters };

void expect(bool holds, const char* what, const char* more = "") {
  if (!holds) throw Error(std::string("ExponentialAttention: ") + what + more);
}

class ExponentialAttentionKernel : public Kernel {
 public:
  explicit ExponentialAttentionKernel(const Attributes& attributes)
      : kind_(attributes.text("feature_map", "")), threads_(attributes.threads) {
    node_.query_heads = attributes.heads("q_num_heads");
    node_.heads = node_.key_heads = attributes.heads("kv_num_heads");
    node_.scale = attributes.number("scale", 1.0f);
    node_.eps = attributes.number("eps", 0.0f);
    node_.normalize = true;
    expect(node_.query_heads > 0 && node_.heads > 0, "head counts must be at least 1");
    expect(std::max(node_.query_heads, node_.heads) % std::min(node_.query_heads, node_.heads) == 0,
           "one head count must be a multiple of the other");
    expect(is_flat() || is_gaussian() || is_hyperbolic() || kind_ == "favor+", "unknown feature map ", kind_.c_str());
  }

  void compute(Context& call) const override {
    ExponentialAttention x;
    read(call, x);
    Attention& a = x.mapped;
    a.output = call.output(0, {a.batch, a.queries, a.output_heads() * a.d_v}).out<float>();
    a.present_state = call.output(1, {a.batch, a.heads, a.d_k, a.d_v}).out<float>();
    a.present_normalizer = call.output(2, {a.batch, a.heads, a.d_k}).out<float>();
    x.present_max = call.output(3, {a.batch, a.heads, a.d_k}).out<float>();
    x.given.output = a.output;
    if (a.keys == 1)
      step(call, x);
    else
      share(call, x);
  }

 private:
  bool is_flat() const { return kind_ == "favor+flat"; }
  bool is_gaussian() const { return kind_ == "favor+*gaussian"; }
  bool is_hyperbolic() const { return kind_ == "favor+hyperbolic"; }

  static float number(const Context& call, int place) {
    const Tensor x = call.input(kParameters + place);
    expect(x.type == kFloat && x.rank == 1 && x.dims[0] == 1, "a parameter of the map has a wrong shape");
    return x.in<float>()[0];
  }

  ExponentialMap read_map(const Context& call, int64_t width) const {
    ExponentialMap map;
    const Tensor weights = call.input(kParameters);
    expect(weights.type == kFloat && weights.rank == 2 && weights.dims[0] == width && weights.dims[1] > 0,
           "the map's projection has a wrong shape");
    map.width = width, map.columns = weights.dims[1], map.weights = weights.in<float>();
    map.factor = static_cast<float>(std::pow(static_cast<double>(width), -0.25));
    map.opposites = is_hyperbolic(), map.floored = is_flat();
    map.constant = static_cast<float>(std::log((map.opposites ? 2.0 : 1.0) * static_cast<double>(map.columns)) / 2);
    if (is_gaussian()) map.norm = number(call, 1);
    if (is_flat()) map.factor *= number(call, 1), map.floor = number(call, 2);
    return map;
  }

  // The sizes that the inputs imply, each checked against the others.
  void read(const Context& call, ExponentialAttention& x) const {
    const Tensor query = call.input(kQuery), key = call.input(kKey), value = call.input(kValue), mask = call.input(kKeyMask);
    Attention a = node_;
    expect(query.rank == 3 && key.rank == 3 && value.rank == 3, "query, key and value have three dimensions");
    a.batch = query.dims[0], a.queries = a.keys = query.dims[1];
    a.d_k = query.dims[2] / a.query_heads, a.d_v = value.dims[2] / a.heads;
    expect(a.d_k > 0 && query.dims[2] == a.d_k * a.query_heads, "query's width is no multiple of q_num_heads");
    expect(a.d_v > 0 && value.has_shape({a.batch, a.keys, a.heads * a.d_v}), "value has a wrong shape");
    expect(key.has_shape({a.batch, a.keys, a.heads * a.d_k}), "key has a wrong shape");
    expect(!mask || mask.has_shape({a.batch, a.keys}), "key_mask has a wrong shape");
    a.query = query.in<float>(), a.key = key.in<float>(), a.value = value.in<float>(), a.key_mask = mask.in<bool>();
    x.map = read_map(call, a.d_k);
    x.given = x.mapped = a;
    x.mapped.d_k = x.map.features();
    x.mapped.past_state = past(call, kPastState, {a.batch, a.heads, x.mapped.d_k, a.d_v}, "past_state");
    x.mapped.past_normalizer = past(call, kPastNormalizer, {a.batch, a.heads, x.mapped.d_k}, "past_normalizer");
    x.past_max = past(call, kPastMax, {a.batch, a.heads, x.mapped.d_k}, "past_key_max");
  }

  static const float* past(const Context& call, int place, std::initializer_list<int64_t> dims, const char* name) {
    const Tensor tensor = call.input(place);
    expect(!tensor || tensor.has_shape(dims), name, " has a wrong shape");
    return tensor.in<float>();
  }

  void share(const Context& call, ExponentialAttention& x) const {
    Attention& a = x.mapped;
    const int64_t streams = a.streams();
    const Division division(streams, DISPATCH(panels(a)), streams * 2 * a.keys * a.d_k * a.d_v, threads_, kTurns);
    a.past_normalizer = division.apart(a.past_normalizer, a.present_normalizer, streams * a.d_k);
    x.past_max = division.apart(x.past_max, x.present_max, streams * a.d_k, 1);
    division.run(call, [&](const Part& part) { DISPATCH(run(x, part, memory(DISPATCH(memory_floats(x, part))))); });
  }

  // One token: its exponents, their features with the decay of the state, and the recurrence.
  void step(const Context& call, const ExponentialAttention& x) const {
    Attention a = x.mapped;
    const int64_t queries = a.batch * a.query_heads * a.d_k, keys = a.streams() * a.d_k;
    const int64_t outputs = a.batch * a.output_heads() * a.d_k;
    static thread_local std::vector<float> kept;
    kept.resize(std::max<size_t>(kept.size(), queries + outputs + 3 * keys));
    float *query = kept.data(), *key = query + queries, *query_features = key + keys;
    float *key_features = query_features + outputs, *decay = key_features + keys;
    float* own = memory(DISPATCH(exponents_floats(x.map)));
    DISPATCH(write_exponents(x.map, a.query, a.batch * a.query_heads, query, own));
    DISPATCH(write_exponents(x.map, a.key, a.streams(), key, own));
    Exponents e;
    e.batch = a.batch, e.length = 1, e.query_heads = a.query_heads, e.heads = a.heads, e.features = a.d_k;
    e.query = query, e.key = key, e.past_max = x.past_max, e.key_mask = a.key_mask;
    e.query_features = query_features, e.key_features = key_features, e.present_decay = decay, e.present_max = x.present_max;
    stabilize(call, e, threads_);
    a.query_heads = a.output_heads();
    a.query = query_features, a.key = key_features, a.decay = decay;
    a.has_decay = a.decay_per_channel = true;
    decode_step(call, a, threads_);
  }

  Attention node_;
  const std::string kind_;
  const int threads_;
};

const Registered registered({"ExponentialAttention",
                             {{"query", kActivation},
                              {"key", kActivation},
                              {"value", kFloat},
                              {"past_state", kFloat, true},
                              {"past_normalizer", kFloat, true},
                              {"past_key_max", kFloat, true},
                              {"key_mask", kBool, true},
                              {"parameter_0", kFloat, true},
                              {"parameter_1", kFloat, true},
                              {"parameter_2", kFloat, true}},
                             {{"output", kFloat},
                              {"present_state", kFloat, true},
                              {"present_normalizer", kFloat, true},
                              {"present_key_max", kFloat, true}},
                             make<ExponentialAttentionKernel>,
                             kFusedDomain});

}  // namespace
}  // namespace linexport
