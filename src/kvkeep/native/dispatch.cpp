// The exported kernels, and which instruction set runs them: the best of this processor, unless a caller chooses.
//
// CMake names the instruction sets that are compiled in, best first: KVKEEP_PATHS is KVKEEP_PATH(name) for each.

#include <atomic>

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "kernels.h"
#include "float_mode.h"

#define KVKEEP_PATH(name) extern "C" __attribute__((visibility("hidden"))) const KvKernels kvkeep_table_##name;
KVKEEP_PATHS
#undef KVKEEP_PATH

namespace {

// ---- what a processor has -------------------------------------------------------------------------------------------

bool has_plain() { return true; }

#if defined(__x86_64__)
// The builtin also asks whether the system keeps these registers of a thread.
bool has_avx2() {
  unsigned a, b, c, d;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && c & 1 << 29;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
}
#if defined(KVKEEP_SIMDE_PATHS)
bool has_avx512() { return has_avx2(); }
bool has_avxvnni() { return has_avx2(); }
#else
bool has_avxvnni() {
  unsigned a, b, c, d;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & 1 << 4;
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}
#endif
#elif defined(__aarch64__)
bool has_neon() { return true; }
#if defined(__APPLE__)
bool has_dotprod() { return true; }  // every Apple processor that runs macOS
bool has_i8mm() {                    // from M2 on
  int there = 0;
  size_t size = sizeof there;
  return !sysctlbyname("hw.optional.arm.FEAT_I8MM", &there, &size, nullptr, 0) && there;
}
#else
bool has_dotprod() { return getauxval(AT_HWCAP) & 1ul << 20; }
bool has_i8mm() { return has_dotprod() && getauxval(AT_HWCAP2) & 1ul << 13; }
#endif
#endif

// ---- the path in use ------------------------------------------------------------------------------------------------

struct Path {
  const KvKernels* kernels;
  bool (*available)();
};
const Path PATHS[] = {
#define KVKEEP_PATH(name) {&kvkeep_table_##name, has_##name},
    KVKEEP_PATHS
#undef KVKEEP_PATH
};

struct Choice {
  std::atomic<const KvKernels*> kernels{nullptr};
  char names[128] = "";  // of the paths that this processor runs, separated by spaces

  Choice() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    for (const Path& path : PATHS) {
      if (!path.available()) continue;
      if (!kernels.load()) kernels.store(path.kernels);
      else strcat(names, " ");
      strcat(names, path.kernels->name);
    }
  }
};

Choice& choice() {
  static Choice made;
  return made;
}

const KvKernels* chosen() { return choice().kernels.load(std::memory_order_relaxed); }

}  // namespace

const char* kvkeep_paths(void) { return choice().names; }

int kvkeep_choose(const char* name) {
  for (const Path& path : PATHS)
    if (!strcmp(path.kernels->name, name) && path.available()) {
      choice().kernels.store(path.kernels, std::memory_order_relaxed);
      return 1;
    }
  return 0;
}

const char* kvkeep_path(void) { return chosen()->name; }

// ---- kernels, in the floating-point mode that they expect -----------------------------------------------------------

KvStatus kvkeep_product(const KvMatrix* matrix, const uint16_t* x, int64_t rows, const uint16_t* bias, uint16_t* y,
                        int64_t y_stride) {
  FloatMode mode;
  return chosen()->product(matrix, x, rows, bias, y, y_stride);
}

void kvkeep_norm(const uint16_t* x, const float* weight, float eps, int64_t rows, int64_t width, uint16_t* y) {
  FloatMode mode;
  chosen()->norm(x, weight, eps, rows, width, y);
}

void kvkeep_angles(const int64_t* positions, int64_t count, const float* frequencies, int64_t half, float scaling,
                   uint16_t* cos, uint16_t* sin) {
  FloatMode mode;
  chosen()->angles(positions, count, frequencies, half, scaling, cos, sin);
}

KvStatus kvkeep_before_attention(const KvLayer* layer, const uint16_t* x, int64_t batch, int64_t tokens,
                                 const uint16_t* cos, const uint16_t* sin, int shared_angles, uint16_t* query,
                                 uint16_t* key, uint16_t* value) {
  FloatMode mode;
  return chosen()->before_attention(layer, x, batch, tokens, cos, sin, shared_angles, query, key, value);
}

KvStatus kvkeep_after_attention(const KvLayer* layer, const uint16_t* attended, const uint16_t* residual, int64_t rows,
                                uint16_t* y) {
  FloatMode mode;
  return chosen()->after_attention(layer, attended, residual, rows, y);
}

KvStatus kvkeep_attend(const KvAttention* attention, void* out, int float_out, float* lse, float* state, int resume) {
  FloatMode mode;
  return chosen()->attend(attention, out, float_out, lse, state, resume);
}

KvStatus kvkeep_received(const KvAttention* attention, const float* lse, int64_t last, int reduce_max,
                         float* received) {
  FloatMode mode;
  return chosen()->received(attention, lse, last, reduce_max, received);
}

void kvkeep_insert(const KvInsert* insert, int64_t lanes, const char* new_keys, const char* new_values) {
  FloatMode mode;
  chosen()->insert(insert, lanes, new_keys, new_values);
}

KvStatus kvkeep_attend_sessions(KvStep* const* steps, int64_t count, const uint16_t* query, const uint16_t* key,
                                const uint16_t* value, int64_t tokens, int64_t heads, int by_token, float scaling,
                                uint16_t* out, float* lse) {
  FloatMode mode;
  return chosen()->attend_sessions(steps, count, query, key, value, tokens, heads, by_token, scaling, out, lse);
}

KvStatus kvkeep_run_layers(const KvLayer* const* layers, KvStep* const* const* steps, const float* scaling,
                           int64_t count, const int64_t* step_counts, int64_t tokens, const uint16_t* cos,
                           const uint16_t* sin, uint16_t* x) {
  FloatMode mode;
  return chosen()->run_layers(layers, steps, scaling, count, step_counts, tokens, cos, sin, x);
}
