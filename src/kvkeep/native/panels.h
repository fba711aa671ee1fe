// How a matrix lies in memory: panels of 16 outputs, in units of 32 or 256 inputs.
//
// A unit holds, for its 16 outputs: codes by groups of 32 inputs, then scales and offsets. A weight is
// scale * (code - zero_point) + offset, or scale * value of the code, where a kind has a table of values. Of a group of
// 32 inputs, number 4 i + b is byte b of dword i of a lane:
//   two bits: [2][16 lanes][4 bytes], dword i in bits 2 (i % 4) and the next of part i / 4;
//   nibbles: [4][16 lanes][4 bytes], dword 2 j in the low halves of step j, dword 2 j + 1 in the high ones;
//   a third or a fifth bit: [16 lanes][4 bytes], that of dword i in bit i;
//   a fifth and a sixth: as two bits;
//   bytes: [8][16 lanes][4 bytes], with a sign.
// K kinds have one float16 scale (and offset) of a unit, times integers: [8 groups][16 lanes] bytes, offsets'
// behind those of scales; Q6_K: [16 halves of groups][16 lanes] signed bytes; IQ4_XS: [8 groups][16 lanes] signed
// bytes; Q2_K: [16 halves][16 lanes] bytes, a scale in the low half and an offset in the high one; Q3_K: [12][16
// lanes], the file's bytes.
// MXFP4 has no float16 scale, but a power of two: [16 lanes] exponents, 128 more than they are.
// TQ1_0 has five ternary digits in a byte: [13][16 lanes][4 bytes], the file's bytes.
// Kinds with a codebook have the low eight bits of indices of entries, [1 or 2][16 lanes][4 bytes] of a group, and IQ2
// and IQ3 then signs as a third bit: [16 lanes][4 bytes]. Where a file has seven signs of eight weights, the eighth is
// their parity; in its place, bits 1, 3, 5 and 7 of the last byte, is what the file has beside the signs: the scale of
// the group, or in IQ2_XS the ninth bits of indices. Then, as [16 lanes] bytes:
//   IQ2_XS: 8 with two scales of halves each; IQ2_S: 8 with the high bits of indices, and such 8;
//   IQ3_S: 8 with the ninth bits of indices, 4 with two scales of groups each;
//   IQ1_S, IQ1_M: 16 with high bits of indices and signs of what is added (IQ1_S: and scales), two of a group;
//   IQ1_M: 4 and 2 with the low eight and the high four bits of the scales of two groups.
// bfloat16: [inputs / 2][16 lanes][2]; float16 and float32: [inputs][16 lanes].
#pragma once

#include "codebooks.h"
#include "kvkeep.h"

namespace {

struct Entries {  // of a codebook
  const uint32_t* codes = nullptr;
  const uint16_t* halves = nullptr;
  int weights = 0;    // of an entry: eight, with codes of two bits, or four, of three bits
  int high = 0;       // bits of an index above the low eight
  int step = 0;       // bits from those of one index to those of the next
  float part = 0.0f;  // a scale is this part of the unit's, times 2 n + 1
};

template <int N> constexpr Entries entries_of(const Codebook<N>& book, int weights, int step, float part) {
  constexpr int high = N / 256 == 1 ? 0 : N / 256 == 2 ? 1 : N / 256 == 4 ? 2 : 3;
  static_assert(N == 256 << high, "every index must have an entry");
  return {book.entries, book.halves, weights, high, step, part};
}

struct KindLayout {
  int bits;         // of a code; of its value, where there is a codebook
  int zero_point;   // the code of a weight of zero, where there is no offset
  bool offsets;     // added beside the scaled code
  int unit;         // inputs
  int group_bytes;  // codes of 32 inputs of 16 outputs
  int unit_bytes;
  int block_bytes;  // of one output's unit in a GGUF file
  bool halves = false;             // each half of a group has a scale, and an offset
  const int8_t* values = nullptr;  // 16 values, which codes name
  Entries entries = {};
};

constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t E2M1_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // twice the numbers
// With the zero point, so that there is no sign. The last bit of a code is the sign of its weight, or of what is added.
constexpr int8_t IQ1_VALUES[16] = {16 - 7, 16 + 1, 16 + 9, 0, 16 - 9, 16 - 1, 16 + 7};  // eighths
constexpr int8_t IQ2_VALUES[16] = {64 + 8, 64 + 25, 64 + 43, 0, 64 - 8, 64 - 25, 64 - 43};
constexpr int8_t IQ3_XXS_VALUES[16] = {64 + 4, 64 + 12, 64 + 20, 64 + 28, 64 + 36, 64 + 44, 64 + 52, 64 + 62,
                                       64 - 4, 64 - 12, 64 - 20, 64 - 28, 64 - 36, 64 - 44, 64 - 52, 64 - 62};
constexpr int8_t IQ3_S_VALUES[16] = {17, 19, 21, 23, 25, 27, 29, 31, 15, 13, 11, 9, 7, 5, 3, 1};

constexpr KindLayout LAYOUTS[KV_KINDS] = {
    {16, 0, false, 2, 0, 64, 4},              // BF16
    {4, 8, false, 32, 256, 288, 18},          // Q4_0
    {4, 0, true, 32, 256, 320, 20},           // Q4_1
    {5, 16, false, 32, 320, 352, 22},         // Q5_0
    {5, 0, true, 32, 320, 384, 24},           // Q5_1
    {8, 0, false, 32, 512, 544, 34},          // Q8_0
    {4, 0, true, 256, 256, 8 * 256 + 320, 144},   // Q4_K
    {5, 0, true, 256, 320, 8 * 320 + 320, 176},   // Q5_K
    {6, 32, false, 256, 384, 8 * 384 + 288, 210, true},  // Q6_K
    {4, 0, false, 32, 256, 288, 18, false, IQ4_VALUES},               // IQ4_NL
    {4, 0, false, 256, 256, 8 * 256 + 160, 136, false, IQ4_VALUES},   // IQ4_XS
    {4, 0, false, 32, 256, 272, 17, false, E2M1_VALUES},              // MXFP4
    {2, 0, true, 256, 128, 8 * 128 + 320, 84, true},     // Q2_K
    {3, 4, false, 256, 192, 8 * 192 + 224, 110, true},   // Q3_K
    {16, 0, false, 2, 0, 64, 4},                          // F16
    {7, 64, false, 256, 128, 8 * 128 + 32, 66, false, IQ2_VALUES, entries_of(kv_iq2_xxs, 8, 0, 0.125f)},
    {7, 64, false, 256, 128, 8 * 128 + 160, 74, true, IQ2_VALUES, entries_of(kv_iq2_xs, 8, 2, 0.125f)},
    {7, 64, false, 256, 128, 8 * 128 + 288, 82, true, IQ2_VALUES, entries_of(kv_iq2_s, 8, 2, 0.125f)},
    {7, 64, false, 256, 192, 8 * 192 + 32, 98, false, IQ3_XXS_VALUES, entries_of(kv_iq3_xxs, 4, 0, 0.25f)},
    {5, 16, false, 256, 192, 8 * 192 + 224, 110, false, IQ3_S_VALUES, entries_of(kv_iq3_s, 4, 1, 1.0f)},
    {5, 16, false, 256, 64, 8 * 64 + 288, 50, false, IQ1_VALUES, entries_of(kv_iq1, 8, 3, 0.125f)},  // IQ1_S
    {5, 16, false, 256, 64, 8 * 64 + 384, 56, true, IQ1_VALUES, entries_of(kv_iq1, 8, 4, 0.125f)},   // IQ1_M
    {2, 1, false, 256, 104, 8 * 104 + 32, 54},  // TQ1_0
    {2, 1, false, 256, 128, 8 * 128 + 32, 66},  // TQ2_0
    {32, 0, false, 1, 0, 64, 4},                          // F32
};

constexpr int PANEL = KV_PANEL_OUTPUTS;

inline bool has_blocks(int64_t kind) { return kind != KV_BF16 && kind != KV_F16 && kind != KV_F32; }
constexpr bool has_codebook(int64_t kind) { return LAYOUTS[kind].entries.weights > 0; }
inline bool is_kind(int64_t kind) { return kind >= 0 && kind < KV_KINDS; }
inline int64_t panel_bytes(int64_t kind, int64_t inputs) {
  return inputs / LAYOUTS[kind].unit * LAYOUTS[kind].unit_bytes;
}
inline int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

}  // namespace
