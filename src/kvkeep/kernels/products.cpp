// Products with small weights, and what a decoder layer laid out like Llama's does between them.

#include "common.h"

// ---- products: y = x W^T, W in panels of 32 outputs ----------------------------------------------------------------
//
// codes, for each panel: 4 bits: [K / 8][32 outputs] dwords of 8 codes, code 2 j + e at bit 4 j + 16 e; 8 bits:
// [K / 2][32 outputs][2] signed bytes; 16: [K / 2][32 outputs][2] bfloat16. A weight is scale * code + offset, scales
// and offsets by group of k: [panel][groups][32], float16 or float32; 16 bits have neither.

struct Weights {
  const void *codes, *scales, *offsets;
  int64_t inputs, outputs, bits, group, half;  // half: scales are float16
};

constexpr int AHEAD = 1024;
constexpr int ROWS = 8, WIDE = 6, MOST = 8;  // of a tile: rows, those where panels are written out, and panels

struct Table { bf16 codes[32]; };
static constexpr Table table() {  // the integers 0..15 in bfloat16, twice
  Table t{};
  const bf16 of[16] = {0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                       0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
  for (int i = 0; i < 32; i++) t.codes[i] = of[i & 15];
  return t;
}
alignas(64) static constexpr Table NIBBLES = table();

template <int BITS> static inline __attribute__((always_inline)) vi pair_of(const char* panel, int64_t pair, int more, int side) {
  // the codes of 16 outputs for inputs 2 (pair + more) and the next, as pairs of bfloat16; for 4 bits pair is whole dwords
  if constexpr (BITS == 16) return load<vi>(panel + (pair + more) * 128 + side * 64);
  if constexpr (BITS == 4) {
    vi v = load<vi>(panel + pair * 32 + side * 64) >> (4 * more);
#if defined(__AVX512BW__)
    return (vi)_mm512_permutexvar_epi16((__m512i)v, _mm512_load_si512(&NIBBLES));
#else
    vi r; for (int i = 0; i < 16; i++) r[i] = NIBBLES.codes[v[i] & 15] | (NIBBLES.codes[(v[i] >> 16) & 15] << 16);
    return r;
#endif
  }
  const char* at = panel + (pair + more) * 64 + side * 32;
#if defined(__AVX512BF16__)
  __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
  __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(at + 16))));
  return (vi)_mm512_cvtne2ps_pbh(high, low);
#else
  vi r; const int8_t* c = (const int8_t*)at;
  for (int i = 0; i < 16; i++) r[i] = narrow(c[2 * i]) | (uint32_t(narrow(c[2 * i + 1])) << 16);
  return r;
#endif
}

static inline vf scale_of(const void* scales, int64_t at, bool half) {  // 16 of them
#if defined(__AVX512F__)
  if (half) return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)((const uint16_t*)scales + at)));
#else
  if (half) { vf r; for (int i = 0; i < 16; i++) { _Float16 h; memcpy(&h, (const uint16_t*)scales + at + i, 2); r[i] = float(h); } return r; }
#endif
  return load<vf>((const float*)scales + at);
}

// P panels for R rows, as many at once as there are registers for their sums. codes: the first panel's, `size` bytes
// apart. x: rows of inputs; sums: of each row and group, where there are offsets; out: [P][R][32].
template <int BITS, int R, int P>
static inline __attribute__((always_inline)) void panel_rows(const Weights& w, int64_t panel, const char* codes, int64_t size,
                                                             const bf16* x, int64_t stride, const float* sums, int64_t groups,
                                                             float* out) {
  const int64_t pairs = w.inputs / 2, each = w.scales ? w.group / 2 : pairs;
  for (int64_t g = 0, start = 0; start < pairs; g++, start += each) {
    vf part[2 * P][R];
#pragma GCC unroll 16
    for (int c = 0; c < 2 * P; c++)
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) part[c][r] = vf{};
    constexpr int STEP = BITS == 4 ? 4 : 1, LINES = BITS == 16 ? 2 : BITS == 8 ? 1 : 2;  // pairs in a dword
    for (int64_t p = start; p < start + each; p += STEP) {
      int64_t soon = p * 8 * BITS + AHEAD;  // behind a panel's end lie those that come next
      if (soon >= size) soon += (P - 1) * size;
      if (R < 4)
#pragma GCC unroll 8
        for (int c = 0; c < P; c++)
          for (int line = 0; line < LINES; line++) __builtin_prefetch(codes + c * size + soon + line * 64, 0, 2);
#pragma GCC unroll 4
      for (int j = 0; j < STEP; j++) {
        vi row[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) row[r] = splati(load<int32_t>(x + r * stride + 2 * (p + j)));
#pragma GCC unroll 16
        for (int c = 0; c < 2 * P; c++) {
          vi weights = pair_of<BITS>(codes + c / 2 * size, p, j, c & 1);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) part[c][r] = dot(part[c][r], row[r], weights);
        }
      }
    }
#pragma GCC unroll 16
    for (int c = 0; c < 2 * P; c++) {
      if (R < 4 && !(c & 1) && w.scales) {
        int64_t soon = ((panel + c / 2) * groups + g + 4) * 32 * (w.half ? 2 : 4);
        __builtin_prefetch((const char*)w.scales + soon);
        if (w.offsets) __builtin_prefetch((const char*)w.offsets + soon);
      }
      float* total = out + (c / 2 * R) * 32 + (c & 1) * 16;
      if (!w.scales) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) store(total + r * 32, part[c][r]);
        continue;
      }
      int64_t at = ((panel + c / 2) * groups + g) * 32 + (c & 1) * 16;
      vf scale = scale_of(w.scales, at, w.half), offset = w.offsets ? scale_of(w.offsets, at, w.half) : vf{};
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        vf sum_so_far = g ? load<vf>(total + r * 32) : vf{};
        sum_so_far = fma16(scale, part[c][r], sum_so_far);
        if (w.offsets) sum_so_far = fma16(offset, splat(sums[r * groups + g]), sum_so_far);
        store(total + r * 32, sum_so_far);
      }
    }
  }
}

// Rows of a tile and panels at once: 14 to 24 sums, beside registers for rows and codes.
template <int BITS>
static int panels_of(int rows, int64_t left, const Weights& w, int64_t panel, const char* codes, int64_t size, const bf16* x,
                     int64_t stride, const float* sums, int64_t groups, float* out) {
#define TAKE(R, P) if (left >= P || P == 1) { panel_rows<BITS, R, P>(w, panel, codes, size, x, stride, sums, groups, out); return P; }
  switch (rows) {
    case 1: TAKE(1, 4) TAKE(1, 3) TAKE(1, 1)
    case 2: TAKE(2, 5) TAKE(2, 4) TAKE(2, 3) TAKE(2, 1)
    case 3: TAKE(3, 4) TAKE(3, 3) TAKE(3, 2) TAKE(3, 1)
    case 4: TAKE(4, 3) TAKE(4, 2) TAKE(4, 1)
    case 5: TAKE(5, 2) TAKE(5, 1)
    case 6: TAKE(6, 2) TAKE(6, 1)
    case 7: TAKE(7, 1)
    default: TAKE(8, 1)
  }
#undef TAKE
}

static int64_t panel_bytes(const Weights& w) { return w.inputs * 32 * w.bits / 8; }
static int64_t groups_of(const Weights& w) { return w.scales ? w.inputs / w.group : 1; }

static inline vf sigmoid(vf x) {
  vf small = exp16(x < vf{} ? x : -x);
  return (x < vf{} ? small : splat(1.f)) / (splat(1.f) + small);
}
static void sum_groups(const bf16* x, int64_t rows, int64_t stride, int64_t inputs, int64_t group, float* sums) {
  int64_t groups = inputs / group;
#pragma omp parallel for schedule(static) if (rows > 16)
  for (int64_t r = 0; r < rows; r++)
    for (int64_t g = 0; g < groups; g++) {
      vf total = vf{};
      for (int64_t k = 0; k < group; k += 16) total += wide16(x + r * stride + g * group + k);
      sums[r * groups + g] = sum(total);
    }
}

constexpr int64_t FEW = 2 * ROWS;  // rows up to which a product is microseconds
constexpr int64_t WRITTEN = FEW;  // rows beyond which a panel is written out once instead of read anew by each tile

template <int BITS>
static void panels(const Weights& w, const bf16* x, int64_t rows, int64_t stride, const float* sums, const bf16* bias,
                   bf16* y, int64_t across) {
  int64_t count = (w.outputs + 31) / 32, groups = groups_of(w), size = panel_bytes(w);
  bool written = BITS != 16 && rows > WRITTEN;
  int64_t together = written || rows >= 4 ? 2 : MOST;  // panels of a task
  int64_t workers = threads(), tasks = (count + together - 1) / together;
  if (tasks < 4 * workers) tasks = std::min(count, (tasks + workers - 1) / workers * workers);  // as many for each
  each(tasks, [&](int64_t task) {
    int64_t first = count * task / tasks, last = count * (task + 1) / tasks, step = size;
    const char* codes = (const char*)w.codes + first * size;
    if (written) {
      step = w.inputs * 64;
      char* out = (char*)own.at(0, (last - first) * step);
      for (int64_t panel = first; panel < last; panel++)
        for (int64_t p = 0; p < w.inputs / 2; p++)
          for (int side = 0; side < 2; side++)
            store(out + (panel - first) * step + p * 128 + side * 64,
                  BITS == 4 ? pair_of<4>(codes + (panel - first) * size, p & ~3, int(p & 3), side)
                            : pair_of<BITS>(codes + (panel - first) * size, p, 0, side));
      codes = out;
    }
    int64_t tiles = (rows + ROWS - 1) / ROWS, each = written ? WIDE : (rows + tiles - 1) / tiles;  // as many rows in each
    for (int64_t r = 0; r < rows; r += each) {
      int tile = int(std::min<int64_t>(each, rows - r));
      alignas(64) float out[MOST * ROWS * 32];
      const float* own_sums = sums ? sums + r * groups : nullptr;
      for (int64_t panel = first; panel < last;) {
        const char* at = codes + (panel - first) * step;
        const bf16* from = x + r * stride;
        int done = written ? panels_of<16>(tile, last - panel, w, panel, at, step, from, stride, own_sums, groups, out)
                           : panels_of<BITS>(tile, last - panel, w, panel, at, step, from, stride, own_sums, groups, out);
        for (int p = 0; p < done; p++)
          for (int i = 0; i < tile; i++) {
            int64_t start = (panel + p) * 32, width = std::min<int64_t>(32, w.outputs - start);
            float* row = out + (p * tile + i) * 32;
            bf16* to = y + (r + i) * across + start;
            if (bias) for (int64_t n = 0; n < width; n++) row[n] += wide(bias[start + n]);
            if (width == 32) { narrow16(to, load<vf>(row)); narrow16(to + 16, load<vf>(row + 16)); }
            else for (int64_t n = 0; n < width; n++) to[n] = narrow(row[n]);
          }
        panel += done;
      }
    }
  });
}

static void product(const Weights& w, const bf16* x, int64_t rows, int64_t stride, const bf16* bias, bf16* y, int64_t across) {
  float* sums = nullptr;
  if (w.offsets) {
    sums = (float*)own.at(3, rows * groups_of(w) * 4);
    sum_groups(x, rows, stride, w.inputs, w.group, sums);
  }
  switch (w.bits) {
    case 4: return panels<4>(w, x, rows, stride, sums, bias, y, across);
    case 8: return panels<8>(w, x, rows, stride, sums, bias, y, across);
    default: return panels<16>(w, x, rows, stride, sums, bias, y, across);
  }
}

// ---- what lies between products --------------------------------------------------------------------------------

// RMSNorm of rows of `width`, weighted by float32 `weight`. plus: added to the input first, the sum written to `sums`.
static void norm_row(const bf16* x, const bf16* plus, bf16* both, const float* weight, float eps, int64_t width, bf16* y) {
  vf squares = vf{};
  int64_t whole = width / 16 * 16;
  float rest = 0;
  const bf16* from = plus ? both : x;
  if (plus) {
    for (int64_t i = 0; i < whole; i += 16) narrow16(both + i, wide16(x + i) + wide16(plus + i));
    for (int64_t i = whole; i < width; i++) both[i] = narrow(wide(x[i]) + wide(plus[i]));
  }
  for (int64_t i = 0; i < whole; i += 16) { vf v = wide16(from + i); squares = fma16(v, v, squares); }
  for (int64_t i = whole; i < width; i++) rest += wide(from[i]) * wide(from[i]);
  float factor = 1.f / std::sqrt((sum(squares) + rest) / float(width) + eps);
  for (int64_t i = 0; i < whole; i += 16) narrow16(y + i, wide16(from + i) * splat(factor) * load<vf>(weight + i));
  for (int64_t i = whole; i < width; i++) y[i] = narrow(wide(from[i]) * factor * weight[i]);
}

static void norms(const bf16* x, const bf16* plus, bf16* both, const float* weight, float eps, int64_t rows,
                  int64_t width, bf16* y) {
#pragma omp parallel for schedule(static) if (rows > 16)
  for (int64_t r = 0; r < rows; r++)
    norm_row(x + r * width, plus ? plus + r * width : nullptr, both ? both + r * width : nullptr, weight, eps, width, y + r * width);
}

// In place: the halves of a head turn together, each product and the sum rounded as transformers does.
static inline void turn(bf16* head, const bf16* cos, const bf16* sin, int64_t dim) {
  int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i++) {
    float a = wide(head[i]), b = wide(head[i + half]);
    float low = wide(narrow(a * wide(cos[i]))) + wide(narrow(-b * wide(sin[i])));
    float high = wide(narrow(b * wide(cos[i + half]))) + wide(narrow(a * wide(sin[i + half])));
    head[i] = narrow(low); head[i + half] = narrow(high);
  }
}

static void gated(const bf16* x, int64_t rows, int64_t width, int kind, bf16* y) {  // x: gates and values, side by side
#pragma omp parallel for schedule(static) if (rows > 16)
  for (int64_t r = 0; r < rows; r++) {
    const bf16 *gate = x + r * 2 * width, *up = gate + width;
    for (int64_t i = 0; i < width; i += 16) {
      vf g = wide16(gate + i);
      vf inner = kind == 0 ? g : splat(1.5957691216f) * (g + splat(0.044715f) * g * g * g);
      alignas(64) bf16 rounded[16];
      narrow16(rounded, g * sigmoid(inner));
      narrow16(y + r * width + i, wide16(rounded) * wide16(up + i));
    }
  }
}

struct Layer {  // the weights of a decoder layer laid out like Llama's; null: there is none
  Weights qkv[3], out, gates[2], down;  // several where their codes differ; without outputs: there is no more
  const bf16 *qkv_bias[3], *out_bias;
  const float *before, *query_norm, *key_norm, *after_attention, *before_mlp, *after_mlp;
  int64_t hidden, heads, kv_heads, dim, inner, kind;  // kind of gate: 0 silu, 1 gelu by tanh
  float eps;
};

// What enters attention: x (batch * n, hidden) is normalised, projected and turned; query, key, value: (batch, heads, n,
// dim). cos, sin: (batch or 1, n, dim), `shared` where 1.
static void enter_layer(const Layer* l, const bf16* x, int64_t batch, int64_t n, const bf16* cos, const bf16* sin, int shared,
                        bf16* query, bf16* key, bf16* value, bf16* normed, bf16* wide_rows) {
  int64_t rows = batch * n, dim = l->dim, across = (l->heads + 2 * l->kv_heads) * dim;
  norms(x, nullptr, nullptr, l->before, l->eps, rows, l->hidden, normed);
  for (int64_t i = 0, at = 0; i < 3 && l->qkv[i].outputs; at += l->qkv[i++].outputs)
    product(l->qkv[i], normed, rows, l->hidden, l->qkv_bias[i], wide_rows + at, across);
#pragma omp parallel for schedule(static) if (rows > 8)
  for (int64_t r = 0; r < rows; r++) {
    int64_t b = r / n, i = r % n;
    const bf16 *c = cos + (shared ? i : r) * dim, *s = sin + (shared ? i : r) * dim;
    for (int64_t h = 0; h < l->heads + 2 * l->kv_heads; h++) {
      bf16* head = wide_rows + r * across + h * dim;
      bool is_query = h < l->heads, is_key = !is_query && h < l->heads + l->kv_heads;
      const float* weight = is_query ? l->query_norm : is_key ? l->key_norm : nullptr;
      if (weight) norm_row(head, nullptr, nullptr, weight, l->eps, dim, head);
      if (is_query || is_key) turn(head, c, s, dim);
      bf16* to = is_query ? query + ((b * l->heads + h) * n + i) * dim
                 : is_key ? key + ((b * l->kv_heads + h - l->heads) * n + i) * dim
                          : value + ((b * l->kv_heads + h - l->heads - l->kv_heads) * n + i) * dim;
      memcpy(to, head, dim * 2);
    }
  }
}

// What leaves the layer: attention (rows, heads * dim), residual and y (rows, hidden), which may be one.
static void leave_layer(const Layer* l, const bf16* attention, const bf16* residual, int64_t rows, bf16* y, bf16* normed,
                        bf16* gates, bf16* inner) {
  int64_t across = l->heads * l->dim, hidden = l->hidden;
  product(l->out, attention, rows, across, l->out_bias, normed, hidden);
  if (l->after_attention) norms(normed, nullptr, nullptr, l->after_attention, l->eps, rows, hidden, normed);
  norms(residual, normed, y, l->before_mlp, l->eps, rows, hidden, normed);
  for (int64_t i = 0, at = 0; i < 2 && l->gates[i].outputs; at += l->gates[i++].outputs)
    product(l->gates[i], normed, rows, hidden, nullptr, gates + at, 2 * l->inner);
  gated(gates, rows, l->inner, int(l->kind), inner);
  product(l->down, inner, rows, l->inner, nullptr, normed, hidden);
  if (l->after_mlp) norms(normed, nullptr, nullptr, l->after_mlp, l->eps, rows, hidden, normed);
#pragma omp parallel for schedule(static) if (rows > 16)
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < hidden; i++) y[r * hidden + i] = narrow(wide(y[r * hidden + i]) + wide(normed[r * hidden + i]));
}

struct Arrival;  // of attention.cpp

extern "C" {

int kk_native() {
#if defined(__AVX512BF16__)
  return 2;
#elif defined(__AVX2__)
  return 1;
#else
  return 0;
#endif
}

void kk_product(const Weights* w, const bf16* x, int64_t rows, const bf16* bias, bf16* y, int64_t across) {
  product(*w, x, rows, w->inputs, bias, y, across);
}

void kk_norm(const bf16* x, const float* weight, float eps, int64_t rows, int64_t width, bf16* y) {
  norms(x, nullptr, nullptr, weight, eps, rows, width, y);
}

void kk_enter(const Layer* l, const bf16* x, int64_t batch, int64_t n, const bf16* cos, const bf16* sin, int shared,
              bf16* query, bf16* key, bf16* value, bf16* normed, bf16* wide_rows) {
  with_team(batch * n <= FEW, [&] { enter_layer(l, x, batch, n, cos, sin, shared, query, key, value, normed, wide_rows); });
}

void kk_leave(const Layer* l, const bf16* attention, const bf16* residual, int64_t rows, bf16* y, bf16* normed, bf16* gates,
              bf16* inner) {
  with_team(rows <= FEW, [&] { leave_layer(l, attention, residual, rows, y, normed, gates, inner); });
}

void kk_together(Arrival* const* arrivals, int64_t count, const bf16* query, const bf16* key, const bf16* value,
                 int64_t tokens, int64_t heads, int by_token, float scaling, bf16* out, float* lse);  // attention.cpp

// `count` layers laid out alike, one after the other, for tokens of sessions whose entries the kernel keeps and attends in
// all of them: arrivals and scaling by layer. cos, sin: (tokens, dim). x: (tokens, hidden), in place.
void kk_layers(const Layer* const* layers, Arrival* const* const* arrivals, const float* scaling, int64_t count,
               int64_t sessions, int64_t tokens, const bf16* cos, const bf16* sin, bf16* x) {
  const Layer& l = *layers[0];
  int64_t queries = l.heads * l.dim, keys = l.kv_heads * l.dim, each_token = l.hidden + 3 * queries + 4 * keys + 3 * l.inner;
  bf16* room = (bf16*)own.at(7, tokens * (each_token * 2 + l.heads * 4));
  auto take = [&](int64_t width) { bf16* at = room; room += tokens * width; return at; };
  float* lse = (float*)take(2 * l.heads);
  bf16 *normed = take(l.hidden), *wide_rows = take(queries + 2 * keys), *query = take(queries), *key = take(keys), *value = take(keys);
  bf16 *attended = take(queries), *gates = take(2 * l.inner), *inner = take(l.inner);
  with_team(tokens <= FEW, [&] {
    for (int64_t i = 0; i < count; i++) {
      enter_layer(layers[i], x, tokens, 1, cos, sin, 0, query, key, value, normed, wide_rows);
      kk_together(arrivals[i], sessions, query, key, value, tokens, l.heads, 1, scaling[i], attended, lse);
      leave_layer(layers[i], attended, x, tokens, x, normed, gates, inner);
    }
  });
}

}  // extern "C"
