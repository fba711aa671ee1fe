// What a Mamba-2 layer (Granite 4, Falcon-H1, Bamba, Nemotron-H; Dao and Gu, arXiv:2405.21060) computes
// between its projections: a short convolution, the recurrence of its states, gate and norm of what it returns. Tokens
// follow one another, so that no bit depends on how many a call has.
#pragma once

#include "recurrence.h"

namespace {

constexpr int64_t SCAN_ROWS = 4;  // rows of a state at a time: their sums do not wait for each other

// Updates SCAN_ROWS rows of a state h, (state_dim) each, by one token, and writes C h + D x of them. kept: the factor
// of the state, exp(-rate dt).
INLINE void scan_step(float* state, int64_t state_dim, const float* b, const float* c, const float* x, float step,
                      float kept, float skip, float* out) {
  vf added[SCAN_ROWS], read[SCAN_ROWS];
  UNROLLED for (int r = 0; r < SCAN_ROWS; r++) {
    added[r] = vset(x[r] * step);
    read[r] = vset(0.0f);
  }
  for (int64_t i = 0; i < state_dim; i += 16) {
    const vf in = vload(b + i), from = vload(c + i);
    UNROLLED for (int r = 0; r < SCAN_ROWS; r++) {
      float* at = state + r * state_dim + i;
      const vf now = vfma(in, added[r], vload(at) * vset(kept));
      vstore(at, now);
      read[r] = vfma(now, from, read[r]);
    }
  }
  UNROLLED for (int r = 0; r < SCAN_ROWS; r++) out[r] = sum(read[r]) + skip * x[r];
}

// Applies gate and RMSNorm to a group. weight: null for no norm. x: overwritten.
static void gate_and_norm(float* x, const bf16* gate, const float* weight, bool gate_first, float eps, int64_t width,
                          bf16* y) {
  const auto gated = [&](int64_t i, vf v) {
    const vf g = vload_bf16(gate + i);
    return v * (g * sigmoid(g));
  };
  if (gate_first)
    for (int64_t i = 0; i < width; i += 16) vstore(x + i, gated(i, vload(x + i)));
  float factor = 1.0f;
  if (weight) {
    vf squares = vset(0.0f);
    for (int64_t i = 0; i < width; i += 16) squares = vfma(vload(x + i), vload(x + i), squares);
    factor = 1.0f / __builtin_sqrtf(sum(squares) / float(width) + eps);
  }
  for (int64_t i = 0; i < width; i += 16) {
    vf v = vload(x + i);
    if (weight) v = v * vset(factor) * vload(weight + i);
    vstore_bf16(y + i, gate_first ? v : gated(i, v));
  }
}

// ---- the interface of kvkeep.h --------------------------------------------------------------------------------------

static KvStatus mamba2(const KvMamba2* space, KvArray inputs, KvArray gate, KvArray steps, KvArray state, KvArray out) {
  const KvMamba2& s = *space;
  const int64_t inner = s.heads * s.head_dim, shared = s.groups * s.state_dim, channels = inner + 2 * shared;
  const int64_t tokens = steps.length / s.heads, parts = s.head_dim / SCAN_ROWS, width = inner / s.groups;
  const int64_t floats = tokens * (channels + inner + 2 * s.heads);
  Needs needs;
  needs.add(KV_SCRATCH_LAYER, floats * 4);
  if (!needs.reserve()) return KV_NO_MEMORY;
  float* mixed = (float*)kv_scratch(KV_SCRATCH_LAYER, size_t(floats * 4));  // (tokens, channels)
  if (!mixed) return KV_FAILED;
  float* read = mixed + tokens * channels;                                  // (tokens, inner)
  float* step = read + tokens * inner;                                      // (tokens, heads)
  float* kept = step + tokens * s.heads;                                    // (tokens, heads): of the state
  with_team(tokens <= MAX_DIRECT_ROWS, [&] {
    for_each_row(tokens, [&](int64_t t) {
      convolve_row(numbers<bf16>(inputs) + t * channels, numbers<float>(s.conv), numbers<float>(s.conv_bias), s.taps,
                   channels, mixed + t * channels);
      for (int64_t h = 0; h < s.heads; h++) {
        const int64_t at = t * s.heads + h;
        const float raw = widen(numbers<bf16>(steps)[at]);
        float length = softplus1(raw + numbers<float>(s.step_bias)[h]);
        length = length < s.smallest_step ? s.smallest_step : length > s.greatest_step ? s.greatest_step : length;
        step[at] = raw == -__builtin_inff() ? 0.0f : length;
        kept[at] = exp1(-(numbers<float>(s.rate)[h] * step[at]));
      }
    });
    parallel_for(s.heads * parts, [&](int64_t task) {
      const int64_t h = task / parts, row = task * SCAN_ROWS, group = h / (s.heads / s.groups);
      float* rows = numbers<float>(state) + row * s.state_dim;
      for (int64_t t = 0; t < tokens; t++) {
        const float *x = mixed + t * channels, *b = x + inner + group * s.state_dim;
        const int64_t at = t * s.heads + h;
        scan_step(rows, s.state_dim, b, b + shared, x + row, step[at], kept[at], numbers<float>(s.skip)[h],
                  read + t * inner + row);
      }
    });
    for_each_row(tokens, [&](int64_t t) {
      for (int64_t g = 0; g < s.groups; g++) {
        const int64_t at = t * inner + g * width;
        const float* weight = numbers<float>(s.norm);
        gate_and_norm(read + at, numbers<bf16>(gate) + at, weight ? weight + g * width : nullptr, s.gate_first != 0,
                      s.eps, width, numbers<bf16>(out) + at);
      }
    });
  });
  return KV_DONE;
}

}  // namespace
