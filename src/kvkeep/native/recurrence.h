// What recurrent modules have in common: a short convolution, and functions of one number.
#pragma once

#include "elementwise.h"

namespace {

// Writes silu of the convolution of each channel. inputs: (taps, channels), the oldest first. bias: may be null.
static void convolve_row(const bf16* inputs, const float* weights, const float* bias, int64_t taps, int64_t channels,
                         float* out) {
  for (int64_t c = 0; c < channels; c += 16) {
    vf total = vload_bf16(inputs + c) * vload(weights + c);
    for (int64_t tap = 1; tap < taps; tap++)
      total = vfma(vload_bf16(inputs + tap * channels + c), vload(weights + tap * channels + c), total);
    if (bias) total = total + vload(bias + c);
    bf16 rounded[16];
    vstore_bf16(rounded, total);
    const vf x = vload_bf16(rounded);
    vstore_bf16(rounded, x * sigmoid(x));
    vstore(out + c, vload_bf16(rounded));
  }
}

INLINE float sigmoid1(float x) {
  const float small = exp1(x < 0 ? x : -x);
  return (x >= 0 ? 1.0f : small) / (1.0f + small);
}

INLINE float softplus1(float x) {
  const float small = exp1(x < 0 ? x : -x), more = 1.0f + small;
  // log1p(small): corrects the rounding of 1 + small, which matters for steps near 0.001.
  const float log = more == 1.0f ? small : log1(more) * (small / (more - 1.0f));
  return (x > 0 ? x : 0.0f) + log;
}

}  // namespace
