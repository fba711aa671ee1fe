// The floating-point mode of kernels: rounding to nearest, subnormal numbers kept. A program may have changed it for a
// thread (torch.set_flush_denormal does), and a library compiled with -ffast-math for all threads.
#pragma once

#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

class FloatMode {  // sets this for the calling thread; its destructor restores what the program had set
#if defined(__x86_64__)
  static constexpr unsigned CHANGED = 0xe040;  // flush to zero, the direction, subnormal inputs are zeros
  unsigned saved = _mm_getcsr();
  static void set(unsigned to) { _mm_setcsr(to); }
#elif defined(__aarch64__)
  static constexpr uint64_t CHANGED = 0x1c80007;  // FZ, the direction, FZ16; FIZ, AH and NEP of FEAT_AFP
  uint64_t saved = get();
  static uint64_t get() { uint64_t value; __asm__ volatile("mrs %0, fpcr" : "=r"(value)); return value; }
  static void set(uint64_t to) { __asm__ volatile("msr fpcr, %0" : : "r"(to)); }
#else
  static constexpr unsigned CHANGED = 0;
  unsigned saved = 0;
  static void set(unsigned) {}
#endif
 public:
  FloatMode() { if (saved & CHANGED) set(saved & ~CHANGED); }
  ~FloatMode() { if (saved & CHANGED) set(saved); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;
};

}  // namespace
