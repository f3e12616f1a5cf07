// WindowAttention: softmax attention over the last tokens and the sinks, and the tokens that leave the window.
#include "window_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "division.h"

#define KERNEL "window_attention_kernel.h"
#include "for_each_instruction_set.h"

namespace linexport {
namespace {

enum Input { kQuery, kKey, kValue, kPastKey, kPastValue, kPastSeen, kPastSinkKey, kPastSinkValue, kPastLeft, kKeyMask };
enum Output {
  kOutput, kMaximum, kTotal, kLeftKey, kLeftValue, kLeftMask,
  kPresentKey, kPresentValue, kPresentSeen, kPresentSinkKey, kPresentSinkValue, kPresentLeft
};

void expect(bool holds, const char* what) {
  if (!holds) throw Error(std::string("WindowAttention: ") + what);
}

// What a call prepares before its kernel runs, kept from call to call.
struct Prepared {
  std::vector<float> seen, since, zeros, left, unread;
  std::vector<const float*> sink_keys, sink_values;
};

class WindowAttentionKernel : public Kernel {
 public:
  explicit WindowAttentionKernel(const Attributes& attributes) : threads_(attributes.threads) {
    node_.query_heads = attributes.heads("q_num_heads"), node_.heads = attributes.heads("kv_num_heads");
    node_.window = attributes.integer("window", 0), node_.sinks = attributes.integer("sinks", 0);
    node_.scale = attributes.number("scale", 1.0f);
    expect(node_.heads > 0 && node_.query_heads > 0 && node_.query_heads % node_.heads == 0,
           "q_num_heads is no multiple of kv_num_heads, or one of them is not above 0");
    expect(node_.window > 0 && node_.window <= kMostRows, "window is below 1 or too large");
    expect(node_.sinks >= 0 && node_.sinks <= kMostRows, "sinks is below 0 or too large");
  }

  void compute(Context& call) const override {
    static thread_local Prepared kept;
    WindowAttention a = read(call);
    a.output = call.output(kOutput, {a.batch, a.length, a.query_heads * a.d_v}).out<float>();
    a.maximum = call.output(kMaximum, {a.batch, a.length, a.query_heads}).out<float>();
    a.total = call.output(kTotal, {a.batch, a.length, a.query_heads}).out<float>();
    kept.unread.resize(a.maximum && a.total ? 0 : a.batch * a.length * a.query_heads);
    if (!a.maximum) a.maximum = kept.unread.data();
    if (!a.total) a.total = kept.unread.data();
    prepare(call, a, kept);
    const int64_t width = a.heads * (a.d_k + a.d_v), seen = std::min(a.window + kBlock, a.window + a.length);
    const int64_t work = a.rows() * a.streams() * (seen + a.sinks) * (a.d_k + a.d_v) + kMoved * a.batch * a.window * width;
    if (a.length > 0 && a.rows() <= kFewQueries) {
      const auto run = [&](const Part& part) { DISPATCH(run_few(a, part, memory(DISPATCH(few_floats(a))))); };
      Division(a.streams(), 1, work, threads_).run(call, run, Subnormals::kKept);
    } else if (a.length > 0) {
      const auto run = [&](const Part& part) { DISPATCH(run_blocks(a, part, memory(DISPATCH(block_floats(a))))); };
      Division(a.streams(), DISPATCH(blocks(a)), work, threads_).run(call, run, Subnormals::kKept);
    }
    store(call, a, kept);
  }

 private:
  static constexpr int64_t kMostRows = 1 << 24, kBlock = 64;

  WindowAttention read(const Context& call) const {
    const Tensor query = call.input(kQuery), key = call.input(kKey), value = call.input(kValue);
    WindowAttention a = node_;
    expect(query.rank == 3 && key.rank == 3 && value.rank == 3, "query, key and value have three dimensions");
    a.batch = query.dims[0], a.length = query.dims[1], a.d_k = query.dims[2] / a.query_heads, a.d_v = value.dims[2] / a.heads;
    expect(a.d_k > 0 && query.dims[2] == a.d_k * a.query_heads, "query's width is no multiple of q_num_heads");
    expect(a.d_v > 0, "value's width is no multiple of kv_num_heads");
    expect(key.has_shape({a.batch, a.length, a.heads * a.d_k}), "key has a wrong shape");
    expect(value.has_shape({a.batch, a.length, a.heads * a.d_v}), "value has a wrong shape");
    check(call, kPastKey, {a.batch, a.window, a.heads * a.d_k}, "past_key has a wrong shape");
    check(call, kPastValue, {a.batch, a.window, a.heads * a.d_v}, "past_value has a wrong shape");
    check(call, kPastSeen, {a.batch, a.window}, "past_seen has a wrong shape");
    check(call, kPastSinkKey, {a.batch, a.sinks, a.heads * a.d_k}, "past_sink_key has a wrong shape");
    check(call, kPastSinkValue, {a.batch, a.sinks, a.heads * a.d_v}, "past_sink_value has a wrong shape");
    check(call, kPastLeft, {a.batch, 1}, "past_left has a wrong shape");
    check(call, kKeyMask, {a.batch, a.length}, "key_mask has a wrong shape");
    a.query = query.in<float>(), a.key = key.in<float>(), a.value = value.in<float>();
    a.past_key = call.input(kPastKey).in<float>(), a.past_value = call.input(kPastValue).in<float>();
    return a;
  }

  static void check(const Context& call, Input place, std::initializer_list<int64_t> shape, const char* what) {
    const Tensor x = call.input(place);
    expect(!x || x.has_shape(shape), what);
  }

  // Row p of [past, new] of a sequence, all heads; zeros where there is no past.
  static const float* row(const float* past, const float* added, const WindowAttention& a, int64_t b, int64_t p, int64_t width,
                          const float* zeros) {
    if (p >= a.window) return added + (b * a.length + p - a.window) * width;
    return past ? past + (b * a.window + p) * width : zeros;
  }

  // Which rows are of tokens, which of them become sinks and when, and the tokens that leave.
  static void prepare(Context& call, WindowAttention& a, Prepared& kept) {
    const int64_t rows = a.window + a.length, keys = a.heads * a.d_k, values = a.heads * a.d_v;
    const float *past_seen = call.input(kPastSeen).in<float>(), *past_left = call.input(kPastLeft).in<float>();
    const float* past_sink_key = call.input(kPastSinkKey).in<float>();
    const float* past_sink_value = call.input(kPastSinkValue).in<float>();
    const bool* mask = call.input(kKeyMask).in<bool>();
    float* left_key = call.output(kLeftKey, {a.batch, a.length, keys}).out<float>();
    float* left_value = call.output(kLeftValue, {a.batch, a.length, values}).out<float>();
    bool* left_mask = call.output(kLeftMask, {a.batch, a.length}).out<bool>();
    kept.seen.resize(a.batch * rows), kept.since.assign(a.batch * a.sinks, INFINITY), kept.left.resize(a.batch);
    kept.zeros.assign(std::max(keys, values), 0);
    const float* zeros = kept.zeros.data();
    kept.sink_keys.assign(a.batch * a.sinks, zeros), kept.sink_values.assign(a.batch * a.sinks, zeros);
    for (int64_t b = 0; b < a.batch; ++b) {
      float* seen = kept.seen.data() + b * rows;
      for (int64_t p = 0; p < a.window; ++p) seen[p] = past_seen && past_seen[b * a.window + p] > 0 ? 0 : -INFINITY;
      for (int64_t t = 0; t < a.length; ++t) seen[a.window + t] = !mask || mask[b * a.length + t] ? 0 : -INFINITY;
      int64_t left = past_left && past_left[b] > 0 ? static_cast<int64_t>(std::min<float>(past_left[b], a.sinks)) : 0;
      for (int64_t r = 0; r < left; ++r) {
        kept.since[b * a.sinks + r] = 0;
        if (past_sink_key) kept.sink_keys[b * a.sinks + r] = past_sink_key + (b * a.sinks + r) * keys;
        if (past_sink_value) kept.sink_values[b * a.sinks + r] = past_sink_value + (b * a.sinks + r) * values;
      }
      for (int64_t t = 0; t < a.length; ++t) {
        const float* k = row(a.past_key, a.key, a, b, t, keys, zeros);
        const float* v = row(a.past_value, a.value, a, b, t, values, zeros);
        if (left_key) std::copy_n(k, keys, left_key + (b * a.length + t) * keys);
        if (left_value) std::copy_n(v, values, left_value + (b * a.length + t) * values);
        bool far = seen[t] == 0;
        if (far && left < a.sinks) {
          kept.sink_keys[b * a.sinks + left] = k, kept.sink_values[b * a.sinks + left] = v;
          kept.since[b * a.sinks + left++] = static_cast<float>(t);
          far = false;
        }
        if (left_mask) left_mask[b * a.length + t] = far;
      }
      kept.left[b] = static_cast<float>(left);
    }
    a.seen = kept.seen.data(), a.since = kept.since.data();
    a.sink_keys = kept.sink_keys.data(), a.sink_values = kept.sink_values.data();
  }

  // The states after the call, which may have the memory of those before it: sinks are read from rows that are written last.
  static void store(Context& call, const WindowAttention& a, Prepared& kept) {
    const int64_t keys = a.heads * a.d_k, values = a.heads * a.d_v;
    float* sink_key = call.output(kPresentSinkKey, {a.batch, a.sinks, keys}).out<float>();
    float* sink_value = call.output(kPresentSinkValue, {a.batch, a.sinks, values}).out<float>();
    float* left = call.output(kPresentLeft, {a.batch, 1}).out<float>();
    for (int64_t i = 0; i < a.batch * a.sinks; ++i) {
      if (sink_key) std::memmove(sink_key + i * keys, kept.sink_keys[i], keys * sizeof(float));
      if (sink_value) std::memmove(sink_value + i * values, kept.sink_values[i], values * sizeof(float));
    }
    if (left) std::copy_n(kept.left.data(), a.batch, left);
    ring(a, a.past_key, a.key, keys, call.output(kPresentKey, {a.batch, a.window, keys}).out<float>());
    ring(a, a.past_value, a.value, values, call.output(kPresentValue, {a.batch, a.window, values}).out<float>());
    float* seen = call.output(kPresentSeen, {a.batch, a.window}).out<float>();
    if (!seen) return;
    for (int64_t b = 0; b < a.batch; ++b)
      for (int64_t p = 0; p < a.window; ++p)
        seen[b * a.window + p] = a.seen[b * (a.window + a.length) + a.length + p] == 0 ? 1.0f : 0.0f;
  }

  static void ring(const WindowAttention& a, const float* past, const float* added, int64_t width, float* present) {
    if (!present) return;
    const int64_t fresh = std::min(a.length, a.window), old = a.window - fresh;
    for (int64_t b = 0; b < a.batch; ++b) {
      float* to = present + b * a.window * width;
      if (past) std::memmove(to, past + (b * a.window + fresh) * width, old * width * sizeof(float));
      else std::fill_n(to, old * width, 0.0f);
      std::copy_n(added + ((b + 1) * a.length - fresh) * width, fresh * width, to + old * width);
    }
  }

  WindowAttention node_;
  int threads_;
};

const Registered registered({"WindowAttention",
                             {{"query", kActivation},
                              {"key", kActivation},
                              {"value", kActivation},
                              {"past_key", kActivation, true},
                              {"past_value", kActivation, true},
                              {"past_seen", kFloat, true},
                              {"past_sink_key", kActivation, true},
                              {"past_sink_value", kActivation, true},
                              {"past_left", kFloat, true},
                              {"key_mask", kBool, true}},
                             {{"output", kActivation},
                              {"maximum", kFloat, true},
                              {"total", kFloat, true},
                              {"left_key", kActivation, true},
                              {"left_value", kActivation, true},
                              {"left_mask", kBool, true},
                              {"present_key", kActivation, true},
                              {"present_value", kActivation, true},
                              {"present_seen", kFloat, true},
                              {"present_sink_key", kActivation, true},
                              {"present_sink_value", kActivation, true},
                              {"present_left", kFloat, true}},
                             make<WindowAttentionKernel>});

}  // namespace
}  // namespace linexport
