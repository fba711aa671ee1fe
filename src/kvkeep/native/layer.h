// What a decoder layer laid out like Llama's does beside attention, and all layers one after the other.
#pragma once

#include "attention.h"
#include "matmul.h"

namespace {

constexpr int64_t ROWS_OF_TASK = 16;

// body(row) of all rows: by all threads where there are many.
template <class F> INLINE void each_row(int64_t rows, const F& body) {
  if (rows <= DIRECT) {
    for (int64_t r = 0; r < rows; r++) body(r);
    return;
  }
  each((rows + ROWS_OF_TASK - 1) / ROWS_OF_TASK, [&](int64_t task) {
    for (int64_t r = task * ROWS_OF_TASK; r < min64(rows, (task + 1) * ROWS_OF_TASK); r++) body(r);
  });
}

// RMSNorm of a row, weighted. plus: added to the input first, the sum, rounded, written to `both`.
static void norm_row(const bf16* x, const bf16* plus, bf16* both, const float* weight, float eps, int64_t width,
                     bf16* y) {
  int64_t even = width / 16 * 16;
  vf squares = vset(0.0f);
  float rest = 0;
  const bf16* from = plus ? both : x;
  if (plus) {
    for (int64_t i = 0; i < even; i += 16) vstore_bf16(both + i, vload_bf16(x + i) + vload_bf16(plus + i));
    for (int64_t i = even; i < width; i++) both[i] = narrow(widen(x[i]) + widen(plus[i]));
  }
  for (int64_t i = 0; i < even; i += 16) {
    vf v = vload_bf16(from + i);
    squares = vfma_bf16(v, v, squares);
  }
  for (int64_t i = even; i < width; i++) rest += widen(from[i]) * widen(from[i]);
  const float factor = 1.0f / __builtin_sqrtf((sum(squares) + rest) / float(width) + eps);
  for (int64_t i = 0; i < even; i += 16) vstore_bf16(y + i, vload_bf16(from + i) * vset(factor) * vload(weight + i));
  for (int64_t i = even; i < width; i++) y[i] = narrow(widen(from[i]) * factor * weight[i]);
}

static void norm(const bf16* x, const float* weight, float eps, int64_t rows, int64_t width, bf16* y) {
  each_row(rows, [&](int64_t r) { norm_row(x + r * width, nullptr, nullptr, weight, eps, width, y + r * width); });
}

// Sine and cosine by polynomials of double precision: those of the C library differ from one machine to another.
INLINE void sine_and_cosine(double x, double* sine, double* cosine) {
  if (!(x > -1e15 && x < 1e15)) { *sine = *cosine = __builtin_nan(""); return; }  // no int64_t has its turns
  const double turns = x * 0.63661977236758134308;  // of a quarter
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

static void angles(const int64_t* positions, int64_t count, const float* frequencies, int64_t half, float scaling,
                   bf16* cosines, bf16* sines) {
  each_row(count, [&](int64_t r) {
    bf16 *cosine = cosines + r * 2 * half, *sine = sines + r * 2 * half;
    for (int64_t i = 0; i < half; i++) {
      double s, c;
      sine_and_cosine(double(float(positions[r]) * frequencies[i]), &s, &c);
      cosine[i] = cosine[half + i] = narrow(float(c) * scaling);
      sine[i] = sine[half + i] = narrow(float(s) * scaling);
    }
  });
}

// In place: the halves of a head turn together, each product and the sum rounded as transformers does.
static void turn(bf16* head, const bf16* cosine, const bf16* sine, int64_t dim) {
  const int64_t half = dim / 2;
  int64_t i = 0;
  bf16 rounded[16];
  auto times = [&](vf a, vf b) { vstore_bf16(rounded, a * b); return vload_bf16(rounded); };
  for (; i + 16 <= half; i += 16) {
    const vf a = vload_bf16(head + i), b = vload_bf16(head + half + i), zero = vset(0.0f);
    const vf low = times(a, vload_bf16(cosine + i)), less = times(zero - b, vload_bf16(sine + i));
    const vf high = times(b, vload_bf16(cosine + half + i)), more = times(a, vload_bf16(sine + half + i));
    vstore_bf16(head + i, low + less);
    vstore_bf16(head + half + i, high + more);
  }
  for (; i < half; i++) {
    const float a = widen(head[i]), b = widen(head[i + half]);
    const float low = widen(narrow(a * widen(cosine[i]))), less = widen(narrow(-b * widen(sine[i])));
    const float high = widen(narrow(b * widen(cosine[i + half]))), more = widen(narrow(a * widen(sine[i + half])));
    head[i] = narrow(low + less);
    head[i + half] = narrow(high + more);
  }
}

INLINE vf sigmoid(vf x) {
  const vf zero = vset(0.0f), one = vset(1.0f), minus = zero - x;
  const vf small = vexp(vmin(x, minus));
  return vwhere_at_least(x, zero, one, small) / (one + small);
}

// x: gates and values of a row, side by side.
static void gate_row(const bf16* x, int64_t width, int64_t activation, bf16* y) {
  for (int64_t i = 0; i < width; i += 16) {
    const vf g = vload_bf16(x + i);
    const vf inside = activation == KV_SILU ? g : vset(1.5957691216f) * (g + vset(0.044715f) * g * g * g);
    bf16 rounded[16];
    vstore_bf16(rounded, g * sigmoid(inside));
    vstore_bf16(y + i, vload_bf16(rounded) * vload_bf16(x + width + i));
  }
}

static int64_t elements_to_enter(const KvLayer& l) { return l.hidden + (l.heads + 2 * l.kv_heads) * l.dim; }
static int64_t elements_to_leave(const KvLayer& l) { return l.hidden + 3 * l.intermediate; }

static void enter(const KvLayer* l, const bf16* x, int64_t batch, int64_t n, const bf16* cos, const bf16* sin,
                  int shared, bf16* query, bf16* key, bf16* value, bf16* scratch) {
  const int64_t rows = batch * n, dim = l->dim, heads = l->heads, kv_heads = l->kv_heads;
  const int64_t across = (heads + 2 * kv_heads) * dim;
  bf16 *normed = scratch, *projected = scratch + rows * l->hidden;
  norm(x, l->input_norm, l->eps, rows, l->hidden, normed);
  Prepared inputs{normed, rows, l->hidden, l->hidden};
  for (int64_t i = 0, at = 0; i < 3 && l->qkv[i].outputs; at += l->qkv[i++].outputs)
    multiply(l->qkv[i], inputs, l->qkv_bias[i], projected + at, across);
  each_row(rows, [&](int64_t r) {
    const int64_t b = r / n, i = r % n;
    const bf16 *c = cos + (shared ? i : r) * dim, *s = sin + (shared ? i : r) * dim;
    for (int64_t h = 0; h < heads + 2 * kv_heads; h++) {
      bf16* head = projected + r * across + h * dim;
      const bool is_query = h < heads, is_key = !is_query && h < heads + kv_heads;
      const float* weight = is_query ? l->query_norm : is_key ? l->key_norm : nullptr;
      if (weight) norm_row(head, nullptr, nullptr, weight, l->eps, dim, head);
      if (is_query || is_key) turn(head, c, s, dim);
      bf16* to = is_query ? query + ((b * heads + h) * n + i) * dim
                 : is_key ? key + ((b * kv_heads + h - heads) * n + i) * dim
                          : value + ((b * kv_heads + h - heads - kv_heads) * n + i) * dim;
      memcpy(to, head, dim * 2);
    }
  });
}

static void leave(const KvLayer* l, const bf16* attention, const bf16* residual, int64_t rows, bf16* y, bf16* scratch) {
  const int64_t hidden = l->hidden, across = l->heads * l->dim, width = l->intermediate;
  bf16 *normed = scratch, *gates = normed + rows * hidden, *inner = gates + rows * 2 * width;
  Prepared attended{attention, rows, across, across};
  multiply(l->out, attended, l->out_bias, normed, hidden);
  each_row(rows, [&](int64_t r) {
    bf16* out = normed + r * hidden;
    if (l->post_attention_norm) norm_row(out, nullptr, nullptr, l->post_attention_norm, l->eps, hidden, out);
    norm_row(residual + r * hidden, out, y + r * hidden, l->pre_mlp_norm, l->eps, hidden, out);
  });
  Prepared inputs{normed, rows, hidden, hidden};
  for (int64_t i = 0, at = 0; i < 2 && l->gates[i].outputs; at += l->gates[i++].outputs)
    multiply(l->gates[i], inputs, nullptr, gates + at, 2 * width);
  each_row(rows, [&](int64_t r) { gate_row(gates + r * 2 * width, width, l->activation, inner + r * width); });
  Prepared gated{inner, rows, width, width};
  multiply(l->down, gated, nullptr, normed, hidden);
  each_row(rows, [&](int64_t r) {
    bf16 *out = normed + r * hidden, *to = y + r * hidden;
    if (l->post_mlp_norm) norm_row(out, nullptr, nullptr, l->post_mlp_norm, l->eps, hidden, out);
    int64_t i = 0;
    for (; i + 16 <= hidden; i += 16) vstore_bf16(to + i, vload_bf16(to + i) + vload_bf16(out + i));
    for (; i < hidden; i++) to[i] = narrow(widen(to[i]) + widen(out[i]));
  });
}

static void before_attention(const KvLayer* l, const bf16* x, int64_t batch, int64_t n, const bf16* cos, const bf16* sin,
                        int shared, bf16* query, bf16* key, bf16* value) {
  bf16* scratch = (bf16*)kv_scratch(KV_SCRATCH_LAYER, batch * n * elements_to_enter(*l) * 2);
  with_team(batch * n <= DIRECT, [&] { enter(l, x, batch, n, cos, sin, shared, query, key, value, scratch); });
}

static void after_attention(const KvLayer* l, const bf16* attention, const bf16* residual, int64_t rows, bf16* y) {
  bf16* scratch = (bf16*)kv_scratch(KV_SCRATCH_LAYER, rows * elements_to_leave(*l) * 2);
  with_team(rows <= DIRECT, [&] { leave(l, attention, residual, rows, y, scratch); });
}

static void run_layers(const KvLayer* const* layers, KvStep* const* const* steps, const float* scaling, int64_t count,
                       int64_t sessions, int64_t tokens, const bf16* cos, const bf16* sin, bf16* x) {
  const KvLayer& l = *layers[0];
  const int64_t queries = l.heads * l.dim, keys = l.kv_heads * l.dim;
  const int64_t inside = max64(elements_to_enter(l), elements_to_leave(l));
  bf16* scratch = (bf16*)kv_scratch(KV_SCRATCH_LAYER, tokens * ((inside + 2 * queries + 2 * keys) * 2 + l.heads * 4));
  auto take = [&](int64_t width) { bf16* at = scratch; scratch += tokens * width; return at; };
  float* lse = (float*)take(2 * l.heads);
  bf16 *query = take(queries), *key = take(keys), *value = take(keys), *attended = take(queries), *rest = take(inside);
  with_team(tokens <= DIRECT, [&] {
    for (int64_t i = 0; i < count; i++) {
      enter(layers[i], x, tokens, 1, cos, sin, 0, query, key, value, rest);
      attend_sessions(steps[i], sessions, query, key, value, tokens, l.heads, 1, scaling[i], attended, lse);
      leave(layers[i], attended, x, tokens, x, rest);
    }
  });
}

}  // namespace
