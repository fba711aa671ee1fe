// Vectors of 16 floats, pairs of bfloat16, and the chains of operations that all kernels are made of.
//
// The bits of a result do not depend on how many rows there are: every output element is one chain of operations in one
// fixed order. Rows, threads, tiles and the places where entries lie change which elements are computed together, never
// an element's own chain. Compiled once a machine by build.py for its processor; without AVX-512 BF16 the same chains
// run on emulated pairs.

#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <memory>
#ifdef _OPENMP
#include <omp.h>
#endif
#include <sched.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint16_t bf16;

static inline vf splat(float x) { return vf{} + x; }
static inline vi splati(int32_t x) { return vi{} + x; }
template <class T> static inline T load(const void* p) { T v; memcpy(&v, p, sizeof v); return v; }
template <class T> static inline void store(void* p, T v) { memcpy(p, &v, sizeof v); }

static inline float wide(bf16 x) { uint32_t u = uint32_t(x) << 16; float f; memcpy(&f, &u, 4); return f; }
static inline bf16 narrow(float f) {  // round to nearest, ties to even
  uint32_t u; memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return bf16((u >> 16) | 64);
  return bf16((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static inline vf wide16(const bf16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
  vf r; for (int i = 0; i < 16; i++) r[i] = wide(p[i]); return r;
#endif
}
static inline void narrow16(bf16* p, vf x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
  for (int i = 0; i < 16; i++) p[i] = narrow(x[i]);
#endif
}
// acc + a0 b0 + a1 b1, where a and b hold pairs of bfloat16
static inline vf dot(vf acc, vi a, vi b) {
#if defined(__AVX512BF16__)
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  vi high = splati(int32_t(0xffff0000));
  acc += (vf)(a << 16) * (vf)(b << 16);
  return acc + (vf)(a & high) * (vf)(b & high);
#endif
}
static inline vf fma16(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}
static inline float sum(vf v) {  // one fixed tree
  float a[16]; store(a, v);
  for (int step = 8; step; step /= 2) for (int i = 0; i < step; i++) a[i] += a[i + step];
  return a[0];
}
static inline float most(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0]; for (int i = 1; i < 16; i++) m = std::max(m, v[i]); return m;
#endif
}
static inline vf larger(vf a, vf b) { return a > b ? a : b; }
static inline vf exp16(vf x) {  // exp for x <= 0; 0 below -87
  vf t = x * splat(1.44269504f);
  vf c = t > splat(-126.f) ? t : splat(-126.f);
#if defined(__AVX512F__)
  vf n = (vf)_mm512_roundscale_ps((__m512)c, 8);
  vi e = (vi)_mm512_cvtps_epi32((__m512)n);
#else
  vf n; vi e; for (int i = 0; i < 16; i++) { n[i] = std::nearbyint(c[i]); e[i] = int32_t(n[i]); }
#endif
  vf f = c - n;
  vf p = splat(1.5403530e-4f);
  p = fma16(p, f, splat(1.3333558e-3f)); p = fma16(p, f, splat(9.6181291e-3f)); p = fma16(p, f, splat(5.5504109e-2f));
  p = fma16(p, f, splat(0.24022651f)); p = fma16(p, f, splat(0.69314718f)); p = fma16(p, f, splat(1.f));
  vf r = (vf)((vi)p + (e << 23));
  return t > splat(-126.f) ? r : vf{};
}


struct Own {  // scratch of one thread, kept between calls
  void* data[8] = {}; size_t size[8] = {};
  ~Own() { for (void* p : data) free(p); }
  void* at(int which, size_t bytes) {
    if (size[which] < bytes) {
      free(data[which]);
      data[which] = aligned_alloc(64, (bytes + 63) / 64 * 64);
      size[which] = bytes;
    }
    return data[which];
  }
};
static thread_local Own own;


static inline int threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

// ---- loops over tasks ---------------------------------------------------------------------------------------------
//
// A decoded token is some two hundred loops of a few microseconds each. To begin and end a parallel region for every one
// costs as much as the loop itself, and far more where the runtime puts its threads to sleep in between, as it does once
// there are more of them in a process than processors. So a call opens one region for all of its loops, in which the
// thread that called runs the program, and the others help with the tasks of whatever loop it is in. Whoever is free
// takes the next task: a helper that the system has put aside holds nobody up unless it has begun one.

class Team {
  static constexpr int BITS = 20;
  static constexpr uint64_t MOST = (1 << BITS) - 1, END = ~uint64_t(0);
  std::atomic<uint64_t> state{0};  // from the top: the loop's number, how many tasks it has, and how many were taken
  std::atomic<int64_t> undone{0};
  void (*run)(const void*, int64_t) = nullptr;
  const void* body = nullptr;

  bool take() {  // a task of the loop under way, if one is left; until it is done, no other loop begins
    uint64_t now = state.load(std::memory_order_acquire);
    if (now == END || (now & MOST) >= (now >> BITS & MOST)) return false;
    if (state.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) {
      run(body, int64_t(now & MOST));
      undone.fetch_sub(1, std::memory_order_release);
    }
    return true;
  }
  static void wait(int& turns) {  // some 20 microseconds, then whoever else wants the processor goes first
    if (++turns > 500) { sched_yield(); return; }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

 public:
  template <class F> void loop(int64_t count, const F& f) {
    run = [](const void* own, int64_t task) { (*(const F*)own)(task); };
    body = &f;
    undone.store(count, std::memory_order_relaxed);
    uint64_t number = (state.load(std::memory_order_relaxed) >> 2 * BITS) + 1;
    state.store(number << 2 * BITS | uint64_t(count) << BITS, std::memory_order_release);
    while (take()) {}
    for (int turns = 0; undone.load(std::memory_order_acquire);) wait(turns);
  }
  void help() {
    for (int turns = 0; state.load(std::memory_order_acquire) != END;) if (take()) turns = 0; else wait(turns);
  }
  void end() { state.store(END, std::memory_order_release); }
};
inline thread_local Team* team = nullptr;  // of the call that this thread runs

// Run a call of few rows with all threads at hand for its loops.
template <class F> static void with_team(bool few, const F& call) {
#ifdef _OPENMP
  if (few && !team && threads() > 1) {
    Team own_team;
#pragma omp parallel
    if (omp_get_thread_num()) own_team.help();
    else {
      team = &own_team;
      call();
      team = nullptr;
      own_team.end();
    }
    return;
  }
#endif
  call();
}

// body(task) of all tasks, in any order and by any thread.
template <class F> static void each(int64_t count, const F& body) {
  if (team) { team->loop(count, body); return; }
#pragma omp parallel for schedule(dynamic)
  for (int64_t task = 0; task < count; task++) body(task);
}
