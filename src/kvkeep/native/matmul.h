// Products y = x W^T: integers within a group of 32 inputs, one output in each lane.
//
// Inputs are rounded to 8 bits by groups of 32 (inputs.h), a group's products are summed as integers (dot.h), and a
// row's groups are added in order:
//   sum = fma(scale of weights * scale of inputs, integer sum, sum), then sum = fma(offset, inputs' sum, sum).
// With bfloat16, float16 and float32 weights the inputs are not rounded, and a sum is a chain of fused multiply-adds in
// the order of inputs. A product of two float32 is not exact, so that with these `plain` fuses as well.
// Either way an output's bits depend on its row and its weights, and on nothing else.
#pragma once

#include "inputs.h"
#include "unit.h"

namespace {

struct IntegerSums { I first, second; };     // of a row's group: of all of it, or of its halves

template <class U> INLINE IntegerSums sums_of(const I (&w)[8], const InputGroup& x) {
  if constexpr (U::HALVES)
    return {integer_sum<U::BITS, 0, 4>(w, x.codes, iset(-U::ZERO * x.first_half)),
            integer_sum<U::BITS, 4, 8>(w, x.codes, iset(-U::ZERO * x.second_half))};
  const I all = integer_sum<U::BITS, 0, 8>(w, x.codes, iset(-U::ZERO * x.total));
  return {all, all};
}

// A row's sum with a group's part.
template <class U> INLINE F add_group(F sum, const IntegerSums& integers, const InputGroup& x, const Scales& scales) {
  const F by = fset(x.scale);
  if constexpr (U::HALVES) {
    sum = ffma(fmul(scales.first, by), to_float(integers.first), sum);
    sum = ffma(fmul(scales.second, by), to_float(integers.second), sum);
    if constexpr (!U::OFFSETS) return sum;
    sum = ffma(scales.offset, fset(x.scale * float(x.first_half)), sum);
    return ffma(scales.second_offset, fset(x.scale * float(x.second_half)), sum);
  }
  sum = ffma(fmul(scales.first, by), to_float(integers.first), sum);
  return U::OFFSETS ? ffma(scales.offset, fset(x.sum), sum) : sum;
}

#if defined(KVKEEP_I8MM)
template <class U>
INLINE void sums_of_two(const I (&w)[8], const InputGroup& x, const InputGroup& y, IntegerSums& of_x,
                        IntegerSums& of_y) {
  constexpr int ZERO = U::ZERO;
  constexpr bool HALVES = U::HALVES;
  integer_sums_of_two<0, HALVES ? 4 : 8>(w, x.codes, y.codes, of_x.first, of_y.first);
  of_x.first = iadd(of_x.first, iset(-ZERO * (HALVES ? x.first_half : x.total)));
  of_y.first = iadd(of_y.first, iset(-ZERO * (HALVES ? y.first_half : y.total)));
  if constexpr (HALVES) {
    integer_sums_of_two<4, 8>(w, x.codes, y.codes, of_x.second, of_y.second);
    of_x.second = iadd(of_x.second, iset(-ZERO * x.second_half));
    of_y.second = iadd(of_y.second, iset(-ZERO * y.second_half));
  }
}
#endif

// Fetches what lies AHEAD of a group, bytes: the processor's own fetching ends with a page.
constexpr int64_t AHEAD = 4096;
template <class U> INLINE void fetch_ahead(const uint8_t* panel, int g) {
  if constexpr (!U::FETCHES) return;
  constexpr int BYTES = U::BYTES / U::GROUPS;
  UNROLLED for (int b = 0; b < BYTES; b += 64) __builtin_prefetch(panel + AHEAD + g * BYTES + b);
}

// Sums begin with 0, or with those of earlier groups, in `out`.
enum Start { AT_ZERO, AT_OUT };

// R rows with the units of a panel, NV vectors of outputs from `lane` on; sums in registers. A group has `stride` rows.
template <class U, int R, int NV>
static void few_rows(const uint8_t* panel, int64_t units, const InputGroup* x, int stride, int lane, Start start,
                     float* out) {
  F sums[NV][R];
  UNROLLED for (int v = 0; v < NV; v++)
    UNROLLED for (int r = 0; r < R; r++) sums[v][r] = start ? fload(out + r * PANEL + lane + v * W) : fset(0.0f);
  for (int64_t u = 0; u < units; u++, panel += U::BYTES) {
    U unit[NV];
    UNROLLED for (int v = 0; v < NV; v++) unit[v] = U::at(panel, lane + v * W);
    for (int g = 0; g < U::GROUPS; g++, x += stride) {
      if (lane == 0) fetch_ahead<U>(panel, g);
      UNROLLED for (int v = 0; v < NV; v++) {
        I w[8];
        weights_of(unit[v], g, w);
        const Scales scales = scales_of(unit[v], g);
        UNROLLED for (int r = 0; r < R; r++)
          sums[v][r] = add_group<U>(sums[v][r], sums_of<U>(w, x[r]), x[r], scales);
      }
    }
  }
  UNROLLED for (int v = 0; v < NV; v++)
    UNROLLED for (int r = 0; r < R; r++) fstore(out + r * PANEL + lane + v * W, sums[v][r]);
}

// Many rows with the units of a panel, W outputs from `lane` on: a group's codes stay in registers while rows pass.
template <class U>
static void many_rows(const uint8_t* panel, int64_t units, const InputGroup* x, int rows, int lane, Start start,
                      float* out) {
  alignas(64) float sums[ROW_TILE * W];
  for (int r = 0; r < rows; r++) fstore(sums + r * W, start ? fload(out + r * PANEL + lane) : fset(0.0f));
  for (int64_t u = 0; u < units; u++, panel += U::BYTES) {
    const U unit = U::at(panel, lane);
    for (int g = 0; g < U::GROUPS; g++, x += rows) {
      if (lane == 0) fetch_ahead<U>(panel, g);
      I w[8];
      weights_of(unit, g, w);
      const Scales scales = scales_of(unit, g);
      auto add = [&](int r, const IntegerSums& integers) {
        fstore(sums + r * W, add_group<U>(fload(sums + r * W), integers, x[r], scales));
      };
      int r = 0;
#if defined(KVKEEP_I8MM)
      for (; r + 2 <= rows; r += 2) {
        IntegerSums one, other;
        sums_of_two<U>(w, x[r], x[r + 1], one, other);
        add(r, one);
        add(r + 1, other);
      }
#endif
      for (; r < rows; r++) add(r, sums_of<U>(w, x[r]));
    }
  }
  for (int r = 0; r < rows; r++) fstore(out + r * PANEL + lane, fload(sums + r * W));
}

constexpr int ONE_ROW_VECTORS = W == 1 ? 1 : W == 4 ? 2 : PARTS;  // of a panel, that one row takes at a time

constexpr int FEW_ROWS = W == 16 ? 8 : 4;  // rows whose sums fit into registers beside the codes of a group

template <class U, int R = FEW_ROWS>
static void few_rows_of_units(const uint8_t* panel, int64_t units, const InputGroup* x, int rows, int stride,
                              Start start, float* out) {
  if constexpr (R > 1)
    if (rows < R) return few_rows_of_units<U, R - 1>(panel, units, x, rows, stride, start, out);
  constexpr int NV = R == 1 ? ONE_ROW_VECTORS : 1;
  for (int lane = 0; lane < PANEL; lane += NV * W) few_rows<U, R, NV>(panel, units, x, stride, lane, start, out);
}

// A tile of rows with the units of a panel.
template <class U>
static void rows_of_units(const uint8_t* panel, int64_t units, const InputGroup* x, int rows, Start start, float* out) {
  if constexpr (W == 16) {  // codes are unpacked for a tile, or eight rows: sums in memory would cost more
    if (rows == ROW_TILE) return few_rows<U, ROW_TILE, 1>(panel, units, x, rows, 0, start, out);
    for (int r = 0; r < rows; r += FEW_ROWS)
      few_rows_of_units<U>(panel, units, x + r, rows - r < FEW_ROWS ? rows - r : FEW_ROWS, rows, start,
                           out + r * PANEL);
  } else if (rows <= FEW_ROWS) {
    few_rows_of_units<U>(panel, units, x, rows, rows, start, out);
  } else {
    for (int lane = 0; lane < PANEL; lane += W) many_rows<U>(panel, units, x, rows, lane, start, out);
  }
}

// Tiles first .. last - 1 of rows with a panel.
template <int KIND>
static void tiles_of_panel(const uint8_t* panel, const InputRows& x, int64_t first, int64_t last, float* out) {
  using U = Unit<KIND>;
  const int64_t units = x.inputs / LAYOUTS[KIND].unit;
  auto tile = [&](int64_t t) { return (const InputGroup*)x.tile(t); };
  if constexpr (has_codebook(KIND))  // looking codes up takes longer than multiplying a row by them
    if (last - first > 1) {
      using Found = FoundGroup<U::HALVES>;
      alignas(64) uint8_t groups[U::GROUPS * Found::BYTES];
      for (int64_t u = 0; u < units; u++) {
        find_groups<KIND>(panel + u * U::BYTES, groups);
        for (int64_t t = first; t < last; t++) {
          const int rows = x.rows_of(t);
          rows_of_units<Found>(groups, U::GROUPS, tile(t) + u * U::GROUPS * rows, rows, u ? AT_OUT : AT_ZERO,
                               out + (t - first) * ROW_TILE * PANEL);
        }
      }
      return;
    }
  for (int64_t t = first; t < last; t++)
    rows_of_units<U>(panel, units, tile(t), x.rows_of(t), AT_ZERO, out + (t - first) * ROW_TILE * PANEL);
}

// ---- weights without blocks -----------------------------------------------------------------------------------------

template <int KIND, int R> static void float_rows(const uint8_t* panel, int64_t inputs, const float* x, float* out) {
  vf sums[R];
  UNROLLED for (int r = 0; r < R; r++) sums[r] = vset(0.0f);
  for (int64_t i = 0; i < inputs; i += LAYOUTS[KIND].unit, panel += 64) {
    if (R == 1) __builtin_prefetch(panel + 2048);
    if constexpr (KIND == KV_F32) {
      const vf weights = vload((const float*)panel);
      UNROLLED for (int r = 0; r < R; r++) sums[r] = vfma(weights, vset(x[r * inputs + i]), sums[r]);
      continue;
    }
    const vf even = KIND == KV_F16 ? vload_half((const uint16_t*)panel) : vpairs_low(panel);
    const vf odd = KIND == KV_F16 ? vload_half((const uint16_t*)panel + PANEL) : vpairs_high(panel);
    UNROLLED for (int r = 0; r < R; r++) {
      sums[r] = vfma_bf16(even, vset(x[r * inputs + i]), sums[r]);
      sums[r] = vfma_bf16(odd, vset(x[r * inputs + i + 1]), sums[r]);
    }
  }
  UNROLLED for (int r = 0; r < R; r++) vstore(out + r * PANEL, sums[r]);
}

template <int KIND>
static void float_rows_of_panel(const uint8_t* panel, int64_t inputs, const float* x, int rows, float* out) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) float_rows<KIND, 4>(panel, inputs, x + r * inputs, out + r * PANEL);
  if (r + 2 <= rows) { float_rows<KIND, 2>(panel, inputs, x + r * inputs, out + r * PANEL); r += 2; }
  if (r < rows) float_rows<KIND, 1>(panel, inputs, x + r * inputs, out + r * PANEL);
}

// ---- a matrix -------------------------------------------------------------------------------------------------------

template <class T>
static void store_outputs(const float* out, int rows, const T* bias, int64_t width, T* y, int64_t y_stride) {
  for (int r = 0; r < rows; r++, out += PANEL, y += y_stride) {
    if constexpr (sizeof(T) == 4) {
      for (int64_t i = 0; i < width; i++) y[i] = bias ? out[i] + bias[i] : out[i];
    } else if (width == PANEL) {
      vf v = vload(out);
      vstore_bf16(y, bias ? v + vload_bf16(bias) : v);
    } else
      for (int64_t i = 0; i < width; i++) y[i] = narrow(bias ? out[i] + widen(bias[i]) : out[i]);
  }
}

typedef void (*TilesOfPanel)(const uint8_t* panel, const InputRows& x, int64_t first, int64_t last, float* out);

static TilesOfPanel tiles_of_kind(int64_t kind) {
  switch (kind) {
    case KV_Q4_0: return tiles_of_panel<KV_Q4_0>;
    case KV_Q4_1: return tiles_of_panel<KV_Q4_1>;
    case KV_Q5_0: return tiles_of_panel<KV_Q5_0>;
    case KV_Q5_1: return tiles_of_panel<KV_Q5_1>;
    case KV_Q8_0: return tiles_of_panel<KV_Q8_0>;
    case KV_Q4_K: return tiles_of_panel<KV_Q4_K>;
    case KV_Q5_K: return tiles_of_panel<KV_Q5_K>;
    case KV_IQ4_NL: return tiles_of_panel<KV_IQ4_NL>;
    case KV_IQ4_XS: return tiles_of_panel<KV_IQ4_XS>;
    case KV_MXFP4: return tiles_of_panel<KV_MXFP4>;
    case KV_Q2_K: return tiles_of_panel<KV_Q2_K>;
    case KV_Q3_K: return tiles_of_panel<KV_Q3_K>;
    case KV_IQ2_XXS: return tiles_of_panel<KV_IQ2_XXS>;
    case KV_IQ2_XS: return tiles_of_panel<KV_IQ2_XS>;
    case KV_IQ2_S: return tiles_of_panel<KV_IQ2_S>;
    case KV_IQ3_XXS: return tiles_of_panel<KV_IQ3_XXS>;
    case KV_IQ3_S: return tiles_of_panel<KV_IQ3_S>;
    case KV_IQ1_S: return tiles_of_panel<KV_IQ1_S>;
    case KV_IQ1_M: return tiles_of_panel<KV_IQ1_M>;
    case KV_TQ1_0: return tiles_of_panel<KV_TQ1_0>;
    case KV_TQ2_0: return tiles_of_panel<KV_TQ2_0>;
    default: return tiles_of_panel<KV_Q6_K>;
  }
}

// How many tiles of rows are multiplied by the codes of a unit that were looked up once, and are in the nearest cache.
constexpr int64_t TILES_AT_ONCE = 32;

// Writes the outputs of panels first .. last - 1, of rows that are prepared.
template <class T>
static void multiply_panels(const KvMatrix& m, int64_t first, int64_t last, const InputRows& x, const T* bias, T* y,
                            int64_t y_stride) {
  const bool floats = !has_blocks(m.kind);
  const auto of_floats = m.kind == KV_F16   ? float_rows_of_panel<KV_F16>
                         : m.kind == KV_F32 ? float_rows_of_panel<KV_F32>
                                            : float_rows_of_panel<KV_BF16>;
  const TilesOfPanel of_panel = tiles_of_kind(m.kind);
  const int64_t size = panel_bytes(m.kind, m.inputs), tiles = x.tiles();
  const int64_t at_once = has_codebook(m.kind) ? TILES_AT_ONCE : 1;
  alignas(64) float out[TILES_AT_ONCE * ROW_TILE * PANEL];
  for (int64_t tile = 0; tile < tiles; tile += at_once) {
    const int64_t end = min64(tiles, tile + at_once), row = tile * ROW_TILE;
    const int rows = int(min64(x.rows, end * ROW_TILE) - row);
    for (int64_t panel = first; panel < last; panel++) {
      const uint8_t* at = numbers<uint8_t>(m.panels) + panel * size;
      if (floats) of_floats(at, m.inputs, (const float*)x.tile(tile), rows, out);
      else of_panel(at, x, tile, end, out);
      store_outputs(out, rows, bias ? bias + panel * PANEL : nullptr, min64(PANEL, m.outputs - panel * PANEL),
                    y + row * y_stride + panel * PANEL, y_stride);
    }
  }
}

// In how many tasks panels of so many bytes are multiplied. The panels of a task share a tile of rows from the nearest
// caches; there are enough tasks for all threads.
static int64_t product_tasks(int64_t panels, int64_t size, bool direct) {
  const int64_t workers = kv_threads();
  const int64_t each = max64(1, direct ? panels / (8 * workers) : min64(panels / (2 * workers), (192 << 10) / size));
  return (panels + each - 1) / each;
}

template <class T> static void multiply(const KvMatrix& m, InputRows& x, const T* bias, T* y, int64_t y_stride) {
  x.prepare(has_blocks(m.kind));
  if (!x.data) return;
  const int64_t panels = panels_of(m.outputs);
  const int64_t tasks = product_tasks(panels, panel_bytes(m.kind, m.inputs), x.rows <= MAX_DIRECT_ROWS);
  parallel_for(tasks, [&](int64_t t) {
    multiply_panels(m, panels * t / tasks, panels * (t + 1) / tasks, x, bias, y, y_stride);
  });
}

static void add_needs(const KvMatrix& m, int64_t rows, Needs& needs) {
  const bool round = has_blocks(m.kind);
  if (m.outputs) needs.add(InputRows::kind_of(round), InputRows::bytes_of(round, rows, m.inputs));
}

static KvStatus product(const KvMatrix* m, KvArray x, KvArray bias, KvArray y, int64_t y_stride) {
  const int64_t rows = x.length / m->inputs;
  Needs needs;
  add_needs(*m, rows, needs);
  if (!needs.reserve()) return KV_NO_MEMORY;
  InputRows inputs{numbers<bf16>(x), rows, m->inputs, m->inputs};
  if (x.type == KV_FLOAT32) inputs.data = x.data;  // they are as they are read
  with_team(rows <= MAX_DIRECT_ROWS, [&] {
    if (x.type == KV_FLOAT32) multiply(*m, inputs, numbers<float>(bias), numbers<float>(y), y_stride);
    else multiply(*m, inputs, numbers<bf16>(bias), numbers<bf16>(y), y_stride);
  });
  return KV_DONE;
}

}  // namespace
