// CachedAttention: softmax attention of a model's hybrid layers, from tokens before heads to the same, in the place of a
// dozen nodes and of the scores, as long as all keys, in memory.
#include "cached_attention.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "division.h"

#define KERNEL "cached_attention_kernel.h"
#include "for_each_instruction_set.h"

namespace linexport {
namespace {

enum Input { kQuery, kKey, kValue, kPastKey, kPastValue, kMask, kPastLength };

void expect(bool holds, const char* what) {
  if (!holds) throw Error(std::string("CachedAttention: ") + what);
}

class CachedAttentionKernel : public Kernel {
 public:
  explicit CachedAttentionKernel(const Attributes& attributes)
      : scale_(attributes.number("scale", 1.0f)), low_(attributes.number("low", 0.0f)), threads_(attributes.threads) {}

  void compute(Context& call) const override {
    CachedAttention a = read(call);
    a.output = call.output(0, {a.batch, a.queries, a.query_heads * a.d_v}).out<float>();
    a.present_key = call.output(1, {a.batch, a.heads, a.capacity, a.d_k}).out<float>();
    a.present_value = call.output(2, {a.batch, a.heads, a.capacity, a.d_v}).out<float>();
    const int64_t products = a.streams() * a.rows() * a.keys() * (a.d_k + a.d_v);
    if (a.rows() <= kFew) return attend_few(call, a, products);
    Division(a.streams(), 1, kMoved * a.streams() * a.keys() * (a.d_k + a.d_v), threads_)
        .run(call, [&](const Part& part) { DISPATCH(append_all(a, part)); }, Subnormals::kKept);
    const auto run = [&](const Part& part) { DISPATCH(run_blocks(a, part, memory(DISPATCH(block_floats(a))))); };
    Division(a.streams(), DISPATCH(blocks(a)), products, threads_).run(call, run, Subnormals::kKept);
  }

 private:
  // What few rows take is the time to read keys and values, and to write them.
  void attend_few(const Context& call, const CachedAttention& a, int64_t products) const {
    static thread_local std::vector<float> kept;
    float* partial = aligned(kept, DISPATCH(sums_floats(a)));
    const int64_t panels = DISPATCH(few_panels(a));
    const auto run = [&](const Part& part) { DISPATCH(run_few(a, part, memory(DISPATCH(few_floats(a))), partial)); };
    Division(a.streams(), panels, products + kMoved * a.streams() * a.keys() * (a.d_k + a.d_v), threads_)
        .run(call, run, Subnormals::kKept);
    if (panels > 1) DISPATCH(join_few(a, {0, a.streams(), 0, 1}, partial));
  }

  CachedAttention read(const Context& call) const {
    const Tensor query = call.input(kQuery), key = call.input(kKey), value = call.input(kValue);
    const Tensor past_key = call.input(kPastKey), past_value = call.input(kPastValue);
    expect(query.rank == 3, "query has no three dimensions");
    expect(past_key.rank == 4 && past_value.rank == 4, "past_key and past_value have no four dimensions");
    CachedAttention a;
    a.scale = scale_;
    a.batch = query.dims[0], a.queries = query.dims[1], a.heads = past_key.dims[1];
    read_lengths(past_key.dims[2], call.input(kPastLength), a);
    a.d_k = past_key.dims[3], a.d_v = past_value.dims[3];
    expect(a.heads > 0 && a.d_k > 0 && a.d_v > 0, "past_key or past_value have no heads or channels");
    expect(query.dims[2] > 0 && query.dims[2] % (a.heads * a.d_k) == 0, "query has no multiple of the heads of past_key");
    a.query_heads = query.dims[2] / a.d_k;
    expect(key.has_shape({a.batch, a.queries, a.heads * a.d_k}), "key has a wrong shape");
    expect(value.has_shape({a.batch, a.queries, a.heads * a.d_v}), "value has a wrong shape");
    expect(past_key.has_shape({a.batch, a.heads, a.past_capacity, a.d_k}), "past_key has a wrong shape");
    expect(past_value.has_shape({a.batch, a.heads, a.past_capacity, a.d_v}), "past_value has a wrong shape");
    a.query = query.in<float>(), a.key = key.in<float>(), a.value = value.in<float>();
    a.past_key = past_key.in<float>(), a.past_value = past_value.in<float>();
    read_mask(call.input(kMask), a);
    return a;
  }

  // Caches are as long as what they hold, or both have memory for more tokens than that.
  static void read_lengths(int64_t rows, const Tensor& length, CachedAttention& a) {
    a.past = a.past_capacity = rows, a.capacity = rows + a.queries;
    if (length.type == kUndefined) return;
    expect(length.type == kInt64 && length.has_shape({1}), "past_length is not one integer");
    a.past = length.in<int64_t>()[0], a.capacity = rows;
    expect(a.past >= 0 && a.past <= rows - a.queries, "past_length and the tokens do not fit into the caches");
  }

  // Of floats, what is added to the scores; of integers, which keys may be seen, by the queries not before them.
  void read_mask(const Tensor& mask, CachedAttention& a) const {
    if (mask.type == kFloat) {
      const int64_t masks = mask.rank == 4 && mask.dims[0] == 1 ? 1 : a.batch;
      expect(mask.has_shape({masks, 1, a.queries, a.keys()}), "mask has a wrong shape");
      a.mask = mask.in<float>(), a.mask_of_batch = masks == 1 ? 0 : a.queries * a.keys();
      return;
    }
    expect(mask.type == kInt64, "mask has another type");
    expect(mask.has_shape({a.batch, a.keys()}), "mask has a wrong shape");
    static thread_local std::vector<float> seen;
    seen.resize(std::max<size_t>(seen.size(), a.batch * a.keys()));
    for (int64_t i = 0; i < a.batch * a.keys(); ++i) seen[i] = mask.in<int64_t>()[i] ? 0 : low_;
    a.seen = seen.data(), a.low = low_;
  }

  const float scale_, low_;
  const int threads_;
};

const Registered registered({"CachedAttention",
                             {{"query", kFloat},
                              {"key", kFloat},
                              {"value", kFloat},
                              {"past_key", kFloat},
                              {"past_value", kFloat},
                              {"mask", kUndefined},
                              {"past_length", kInt64, true}},
                             {{"output", kFloat}, {"present_key", kFloat}, {"present_value", kFloat}},
                             make<CachedAttentionKernel>,
                             kFusedDomain});

}  // namespace
}  // namespace linexport
