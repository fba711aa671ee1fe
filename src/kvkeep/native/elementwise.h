// What a decoder layer computes row by row: norms, angles of rotary embeddings, rotations, gates.
#pragma once

#include "kvkeep.h"
#include "runtime.h"
#include "vectors.h"

namespace {

// The mean of a row.
static float mean_of(const bf16* x, int64_t width) {
  const int64_t vectors = width / 16 * 16;
  vf total = vset(0.0f);
  float rest = 0;
  for (int64_t i = 0; i < vectors; i += 16) total = total + vload_bf16(x + i);
  for (int64_t i = vectors; i < width; i++) rest += widen(x[i]);
  return (sum(total) + rest) / float(width);
}

// Norm of a row. With `addend` it is that of x + addend, which is rounded and written to `total`.
static void norm_row(const bf16* x, const bf16* addend, bf16* total, const KvNorm& n, int64_t width, bf16* y) {
  const int64_t vectors = width / 16 * 16;
  const float *weight = numbers<float>(n.weight), *bias = numbers<float>(n.bias);
  vf squares = vset(0.0f);
  float rest = 0;
  const bf16* from = addend ? total : x;
  if (addend) {
    for (int64_t i = 0; i < vectors; i += 16) vstore_bf16(total + i, vload_bf16(x + i) + vload_bf16(addend + i));
    for (int64_t i = vectors; i < width; i++) total[i] = narrow(widen(x[i]) + widen(addend[i]));
  }
  const float mean = n.centred ? mean_of(from, width) : 0.0f;  // no number changes where 0 is subtracted
  const auto read = [&](int64_t i) { return vload_bf16(from + i) - vset(mean); };
  const auto read_one = [&](int64_t i) { return widen(from[i]) - mean; };
  for (int64_t i = 0; i < vectors; i += 16) {
    const vf v = read(i);
    squares = vfma(v, v, squares);
  }
  for (int64_t i = vectors; i < width; i++) rest += read_one(i) * read_one(i);
  const float factor = 1.0f / __builtin_sqrtf((sum(squares) + rest) / float(width) + n.eps);
  for (int64_t i = 0; i < vectors; i += 16) {
    const vf v = read(i) * vset(factor) * vload(weight + i);
    vstore_bf16(y + i, bias ? v + vload(bias + i) : v);
  }
  for (int64_t i = vectors; i < width; i++) {
    const float v = read_one(i) * factor * weight[i];
    y[i] = narrow(bias ? v + bias[i] : v);
  }
}

static void norm_rows(const bf16* x, const KvNorm& n, int64_t rows, int64_t width, bf16* y, bool has_team) {
  auto norm = [&](int64_t r) { norm_row(x + r * width, nullptr, nullptr, n, width, y + r * width); };
  for_each_row(rows, norm, has_team);
}

// Sine and cosine by polynomials in double precision: those of C libraries differ.
INLINE void sine_and_cosine(double x, double* sine, double* cosine) {
  if (!(x > -1e15 && x < 1e15)) { *sine = *cosine = __builtin_nan(""); return; }  // int64_t does not hold the turns
  const double turns = x * 0.63661977236758134308;  // quarters
  const int64_t n = int64_t(turns < 0 ? turns - 0.5 : turns + 0.5);
  double r = x - double(n) * 1.57079632679489655800;
  r = r - double(n) * 6.12323399573676603587e-17;
  const double z = r * r;
  double s = 1.58969099521155010221e-10, c = -1.13596475577881948265e-11;
  const double sines[] = {-2.50507602534068634195e-8, 2.75573137070700676789e-6, -1.98412698298579493134e-4,
                          8.33333333332248946124e-3, -1.66666666666666324348e-1};
  const double cosines[] = {2.08757232129817482790e-9, -2.75573143513906633035e-7, 2.48015872894767294178e-5,
                            -1.38888888888741095749e-3, 4.16666666666666019037e-2};
  for (double term : sines) { s = s * z; s = s + term; }
  for (double term : cosines) { c = c * z; c = c + term; }
  s = s * z; s = s * r; s = r + s;
  c = c * z; c = c * z; c = 1.0 - 0.5 * z + c;
  *sine = n & 1 ? (n & 2 ? -c : c) : (n & 2 ? -s : s);
  *cosine = n & 1 ? (n & 2 ? s : -s) : (n & 2 ? -c : c);
}

static KvStatus norm(const KvNorm* n, KvArray x, KvArray y) {
  const int64_t width = n->weight.length;
  norm_rows(numbers<bf16>(x), *n, x.length / width, width, numbers<bf16>(y), false);
  return KV_DONE;
}

static KvStatus angles(KvArray all, KvArray of_channels, float scaling, KvArray cosines, KvArray sines) {
  const int64_t *positions = numbers<int64_t>(all), half = of_channels.length;
  const float* frequencies = numbers<float>(of_channels);
  for_each_row(all.length, [&](int64_t r) {
    bf16 *cosine = numbers<bf16>(cosines) + r * 2 * half, *sine = numbers<bf16>(sines) + r * 2 * half;
    for (int64_t i = 0; i < half; i++) {
      double s, c;
      sine_and_cosine(double(float(positions[r]) * frequencies[i]), &s, &c);
      cosine[i] = cosine[half + i] = narrow(float(c) * scaling);
      sine[i] = sine[half + i] = narrow(float(s) * scaling);
    }
  }, false);
  return KV_DONE;
}

// Rotates the first channels of a head, in place. What is rounded is what transformers rounds.
static void rotate(bf16* head, const bf16* cosine, const bf16* sine, int64_t channels, int64_t rotation) {
  const bool pairs = rotation != KV_HALVES;
  const int64_t half = channels / 2;
  int64_t i = 0;
  bf16 rounded[16];
  auto times = [&](vf a, vf b) { vstore_bf16(rounded, a * b); return vload_bf16(rounded); };
  for (; !pairs && i + 16 <= half; i += 16) {
    const vf a = vload_bf16(head + i), b = vload_bf16(head + half + i), zero = vset(0.0f);
    const vf low = times(a, vload_bf16(cosine + i)), less = times(zero - b, vload_bf16(sine + i));
    const vf high = times(b, vload_bf16(cosine + half + i)), more = times(a, vload_bf16(sine + half + i));
    vstore_bf16(head + i, low + less);
    vstore_bf16(head + half + i, high + more);
  }
  const auto product = [&](float x, bf16 by) {
    const float exact = x * widen(by);
    return rotation >= KV_EXACT_PAIRS ? exact : widen(narrow(exact));
  };
  for (; i < half; i++) {
    bf16 &first = head[pairs ? 2 * i : i], &second = head[pairs ? 2 * i + 1 : half + i];
    const int64_t at = rotation == KV_SPREAD_PAIRS ? 2 * i : i;  // of the angle of both
    const float a = widen(first), b = widen(second);
    first = narrow(product(a, cosine[at]) + product(-b, sine[at]));
    second = narrow(product(b, cosine[pairs ? at : half + i]) + product(a, sine[pairs ? at : half + i]));
  }
}

// Multiplies a row by a number, in place.
static void scale_row(float by, int64_t width, bf16* y) {
  if (by == 1.0f) return;
  for (int64_t i = 0; i < width; i++) y[i] = narrow(widen(y[i]) * by);
}

// Clips a row to -bound .. bound, in place. 0: there is no bound.
static void clip_row(float bound, int64_t width, bf16* y) {
  if (bound == 0.0f) return;
  const bf16 least = narrow(-bound), greatest = narrow(bound);
  for (int64_t i = 0; i < width; i++) y[i] = widen(y[i]) > bound ? greatest : widen(y[i]) < -bound ? least : y[i];
}

// Adds a row to y.
static void add_row(const bf16* x, int64_t width, bf16* y) {
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) vstore_bf16(y + i, vload_bf16(y + i) + vload_bf16(x + i));
  for (; i < width; i++) y[i] = narrow(widen(y[i]) + widen(x[i]));
}

INLINE vf sigmoid(vf x) {
  const vf zero = vset(0.0f), one = vset(1.0f), minus = zero - x;
  const vf small = vexp(vmin(x, minus));
  return vwhere_at_least(x, zero, one, small) / (one + small);
}

// y = attended * sigmoid(y): attention's output times its gates.
static void open_gates(const bf16* attended, int64_t width, bf16* y) {
  bf16 rounded[16], rest[16] = {};
  for (int64_t i = 0; i < width; i += 16) {
    const bool full = i + 16 <= width;
    if (!full) memcpy(rest, y + i, size_t(width - i) * 2);
    vstore_bf16(rounded, sigmoid(vload_bf16(full ? y + i : rest)));
    for (int64_t j = 0; j < 16 && i + j < width; j++) y[i + j] = narrow(widen(attended[i + j]) * widen(rounded[j]));
  }
}

// The complementary error function of x >= 0 (W. H. Press et al., Numerical Recipes, 6.2).
INLINE vf error_complement(vf x) {
  const float terms[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f,
                         0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
  const vf one = vset(1.0f), t = one / (one + vset(0.5f) * x);
  vf power = vset(0.17087277f);
  for (float term : terms) power = vset(term) + t * power;
  return t * vexp(power - x * x);
}

INLINE vf activated(vf x, int64_t activation) {
  const vf zero = vset(0.0f);
  if (activation == KV_GELU) {
    const vf minus = zero - x, half = vset(0.5f) * error_complement(vset(0.70710678f) * vmax(x, minus));
    return x * vwhere_at_least(x, zero, vset(1.0f) - half, half);
  }
  if (activation == KV_RELU2) return vwhere_at_least(zero, x, zero, x * x);
  return x * sigmoid(activation == KV_SILU ? x : vset(1.5957691216f) * (x + vset(0.044715f) * x * x * x));
}

// y = activation(gate) * up. x: gate and up of a row, side by side; or only ups, and y = activation(up).
static void gate_row(const bf16* x, int64_t width, int64_t activation, bool gated, bf16* y) {
  for (int64_t i = 0; i < width; i += 16) {
    bf16 rounded[16];
    vstore_bf16(gated ? rounded : y + i, activated(vload_bf16(x + i), activation));
    if (gated) vstore_bf16(y + i, vload_bf16(rounded) * vload_bf16(x + width + i));
  }
}

}  // namespace
