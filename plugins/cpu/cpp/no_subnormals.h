// Arithmetic of this thread that takes numbers below 1.2e-38 for zero, while it lives and if that is wanted. Products of
// strong decays are such numbers, and a processor can take a hundred times as long for each.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace linexport {

class NoSubnormals {
 public:
  explicit NoSubnormals(bool wanted) : before_(mode()) { set_mode(wanted ? before_ | kToZero : before_); }
  ~NoSubnormals() { set_mode(before_); }
  NoSubnormals(const NoSubnormals&) = delete;
  NoSubnormals& operator=(const NoSubnormals&) = delete;

 private:
#if defined(__x86_64__)
  using Mode = uint32_t;
  static constexpr Mode kToZero = 0x8040;  // of results, and of operands
  static Mode mode() { return _mm_getcsr(); }
  static void set_mode(Mode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
  using Mode = uint64_t;
  static constexpr Mode kToZero = Mode{1} << 24;
  static Mode mode() {
    Mode found;
    __asm__ volatile("mrs %0, fpcr" : "=r"(found));
    return found;
  }
  static void set_mode(Mode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  using Mode = int;
  static constexpr Mode kToZero = 0;
  static Mode mode() { return 0; }
  static void set_mode(Mode) {}
#endif

  const Mode before_;
};

}  // namespace linexport
