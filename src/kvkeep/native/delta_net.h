// What a gated delta net (Qwen3-Next, Qwen 3.5) computes between its projections: a short convolution, the recurrence
// of its states, and the norm of what it returns. Tokens follow one another, so that no bit depends on how many a call
// has.
#pragma once

#include "recurrence.h"

namespace {

constexpr int64_t CHAINS = 4;  // sums over the channels of a key: the next can begin before one ends

// Scales a vector to the length `length`.
static void to_length(float* x, int64_t width, float length) {
  vf squares = vset(0.0f);
  for (int64_t i = 0; i < width; i += 16) squares = vfma(vload(x + i), vload(x + i), squares);
  const float factor = length / __builtin_sqrtf(sum(squares) + 1e-6f);
  for (int64_t i = 0; i < width; i += 16) vstore(x + i, vload(x + i) * vset(factor));
}

// Adds one token to 16 columns of a state, (key_dim) rows `stride` apart, and returns what the query reads of them.
INLINE vf delta_step(float* state, int64_t stride, int64_t key_dim, const float* query, const float* key, vf value,
                     float decay, float beta) {
  vf parts[CHAINS];
  UNROLLED for (int p = 0; p < CHAINS; p++) parts[p] = vset(0.0f);
  for (int64_t i = 0; i < key_dim; i += CHAINS)
    UNROLLED for (int p = 0; p < CHAINS; p++) {
      float* row = state + (i + p) * stride;
      const vf kept = vload(row) * vset(decay);
      vstore(row, kept);
      parts[p] = vfma(kept, vset(key[i + p]), parts[p]);
    }
  const vf known = (parts[0] + parts[1]) + (parts[2] + parts[3]), change = (value - known) * vset(beta);
  UNROLLED for (int p = 0; p < CHAINS; p++) parts[p] = vset(0.0f);
  for (int64_t i = 0; i < key_dim; i += CHAINS)
    UNROLLED for (int p = 0; p < CHAINS; p++) {
      float* row = state + (i + p) * stride;
      const vf kept = vfma(vset(key[i + p]), change, vload(row));
      vstore(row, kept);
      parts[p] = vfma(kept, vset(query[i + p]), parts[p]);
    }
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

// RMSNorm of what a head returns, times its weight and silu of its gate.
static void gated_norm(const float* x, const float* weight, float eps, const bf16* gate, int64_t width, bf16* y) {
  vf squares = vset(0.0f);
  bf16 rounded[16];
  for (int64_t i = 0; i < width; i += 16) {
    vstore_bf16(rounded, vload(x + i));
    const vf v = vload_bf16(rounded);
    squares = vfma_bf16(v, v, squares);
  }
  const float factor = 1.0f / __builtin_sqrtf(sum(squares) / float(width) + eps);
  for (int64_t i = 0; i < width; i += 16) {
    vstore_bf16(rounded, vload(x + i));
    vstore_bf16(rounded, vload_bf16(rounded) * vset(factor));
    vstore_bf16(rounded, vload_bf16(rounded) * vload(weight + i));
    const vf g = vload_bf16(gate + i);
    vstore_bf16(y + i, vload_bf16(rounded) * (g * sigmoid(g)));
  }
}

// ---- the interface of kvkeep.h --------------------------------------------------------------------------------------

static KvStatus delta_net(const KvDeltaNet* net, KvArray inputs, KvArray gate, KvArray beta, KvArray decay,
                          KvArray state, KvArray out) {
  const KvDeltaNet& n = *net;
  const int64_t heads = n.value_heads, tokens = beta.length / heads, keys = n.key_heads * n.key_dim;
  const int64_t values = heads * n.value_dim, channels = 2 * keys + values;
  const int64_t floats = tokens * (channels + values + 2 * heads), blocks = n.value_dim / 16;
  Needs needs;
  needs.add(KV_SCRATCH_LAYER, floats * 4);
  if (!needs.reserve()) return KV_NO_MEMORY;
  float* mixed = (float*)kv_scratch(KV_SCRATCH_LAYER, size_t(floats * 4));  // (tokens, channels)
  if (!mixed) return KV_FAILED;
  float* read = mixed + tokens * channels;                                  // (tokens, values)
  float* kept = read + tokens * values;                                     // (tokens, heads): of the state
  float* strength = kept + tokens * heads;                                  // (tokens, heads): of a change
  with_team(tokens <= MAX_DIRECT_ROWS, [&] {
    for_each_row(tokens, [&](int64_t t) {
      float* row = mixed + t * channels;
      convolve_row(numbers<bf16>(inputs) + t * channels, numbers<float>(n.conv), nullptr, n.taps, channels,
                   row);
      for (int64_t h = 0; h < n.key_heads; h++) {
        to_length(row + h * n.key_dim, n.key_dim, 1.0f / __builtin_sqrtf(float(n.key_dim)));
        to_length(row + keys + h * n.key_dim, n.key_dim, 1.0f);
      }
      for (int64_t h = 0; h < heads; h++) {
        const int64_t at = t * heads + h;
        strength[at] = widen(narrow(sigmoid1(widen(numbers<bf16>(beta)[at]))));
        const float step = softplus1(widen(numbers<bf16>(decay)[at]) + numbers<float>(n.step_bias)[h]);
        kept[at] = exp1(-(numbers<float>(n.rate)[h] * step));
      }
    });
    parallel_for(heads * blocks, [&](int64_t task) {
      const int64_t h = task / blocks, column = task % blocks * 16, key_head = h / (heads / n.key_heads);
      float* columns = numbers<float>(state) + h * n.key_dim * n.value_dim + column;
      for (int64_t t = 0; t < tokens; t++) {
        const float *query = mixed + t * channels + key_head * n.key_dim, *key = query + keys;
        const int64_t at = h * n.value_dim + column;
        const vf found = delta_step(columns, n.value_dim, n.key_dim, query, key,
                                    vload(mixed + t * channels + 2 * keys + at), kept[t * heads + h],
                                    strength[t * heads + h]);
        vstore(read + t * values + at, found);
      }
    });
    for_each_row(tokens, [&](int64_t t) {
      for (int64_t h = 0; h < heads; h++) {
        const int64_t at = t * values + h * n.value_dim;
        gated_norm(read + at, numbers<float>(n.norm), n.eps, numbers<bf16>(gate) + at, n.value_dim,
                   numbers<bf16>(out) + at);
      }
    });
  });
  return KV_DONE;
}

}  // namespace
