// The largest relative error of every exponential of vector.h, in units of 2^-24, over each STEP-th float32 between
// -87.3 and 88.7228 that it is for; of decays it goes on no further than 88.6. Each line: instruction set, form, error, and the x that has it.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace linexport {
enum Form { kAny, kNegative, kDecay };
}

#define KERNEL "exponentials_kernel.h"
#include "for_each_instruction_set.h"

using namespace linexport;

namespace {

constexpr int kCount = 4096, kForms = 3;
const char* const kNames[kForms] = {"exponential", "exponential_of_negative", "exponential_of_decay"};

// Those of which this machine has the instructions.
struct {
  const char* name;
  void (*run)(Form, const float*, float*, int64_t);
} const kSets[] = {
    {"base", base::exponentials},
#if defined(__x86_64__)
    {"avx2", avx2::exponentials},
    {"avx512", avx512::exponentials},
#endif
};

struct Worst {
  double error = 0;
  float at = 0;
} worst[3][kForms];

void check(const std::vector<float>& x) {
  const double highest = std::exp(static_cast<double>(88.6f));
  std::vector<double> expected(kCount);
  std::vector<float> found(kCount);
  for (int i = 0; i < kCount; ++i) expected[i] = std::exp(static_cast<double>(x[i]));
  for (int set = 0; set <= static_cast<int>(instruction_set()); ++set)
    for (int form = 0; form < kForms; ++form) {
      if (form == kNegative && x[kCount - 1] > 0) continue;
      kSets[set].run(static_cast<Form>(form), x.data(), found.data(), kCount);
      for (int i = 0; i < kCount; ++i) {
        const double end = form == kDecay ? std::min(expected[i], highest) : expected[i];
        const double error = std::abs(found[i] / end - 1) * 0x1p24;
        if (!(error <= worst[set][form].error)) worst[set][form] = {error, x[i]};
      }
    }
}

float number(uint64_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits);
  float x;
  std::memcpy(&x, &word, sizeof x);
  return x;
}

}  // namespace

int main(int, char** arguments) {
  const uint64_t step = std::atoi(arguments[1]);
  std::vector<float> x(kCount);
  for (const float end : {-87.3f, 88.7228f}) {
    uint32_t last;  // numbers of one sign are in the order of their bits
    std::memcpy(&last, &end, sizeof last);
    const uint64_t first = last & 0x80000000u;
    for (uint64_t bits = first; bits <= last; bits += kCount * step) {
      for (int i = 0; i < kCount; ++i) x[i] = number(std::min<uint64_t>(bits + i * step, last));
      check(x);
    }
  }
  for (int set = 0; set <= static_cast<int>(instruction_set()); ++set)
    for (int form = 0; form < kForms; ++form)
      std::printf("%s %s %.3f %.9g\n", kSets[set].name, kNames[form], worst[set][form].error, worst[set][form].at);
}
