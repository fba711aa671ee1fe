// Products y = x W^T: whole numbers within a group of 32 inputs, one output a lane.
//
// Inputs are rounded to 8 bits by groups of 32 (scale = greatest / 127), a group's products are summed as whole
// numbers, and a row's groups are added in order:
//   sum = fma(scale of weights * scale of inputs, whole sum, sum), then sum = fma(offset, inputs' sum, sum).
// With bfloat16 weights inputs stay as they are, and a sum is a chain of fused multiply-adds in the order of inputs.
// Either way an output's bits depend on its row and its weights alone.
#pragma once

#include "panels.h"
#include "runtime.h"
#include "simd.h"

namespace {

// ---- inputs ---------------------------------------------------------------------------------------------------------

struct Inputs {  // 32 of a row, rounded
  int8_t codes[32];
  float scale, sum;           // sum: of all, scale * total
  int32_t total, first_half, second_half;  // of the codes
};

constexpr int TILE = 16;  // rows that pass a group of weights while its codes are in registers
constexpr int64_t DIRECT = 16;  // rows up to which a call's loops are microseconds

static void round_group(const bf16* x, Inputs& to) {
  const vf a = vload_bf16(x), b = vload_bf16(x + 16), zero = vset(0.0f);
  float lanes[16], greatest = 0.0f, wrong = 0.0f;
  vstore(lanes, (a - a) + (b - b));
  for (int i = 0; i < 16; i++) wrong += lanes[i];
  if (wrong != 0.0f) {  // one is infinite or no number: then no output is a number, on any processor
    memset(to.codes, 0, sizeof to.codes);
    to.scale = to.sum = as_float(0x7fc00000);
    to.total = to.first_half = to.second_half = 0;
    return;
  }
  greatest = maximum(vmax(vmax(a, zero - a), vmax(b, zero - b)));
  bool none = greatest < 1e-30f;  // keeps 127 / greatest finite
  const vf inverse = vset(none ? 0.0f : 127.0f / greatest), magic = vset(12582912.0f);
  int32_t whole[32], first = 0, second = 0;
  UNROLLED for (int i = 0; i < PARTS; i++) {  // adding 1.5 * 2^23 rounds to the nearest whole number, ties to even
    const I bias = iset(0x4b400000);
    istore(whole + i * W, isub(as_int(fadd(fmul(a.part[i], inverse.part[i]), magic.part[i])), bias));
    istore(whole + 16 + i * W, isub(as_int(fadd(fmul(b.part[i], inverse.part[i]), magic.part[i])), bias));
  }
  for (int i = 0; i < 32; i++) to.codes[i] = int8_t(whole[i]);
  for (int i = 0; i < 16; i++) { first += whole[i]; second += whole[16 + i]; }
  to.scale = none ? 0.0f : greatest / 127.0f;
  to.total = first + second;
  to.first_half = first;
  to.second_half = second;
  to.sum = to.scale * float(to.total);
}

// Rows as products read them: tiles of TILE rows (the last of fewer), [group][row]; for bfloat16 floats, [row][input].
struct Prepared {
  const bf16* x;
  int64_t rows, inputs, stride;
  void* data = nullptr;
  bool whole = false;  // rounded to 8 bits

  int64_t groups() const { return inputs / 32; }
  int64_t tiles() const { return (rows + TILE - 1) / TILE; }
  int rows_of(int64_t tile) const { return int(min64(TILE, rows - tile * TILE)); }
  const Inputs* tile(int64_t t) const { return (const Inputs*)data + t * TILE * groups(); }

  void prepare(bool round) {  // once for all matrices of a kind that are multiplied with these rows
    if (data && whole == round) return;
    whole = round;
    size_t bytes = round ? size_t(rows) * groups() * sizeof(Inputs) : size_t(rows) * inputs * 4;
    data = kv_scratch(round ? KV_SCRATCH_INPUTS : KV_SCRATCH_FLOATS, bytes);
    auto one = [&](int64_t t) {
      int count = rows_of(t);
      for (int r = 0; r < count; r++) {
        const bf16* from = x + (t * TILE + r) * stride;
        if (round) {
          Inputs* to = (Inputs*)data + t * TILE * groups() + r;
          for (int64_t g = 0; g < groups(); g++) round_group(from + 32 * g, to[g * count]);
        } else {
          float* to = (float*)data + (t * TILE + r) * inputs;
          for (int64_t i = 0; i < inputs; i++) to[i] = widen(from[i]);
        }
      }
    };
    if (rows > DIRECT) each(tiles(), one);
    else one(0);
  }
};

// ---- codes of a group: dword i of W outputs ------------------------------------------------------------------------

template <int BITS> INLINE void codes_of(const uint8_t* at, I (&w)[8]) {
  if constexpr (BITS == 8) {
    UNROLLED for (int i = 0; i < 8; i++) w[i] = iload(at + 64 * i);
    return;
  }
  const I low = iset(0x0f0f0f0f);
  UNROLLED for (int j = 0; j < 4; j++) {
    I both = iload(at + 64 * j);
    w[2 * j] = iand(both, low);
    w[2 * j + 1] = iand(ishr<4>(both), low);
  }
  if constexpr (BITS == 5) {
    const I bit = iset(0x10101010), all = iload(at + 256);
    w[0] = ior(w[0], iand(ishl<4>(all), bit));
    w[1] = ior(w[1], iand(ishl<3>(all), bit));
    w[2] = ior(w[2], iand(ishl<2>(all), bit));
    w[3] = ior(w[3], iand(ishl<1>(all), bit));
    w[4] = ior(w[4], iand(all, bit));
    w[5] = ior(w[5], iand(ishr<1>(all), bit));
    w[6] = ior(w[6], iand(ishr<2>(all), bit));
    w[7] = ior(w[7], iand(ishr<3>(all), bit));
  }
  if constexpr (BITS == 6) {
    const I two = iset(0x30303030);
    UNROLLED for (int half = 0; half < 2; half++) {
      I all = iload(at + 256 + 64 * half);
      w[4 * half] = ior(w[4 * half], iand(ishl<4>(all), two));
      w[4 * half + 1] = ior(w[4 * half + 1], iand(ishl<2>(all), two));
      w[4 * half + 2] = ior(w[4 * half + 2], iand(all, two));
      w[4 * half + 3] = ior(w[4 * half + 3], iand(ishr<2>(all), two));
    }
  }
}

// ---- whole sums: dwords FROM .. TO of codes with 8-bit inputs -------------------------------------------------------
//
// Codes of up to 6 bits have no sign, those of 8 bits have. VNNI multiplies bytes without a sign by bytes with one: for
// codes of 8 bits the inputs get +128, and `base`, 128 times the sum of the codes, is subtracted from the result.

#if defined(KVKEEP_AVX512) || defined(KVKEEP_VNNI)
#if defined(KVKEEP_AVX512)
INLINE I dot4(I sum, I without_sign, I with_sign) { return _mm512_dpbusd_epi32(sum, without_sign, with_sign); }
INLINE I flip(I x) { return _mm512_xor_si512(x, iset(int32_t(0x80808080))); }
#else
#if defined(KVKEEP_SIMDE)  // which has the instruction by AVX-512's name only
INLINE I dot4(I sum, I without_sign, I with_sign) { return _mm256_dpbusd_epi32(sum, without_sign, with_sign); }
#else
INLINE I dot4(I sum, I without_sign, I with_sign) { return _mm256_dpbusd_avx_epi32(sum, without_sign, with_sign); }
#endif
INLINE I flip(I x) { return _mm256_xor_si256(x, iset(int32_t(0x80808080))); }
#endif
template <int BITS> INLINE I base_of(const I (&w)[8]) {
  I sum = iset(0);
  if constexpr (BITS == 8) { UNROLLED for (int i = 0; i < 8; i++) sum = dot4(sum, iset(int32_t(0x80808080)), w[i]); }
  return sum;
}
template <int BITS, int FROM, int TO> INLINE I whole_sum(const I (&w)[8], const int8_t* x, I base) {
  I a = iset(0), b = iset(0);
  UNROLLED for (int i = FROM; i < TO; i += 2) {
    if constexpr (BITS == 8) {
      a = dot4(a, flip(iset(load32(x + 4 * i))), w[i]);
      b = dot4(b, flip(iset(load32(x + 4 * i + 4))), w[i + 1]);
    } else {
      a = dot4(a, w[i], iset(load32(x + 4 * i)));
      b = dot4(b, w[i + 1], iset(load32(x + 4 * i + 4)));
    }
  }
  a = iadd(a, b);
  return BITS == 8 ? isub(a, base) : a;
}
#elif defined(KVKEEP_AVX2)
template <int BITS> INLINE I base_of(const I (&)[8]) { return iset(0); }
INLINE I pairs(I w, const int8_t* x) { return _mm256_maddubs_epi16(w, iset(load32(x))); }
INLINE I add16(I a, I b) { return _mm256_add_epi16(a, b); }
INLINE I widened(I sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
// Sums of two products in 16 bits: of 4 bits at most 2 * 15 * 127, so that eight fit; of 5 bits four, of 6 bits two; of
// 8 bits |w| <= 128 with inputs of w's sign, 2 * 128 * 127 = 32512.
template <int BITS, int FROM, int TO> INLINE I whole_sum(const I (&w)[8], const int8_t* x, I) {
  if constexpr (BITS == 8) {
    I sum = iset(0);
    UNROLLED for (int i = FROM; i < TO; i++) {
      I input = iset(load32(x + 4 * i));
      I two = widened(_mm256_maddubs_epi16(_mm256_abs_epi8(w[i]), _mm256_sign_epi8(input, w[i])));
      sum = i == FROM ? two : iadd(sum, two);
    }
    return sum;
  }
  constexpr int FIT = BITS == 4 ? 8 : BITS == 5 ? 4 : 2;
  I sum = iset(0);
  UNROLLED for (int i = FROM; i < TO; i += FIT) {
    I part = pairs(w[i], x + 4 * i);
    UNROLLED for (int j = 1; j < FIT; j++) part = add16(part, pairs(w[i + j], x + 4 * (i + j)));
    sum = i == FROM ? widened(part) : iadd(sum, widened(part));
  }
  return sum;
}
#elif defined(KVKEEP_NEON)
template <int BITS> INLINE I base_of(const I (&)[8]) { return iset(0); }
template <int BITS, int FROM, int TO> INLINE I whole_sum(const I (&w)[8], const int8_t* x, I) {
  I sum = iset(0);
  UNROLLED for (int i = FROM; i < TO; i++) {
    const int8x16_t a = vreinterpretq_s8_s32(w[i]), b = vreinterpretq_s8_s32(vdupq_n_s32(load32(x + 4 * i)));
#if defined(KVKEEP_DOTPROD)
    sum = vdotq_s32(sum, a, b);
#else  // two products of at most 128 * 127 fit 16 bits
    sum = vpadalq_s16(sum, vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b)));
#endif
  }
  return sum;
}
#else
template <int BITS> INLINE I base_of(const I (&)[8]) { return 0; }
template <int BITS, int FROM, int TO> INLINE I whole_sum(const I (&w)[8], const int8_t* x, I) {
  I sum = 0;
  for (int i = FROM; i < TO; i++)
    for (int b = 0; b < 4; b++) sum += int8_t(uint32_t(w[i]) >> 8 * b) * x[4 * i + b];
  return sum;
}
#endif

// ---- scales of a group, W outputs -----------------------------------------------------------------------------------

template <int KIND> struct Unit {  // one unit of a panel, for the outputs from `lane` on
  static constexpr KindLayout L = LAYOUTS[KIND];
  static constexpr int GROUPS = L.unit / 32;
  const uint8_t *codes, *scales;
  F scale, offset;

  INLINE Unit at(const uint8_t* unit, int lane) {
    Unit u;
    u.codes = unit + 4 * lane;
    u.scales = unit + GROUPS * L.group_bytes + lane;
    const uint16_t* halves = (const uint16_t*)(unit + L.unit_bytes - (L.offsets ? 64 : 32)) + lane;
    u.scale = hload(halves);
    u.offset = L.offsets ? hload(halves + 16) : fset(0.0f);
    return u;
  }
  // Of 6 bits times float16: exact.
  __attribute__((always_inline)) F scale_of(int g) const {
    return GROUPS == 1 ? scale : fmul(scale, to_float(ubytes_to_int(scales + 16 * g)));
  }
  __attribute__((always_inline)) F half_scale_of(int half) const {
    return fmul(scale, to_float(bytes_to_int((const int8_t*)scales + 16 * half)));
  }
  __attribute__((always_inline)) F offset_of(int g) const {
    return GROUPS == 1 ? offset : fmul(fsub(fset(0.0f), offset), to_float(ubytes_to_int(scales + 128 + 16 * g)));
  }
};

template <int ZERO> INLINE I without_zero(I sum, int32_t total) {
  if constexpr (ZERO == 8) return isub(sum, ishl<3>(iset(total)));
  if constexpr (ZERO == 16) return isub(sum, ishl<4>(iset(total)));
  if constexpr (ZERO == 32) return isub(sum, ishl<5>(iset(total)));
  return sum;
}

struct Scales { F first, second, offset; };  // of a group: second is that of its other half, for Q6_K
struct Sums { I first, second; };            // whole sums of a row's group: of all of it, or of its halves

template <int KIND> INLINE Scales scales_of(const Unit<KIND>& unit, int g) {
  const bool halves = KIND == KV_Q6_K;
  const F first = halves ? unit.half_scale_of(2 * g) : unit.scale_of(g);
  return {first, halves ? unit.half_scale_of(2 * g + 1) : first, LAYOUTS[KIND].offsets ? unit.offset_of(g) : first};
}

template <int KIND> INLINE Sums sums_of(const I (&w)[8], I base, const int8_t* x) {
  constexpr int BITS = LAYOUTS[KIND].bits;
  if constexpr (KIND == KV_Q6_K) return {whole_sum<BITS, 0, 4>(w, x, base), whole_sum<BITS, 4, 8>(w, x, base)};
  const I all = whole_sum<BITS, 0, 8>(w, x, base);
  return {all, all};
}

// A row's sum with a group's part.
template <int KIND> INLINE F add_group(F sum, const Sums& whole, const Inputs& x, const Scales& scales) {
  constexpr KindLayout L = LAYOUTS[KIND];
  const F by = fset(x.scale);
  if constexpr (KIND == KV_Q6_K) {
    const I first = without_zero<L.zero_point>(whole.first, x.first_half);
    const I second = without_zero<L.zero_point>(whole.second, x.second_half);
    sum = ffma(fmul(scales.first, by), to_float(first), sum);
    return ffma(fmul(scales.second, by), to_float(second), sum);
  }
  sum = ffma(fmul(scales.first, by), to_float(without_zero<L.zero_point>(whole.first, x.total)), sum);
  return L.offsets ? ffma(scales.offset, fset(x.sum), sum) : sum;
}

#if defined(KVKEEP_I8MM)
// Whole sums of two rows at once: smmla multiplies eight inputs of two rows by those of two outputs.
template <int FROM, int TO>
INLINE void whole_sums_of_two(const I (&w)[8], const int8_t* x, const int8_t* y, I& of_x, I& of_y) {
  I low = iset(0), high = iset(0);  // of outputs 0 and 1, 2 and 3: two sums of x, then two of y
  UNROLLED for (int i = FROM; i < TO; i += 2) {
    const int8x16_t rows = vcombine_s8(vld1_s8(x + 4 * i), vld1_s8(y + 4 * i));
    low = vmmlaq_s32(low, rows, vreinterpretq_s8_s32(vzip1q_s32(w[i], w[i + 1])));
    high = vmmlaq_s32(high, rows, vreinterpretq_s8_s32(vzip2q_s32(w[i], w[i + 1])));
  }
  of_x = vcombine_s32(vget_low_s32(low), vget_low_s32(high));
  of_y = vcombine_s32(vget_high_s32(low), vget_high_s32(high));
}
template <int KIND> INLINE void sums_of_two(const I (&w)[8], const int8_t* x, const int8_t* y, Sums& of_x, Sums& of_y) {
  if constexpr (KIND == KV_Q6_K) {
    whole_sums_of_two<0, 4>(w, x, y, of_x.first, of_y.first);
    whole_sums_of_two<4, 8>(w, x, y, of_x.second, of_y.second);
  } else
    whole_sums_of_two<0, 8>(w, x, y, of_x.first, of_y.first);
}
#endif

// R rows with a panel, NV vectors of outputs from `lane` on; sums in registers.
template <int KIND, int R, int NV>
static void few_rows(const uint8_t* panel, int64_t units, const Inputs* x, int lane, float* out) {
  constexpr KindLayout L = LAYOUTS[KIND];
  // The processor fetches codes ahead by itself, as they are read in order. The next unit's scales, which are wanted
  // before its codes are, it does not.
  constexpr int CODES = Unit<KIND>::GROUPS * L.group_bytes;
  F sums[NV][R];
  UNROLLED for (int v = 0; v < NV; v++)
    UNROLLED for (int r = 0; r < R; r++) sums[v][r] = fset(0.0f);
  for (int64_t u = 0; u < units; u++, panel += L.unit_bytes) {
    Unit<KIND> unit[NV];
    UNROLLED for (int v = 0; v < NV; v++) unit[v] = Unit<KIND>::at(panel, lane + v * W);
    for (int g = 0; g < Unit<KIND>::GROUPS; g++, x += R) {
      if (64 * g < L.unit_bytes - CODES) __builtin_prefetch(panel + L.unit_bytes + CODES + 64 * g);
      UNROLLED for (int v = 0; v < NV; v++) {
        I w[8];
        codes_of<L.bits>(unit[v].codes + g * L.group_bytes, w);
        const I base = base_of<L.bits>(w);
        const Scales scales = scales_of<KIND>(unit[v], g);
        UNROLLED for (int r = 0; r < R; r++)
          sums[v][r] = add_group<KIND>(sums[v][r], sums_of<KIND>(w, base, x[r].codes), x[r], scales);
      }
    }
  }
  UNROLLED for (int v = 0; v < NV; v++)
    UNROLLED for (int r = 0; r < R; r++) fstore(out + r * PANEL + lane + v * W, sums[v][r]);
}

// Many rows with a panel, W outputs from `lane` on: a group's codes stay in registers while rows pass.
template <int KIND>
static void many_rows(const uint8_t* panel, int64_t units, const Inputs* x, int rows, int lane, float* out) {
  constexpr KindLayout L = LAYOUTS[KIND];
  alignas(64) float sums[TILE * W];
  memset(sums, 0, sizeof(float) * rows * W);
  for (int64_t u = 0; u < units; u++, panel += L.unit_bytes) {
    const Unit<KIND> unit = Unit<KIND>::at(panel, lane);
    for (int g = 0; g < Unit<KIND>::GROUPS; g++, x += rows) {
      I w[8];
      codes_of<L.bits>(unit.codes + g * L.group_bytes, w);
      const I base = base_of<L.bits>(w);
      const Scales scales = scales_of<KIND>(unit, g);
      auto add = [&](int r, const Sums& whole) {
        fstore(sums + r * W, add_group<KIND>(fload(sums + r * W), whole, x[r], scales));
      };
      int r = 0;
#if defined(KVKEEP_I8MM)
      for (; r + 2 <= rows; r += 2) {
        Sums one, other;
        sums_of_two<KIND>(w, x[r].codes, x[r + 1].codes, one, other);
        add(r, one);
        add(r + 1, other);
      }
#endif
      for (; r < rows; r++) add(r, sums_of<KIND>(w, base, x[r].codes));
    }
  }
  for (int r = 0; r < rows; r++) fstore(out + r * PANEL + lane, fload(sums + r * W));
}

constexpr int NARROW = W == 1 ? 1 : W == 4 ? 2 : PARTS;  // vectors of a panel that few rows take at once

template <int KIND, int R>
static void few_rows_of_panel(const uint8_t* panel, int64_t units, const Inputs* x, float* out) {
  constexpr int NV = R == 1 ? NARROW : 1;
  for (int lane = 0; lane < PANEL; lane += NV * W) few_rows<KIND, R, NV>(panel, units, x, lane, out);
}

template <int KIND>
static void rows_of_panel(const uint8_t* panel, int64_t inputs, const Inputs* x, int rows, float* out) {
  int64_t units = inputs / LAYOUTS[KIND].unit;
  switch (rows) {
    case 1: return few_rows_of_panel<KIND, 1>(panel, units, x, out);
    case 2: return few_rows_of_panel<KIND, 2>(panel, units, x, out);
    case 3: return few_rows_of_panel<KIND, 3>(panel, units, x, out);
    case 4: return few_rows_of_panel<KIND, 4>(panel, units, x, out);
    default:
      for (int lane = 0; lane < PANEL; lane += W) many_rows<KIND>(panel, units, x, rows, lane, out);
  }
}

// ---- bfloat16 weights -----------------------------------------------------------------------------------------------

template <int R> static void float_rows(const uint8_t* panel, int64_t inputs, const float* x, float* out) {
  vf sums[R];
  UNROLLED for (int r = 0; r < R; r++) sums[r] = vset(0.0f);
  for (int64_t i = 0; i < inputs; i += 2, panel += 64) {
    if (R == 1) __builtin_prefetch(panel + 2048);
    const vf even = vpairs_low(panel), odd = vpairs_high(panel);
    UNROLLED for (int r = 0; r < R; r++) {
      sums[r] = vfma_bf16(even, vset(x[r * inputs + i]), sums[r]);
      sums[r] = vfma_bf16(odd, vset(x[r * inputs + i + 1]), sums[r]);
    }
  }
  UNROLLED for (int r = 0; r < R; r++) vstore(out + r * PANEL, sums[r]);
}

static void float_rows_of_panel(const uint8_t* panel, int64_t inputs, const float* x, int rows, float* out) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) float_rows<4>(panel, inputs, x + r * inputs, out + r * PANEL);
  if (r + 2 <= rows) { float_rows<2>(panel, inputs, x + r * inputs, out + r * PANEL); r += 2; }
  if (r < rows) float_rows<1>(panel, inputs, x + r * inputs, out + r * PANEL);
}

// ---- a matrix -------------------------------------------------------------------------------------------------------

static void store_outputs(const float* out, int rows, const bf16* bias, int64_t width, bf16* y, int64_t across) {
  for (int r = 0; r < rows; r++, out += PANEL, y += across) {
    if (width == PANEL) {
      vf v = vload(out);
      vstore_bf16(y, bias ? v + vload_bf16(bias) : v);
    } else
      for (int64_t i = 0; i < width; i++) y[i] = narrow(bias ? out[i] + widen(bias[i]) : out[i]);
  }
}

typedef void (*RowsOfPanel)(const uint8_t* panel, int64_t inputs, const Inputs* x, int rows, float* out);

static RowsOfPanel rows_of_kind(int64_t kind) {
  switch (kind) {
    case KV_Q4_0: return rows_of_panel<KV_Q4_0>;
    case KV_Q4_1: return rows_of_panel<KV_Q4_1>;
    case KV_Q5_0: return rows_of_panel<KV_Q5_0>;
    case KV_Q5_1: return rows_of_panel<KV_Q5_1>;
    case KV_Q8_0: return rows_of_panel<KV_Q8_0>;
    case KV_Q4_K: return rows_of_panel<KV_Q4_K>;
    case KV_Q5_K: return rows_of_panel<KV_Q5_K>;
    default: return rows_of_panel<KV_Q6_K>;
  }
}

static void multiply(const KvMatrix& m, Prepared& x, const bf16* bias, bf16* y, int64_t across) {
  bool floats = m.kind == KV_BF16;
  x.prepare(!floats);
  RowsOfPanel of_panel = rows_of_kind(m.kind);
  int64_t panels = panels_of(m.outputs), size = panel_bytes(m.kind, m.inputs), workers = kv_threads();
  // As many panels in a task as share a row tile from the nearest caches, but enough tasks for all threads.
  int64_t shared = x.rows <= DIRECT ? panels / (8 * workers) : min64(panels / (2 * workers), (192 << 10) / size);
  shared = max64(1, shared);
  int64_t tasks = (panels + shared - 1) / shared;
  auto task = [&](int64_t t) {
    alignas(64) float out[TILE * PANEL];
    int64_t first = panels * t / tasks, last = panels * (t + 1) / tasks;
    for (int64_t tile = 0; tile < x.tiles(); tile++) {
      int rows = x.rows_of(tile);
      for (int64_t panel = first; panel < last; panel++) {
        const uint8_t* at = (const uint8_t*)m.panels + panel * size;
        if (floats) float_rows_of_panel(at, m.inputs, (const float*)x.data + tile * TILE * m.inputs, rows, out);
        else of_panel(at, m.inputs, x.tile(tile), rows, out);
        store_outputs(out, rows, bias ? bias + panel * PANEL : nullptr, min64(PANEL, m.outputs - panel * PANEL),
                      y + tile * TILE * across + panel * PANEL, across);
      }
    }
  };
  each(tasks, task);
}

static void product(const KvMatrix* m, const bf16* x, int64_t rows, const bf16* bias, bf16* y, int64_t across) {
  Prepared inputs{x, rows, m->inputs, m->inputs};
  with_team(rows <= DIRECT, [&] { multiply(*m, inputs, bias, y, across); });
}

}  // namespace
