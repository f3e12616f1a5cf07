#include "division.h"

#include <algorithm>
#include <vector>

#include "no_subnormals.h"

namespace linexport {
namespace {

constexpr int64_t kWorthAThread = 1 << 18;  // multiplications; a thread is woken in about 5 us

}  // namespace

Division::Division(int64_t streams, int64_t panels, int64_t multiplications, int threads, int64_t turns)
    : streams(streams), panels(panels) {
  if (multiplications < kWorthAThread) threads = 1;
  splits = streams >= threads || streams == 0 ? 1 : std::min(panels, (threads + streams - 1) / streams);
  shares = std::min(streams, threads == 1 ? 1 : std::clamp<int64_t>(streams / turns, threads, 4 * threads));
}

void Division::run(const Context& call, const Work<const Part&>& part, Subnormals subnormals) const {
  if (shares == 0) return;
  call.parallel(shares * splits, [&](size_t index) {
    const NoSubnormals mode(subnormals == Subnormals::kZero);
    const int64_t share = index / splits, split = index % splits;
    part({share * streams / shares, (share + 1) * streams / shares, split * panels / splits,
          (split + 1) * panels / splits});
  });
}

const float* Division::apart(const float* past, const float* present, int64_t floats, int place) const {
  if (splits <= 1 || !past || past != present) return past;
  static thread_local std::vector<float> copies[2];
  std::vector<float>& copy = copies[place];
  copy.assign(past, past + floats);
  return copy.data();
}

float* aligned(std::vector<float>& kept, int64_t floats) {
  if (static_cast<int64_t>(kept.size()) < floats + 16) kept.resize(floats + 16);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(kept.data()) + 63) & ~uintptr_t{63});
}

float* memory(int64_t floats) {
  static thread_local std::vector<float> kept;
  return aligned(kept, floats);
}

}  // namespace linexport
