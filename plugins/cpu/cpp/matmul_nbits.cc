// MatMulNBits: products with weights of four or eight bits in blocks, as ONNX Runtime's operator of this name at its
// accuracy level 4, by sums of integers; `exporter/targets/cpu_fusion/integer_products.py` writes it.
#include "matmul_nbits.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "division.h"
#include "instruction_set.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace linexport::avx2 {
namespace {
constexpr int kLanes = 8;
#include "vector.h"
#include "matmul_nbits_kernel.h"
}  // namespace
}  // namespace linexport::avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx2,fma"))), \
                             apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx2,fma")
#endif
#define LINEXPORT_VNNI
namespace linexport::avx512vnni {
namespace {
constexpr int kLanes = 16;
#include "vector.h"
#include "matmul_nbits_kernel.h"
}  // namespace
}  // namespace linexport::avx512vnni
#undef LINEXPORT_VNNI
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#define CHOOSE(call) (has_vnni() ? linexport::avx512vnni::call : linexport::avx2::call)

namespace linexport {
namespace {

bool has_vnni() {
  static const bool found = instruction_set() == InstructionSet::kAvx512 && __builtin_cpu_supports("avx512vnni");
  return found;
}

enum Input { kX, kWeights, kScales, kZeroPoints, kBias };

constexpr int64_t kMostTokens = 512;  // rounded at once; more take turns

void expect(bool holds, const char* what) {
  if (!holds) throw Error(std::string("MatMulNBits: ") + what);
}

class MatMulNBitsKernel : public Kernel {
 public:
  explicit MatMulNBitsKernel(const Attributes& attributes) : threads_(attributes.threads) {
    node_.bits = static_cast<int>(attributes.integer("bits", 4)), node_.block = attributes.integer("block_size", 32);
    node_.width = attributes.integer("K", 0), node_.outputs = attributes.integer("N", 0);
    expect(multiplies_integers(), "this machine has neither AVX2 nor AVX-512");
    expect(node_.bits == 4 || node_.bits == 8, "bits are neither 4 nor 8");
    expect(node_.block >= 16 && node_.block <= 256 && (node_.block & (node_.block - 1)) == 0, "block_size is no power of two from 16 to 256");
    expect(node_.width > 0 && node_.outputs > 0, "K or N is not positive");
    node_.blocks = (node_.width + node_.block - 1) / node_.block;
  }

  void compute(Context& call) const override {
    MatMulNBits m = read(call);
    const int64_t tokens = m.tokens;  // of an expert that no token has, none
    for (int64_t first = 0; first < tokens; first += kMostTokens) {
      m.tokens = std::min(kMostTokens, tokens - first);
      multiply(call, m);
      m.x += m.tokens * m.width, m.y += m.tokens * m.outputs;
    }
  }

 private:
  MatMulNBits read(Context& call) const {
    MatMulNBits m = node_;
    const Tensor x = call.input(kX), weights = call.input(kWeights), scales = call.input(kScales);
    const Tensor zero_points = call.input(kZeroPoints), bias = call.input(kBias);
    expect(x.rank > 0 && x.dims[x.rank - 1] == m.width, "the last dimension of x is not K");
    expect(weights.count() == m.outputs * m.row_bytes(), "weights have a wrong size");
    expect(scales.count() == m.outputs * m.blocks, "scales have a wrong size");
    expect(!zero_points || zero_points.count() == m.outputs * m.zero_bytes(), "zero points have a wrong size");
    expect(!bias || bias.count() == m.outputs, "bias has a wrong size");
    m.tokens = x.count() / m.width;
    m.x = x.in<float>(), m.weights = weights.in<uint8_t>(), m.scales = scales.in<float>();
    m.zero_points = zero_points.in<uint8_t>(), m.bias = bias.in<float>();
    int64_t dims[Tensor::kMaxRank];
    std::copy(x.dims, x.dims + x.rank, dims);
    dims[x.rank - 1] = m.outputs;
    m.y = call.output(0, dims, x.rank).out<float>();
    return m;
  }

  void multiply(const Context& call, MatMulNBits& m) const {
    static thread_local std::vector<float> kept;
    MemoryLayout layout;
    const int64_t count = m.tokens * CHOOSE(step_count(m));
    const int64_t rounded = layout.take((m.tokens * CHOOSE(rounded_bytes(m)) + 3) / 4);
    const int64_t steps = layout.take(count), offsets = layout.take(count);
    const int64_t sums = layout.take(m.tokens * CHOOSE(sum_count(m)));
    float* own = aligned(kept, layout.floats);
    m.rounded = reinterpret_cast<int8_t*>(own + rounded);
    m.steps = own + steps, m.offsets = reinterpret_cast<int32_t*>(own + offsets), m.sums = own + sums;
    Division(m.tokens, 1, m.tokens * m.width * kRounding, threads_)
        .run(call, [&](const Part& part) { CHOOSE(round_tokens(m, part)); }, Subnormals::kKept);
    Division(CHOOSE(row_groups(m)), 1, m.tokens * m.width * m.outputs, threads_)
        .run(call, [&](const Part& part) { CHOOSE(multiply(m, part, memory(CHOOSE(memory_floats(m))))); }, Subnormals::kKept);
  }

  static constexpr int64_t kRounding = 4;  // multiplications that take as long as rounding a number

  MatMulNBits node_;
  const int threads_;
};

const Registered registered({"MatMulNBits",
                             {{"x", kFloat},
                              {"weights", kUint8},
                              {"scales", kFloat},
                              {"zero_points", kUint8, true},
                              {"bias", kFloat, true}},
                             {{"y", kFloat}},
                             make<MatMulNBitsKernel>,
                             kFusedDomain});

}  // namespace

bool multiplies_integers() { return instruction_set() != InstructionSet::kBase; }

}  // namespace linexport

#else  // of other architectures ONNX Runtime's own operator is kept

namespace linexport {
bool multiplies_integers() { return false; }
}  // namespace linexport

#endif
