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

#include "checks.h"
#include "float_mode.h"
#include "kernels.h"
#include "runtime.h"

#define KVKEEP_PATH(name) extern "C" __attribute__((visibility("hidden"))) const KvKernels kvkeep_table_##name;
KVKEEP_PATHS
#undef KVKEEP_PATH

namespace {

// ---- what a processor has: for the paths that are compiled in, of which there may be fewer --------------------------

[[maybe_unused]] bool has_plain() { return true; }

#if defined(__x86_64__)
// The builtin also asks whether the system keeps these registers of a thread.
[[maybe_unused]] bool has_avx2() {
  unsigned a, b, c, d;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && c & 1 << 29;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
}
#if defined(KVKEEP_SIMDE_PATHS)
[[maybe_unused]] bool has_avx512() { return has_avx2(); }
[[maybe_unused]] bool has_avxvnni() { return has_avx2(); }
#else
[[maybe_unused]] bool has_avxvnni() {
  unsigned a, b, c, d;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & 1 << 4;
}
[[maybe_unused]] bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}
#endif
#elif defined(__aarch64__)
[[maybe_unused]] bool has_neon() { return true; }
#if defined(__APPLE__)
[[maybe_unused]] bool has_dotprod() { return true; }  // every Apple processor that runs macOS
[[maybe_unused]] bool has_i8mm() {                    // from M2 on
  int there = 0;
  size_t size = sizeof there;
  return !sysctlbyname("hw.optional.arm.FEAT_I8MM", &there, &size, nullptr, 0) && there;
}
#else
[[maybe_unused]] bool has_dotprod() { return getauxval(AT_HWCAP) & 1ul << 20; }
[[maybe_unused]] bool has_i8mm() { return has_dotprod() && getauxval(AT_HWCAP2) & 1ul << 13; }
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

const char* kvkeep_interface(void) { return KVKEEP_INTERFACE; }

// ---- kernels, in the floating-point mode that they expect -----------------------------------------------------------

namespace {

// Runs call(kernels) if what it was given fits.
template <class F> KvStatus run(bool fits, const F& call) {
  if (!fits) return KV_BAD_CALL;
  FloatMode mode;
  const KvStatus status = call(*chosen());
  return kv_exceeded() ? KV_FAILED : status;
}

}  // namespace

KvStatus kvkeep_product(const KvMatrix* matrix, KvArray x, KvArray bias, KvArray y, int64_t y_stride) {
  return run(product_fits(*matrix, x, bias, y, y_stride),
             [&](auto& kernels) { return kernels.product(matrix, x, bias, y, y_stride); });
}

KvStatus kvkeep_norm(const KvNorm* norm, KvArray x, KvArray y) {
  return run(norm_fits(*norm, x, y), [&](auto& kernels) { return kernels.norm(norm, x, y); });
}

KvStatus kvkeep_angles(KvArray positions, KvArray frequencies, float scaling, KvArray cos, KvArray sin) {
  return run(angles_fit(positions, frequencies, cos, sin),
             [&](auto& kernels) { return kernels.angles(positions, frequencies, scaling, cos, sin); });
}

KvStatus kvkeep_before_attention(const KvLayer* layer, KvArray x, int64_t batch, KvArray cos, KvArray sin,
                                 KvArray query, KvArray key, KvArray value, KvArray gate) {
  return run(before_attention_fits(*layer, x, batch, cos, sin, query, key, value, gate), [&](auto& kernels) {
    return kernels.before_attention(layer, x, batch, cos, sin, query, key, value, gate);
  });
}

KvStatus kvkeep_before_mlp(const KvLayer* layer, KvArray attended, KvArray gate, KvArray added, KvArray residual,
                           KvArray y, KvArray normed) {
  return run(before_mlp_fits(*layer, attended, gate, added, residual, y, normed),
             [&](auto& kernels) { return kernels.before_mlp(layer, attended, gate, added, residual, y, normed); });
}

KvStatus kvkeep_after_attention(const KvLayer* layer, KvArray attended, KvArray gate, KvArray added, KvArray side,
                                KvArray residual, KvArray y) {
  return run(after_attention_fits(*layer, attended, gate, added, side, residual, y),
             [&](auto& kernels) { return kernels.after_attention(layer, attended, gate, added, side, residual, y); });
}

KvStatus kvkeep_mlp(const KvMlp* mlp, KvArray x, KvArray y) {
  return run(mlp_fits(*mlp, x, y), [&](auto& kernels) { return kernels.mlp(mlp, x, y); });
}

KvStatus kvkeep_route(const KvRouter* router, KvArray x, KvArray logits, KvArray weights, KvArray chosen) {
  return run(route_fits(*router, x, logits, weights, chosen),
             [&](auto& kernels) { return kernels.route(router, x, logits, weights, chosen); });
}

KvStatus kvkeep_run_experts(const KvExperts* experts, KvArray x, KvArray chosen, KvArray weights, KvArray y) {
  return run(experts_fit(*experts, x, chosen, weights, y),
             [&](auto& kernels) { return kernels.run_experts(experts, x, chosen, weights, y); });
}

KvStatus kvkeep_delta_net(const KvDeltaNet* net, KvArray inputs, KvArray gate, KvArray beta, KvArray decay,
                          KvArray state, KvArray out) {
  return run(delta_net_fits(*net, inputs, gate, beta, decay, state, out),
             [&](auto& kernels) { return kernels.delta_net(net, inputs, gate, beta, decay, state, out); });
}

KvStatus kvkeep_mamba2(const KvMamba2* space, KvArray inputs, KvArray gate, KvArray steps, KvArray state, KvArray out) {
  return run(mamba2_fits(*space, inputs, gate, steps, state, out),
             [&](auto& kernels) { return kernels.mamba2(space, inputs, gate, steps, state, out); });
}

KvStatus kvkeep_attend(const KvAttention* attention, KvArray out, KvArray lse, KvArray state, int resume) {
  return run(attend_fits(*attention, out, lse, state, resume),
             [&](auto& kernels) { return kernels.attend(attention, out, lse, state, resume); });
}

KvStatus kvkeep_received(const KvAttention* attention, KvArray lse, int64_t last, int reduce_max, KvArray received) {
  return run(received_fits(*attention, lse, received),
             [&](auto& kernels) { return kernels.received(attention, lse, last, reduce_max, received); });
}

KvStatus kvkeep_insert(const KvInsert* insert, KvArray new_keys, KvArray new_values) {
  return run(insert_fits(*insert, new_keys, new_values),
             [&](auto& kernels) { return kernels.insert(insert, new_keys, new_values); });
}

void kvkeep_move_steps(KvStep* const* steps, int64_t count, int64_t slot, int64_t token, int64_t number) {
  for (int64_t i = 0; i < count; i++) {
    KvStep& step = *steps[i];
    KvAttention& a = step.attention;
    const int64_t rows = slot - step.insert.new_slot;
    step.insert.column += rows;
    step.insert.new_slot += rows;
    a.entries += rows;
    a.pieces[a.piece_count - 1].entries += rows;
    if (a.causal_offset >= 0) a.causal_offset += rows;
    step.token = token;
    step.number = number;
  }
}

KvStatus kvkeep_attend_sessions(KvStep* const* steps, int64_t count, KvArray query, KvArray key, KvArray value,
                                int64_t tokens, int64_t heads, int by_token, float scaling, float cap, KvArray sinks,
                                KvArray out, KvArray lse) {
  return run(sessions_fit(steps, count, query, key, value, tokens, heads, cap, sinks, out, lse), [&](auto& kernels) {
    return kernels.attend_sessions(steps, count, query, key, value, tokens, heads, by_token, scaling, cap, sinks, out,
                                   lse);
  });
}

KvStatus kvkeep_run_layers(const KvLayer* const* layers, KvStep* const* const* steps, int64_t count,
                           const int64_t* step_counts, KvArray cos, KvArray sin, KvArray x, KvArray normed) {
  return run(layers_fit(layers, steps, count, step_counts, cos, sin, x, normed), [&](auto& kernels) {
    return kernels.run_layers(layers, steps, count, step_counts, cos, sin, x, normed);
  });
}
