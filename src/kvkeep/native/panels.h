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
// bfloat16: [inputs / 2][16 lanes][2]; float16: [inputs][16 lanes].
#pragma once

#include "kvkeep.h"

namespace {

struct KindLayout {
  int bits;         // of a code
  int zero_point;   // the code of a weight of zero, where there is no offset
  bool offsets;     // added beside the scaled code
  int unit;         // inputs
  int group_bytes;  // codes of 32 inputs of 16 outputs
  int unit_bytes;
  int block_bytes;  // of one output's unit in a GGUF file
  bool halves = false;             // each half of a group has a scale, and an offset
  bool named = false;              // a code names one of 16 values
  const int8_t* values = nullptr;  // these values
};

constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t E2M1_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // twice the numbers

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
    {4, 0, false, 32, 256, 288, 18, false, true, IQ4_VALUES},               // IQ4_NL
    {4, 0, false, 256, 256, 8 * 256 + 160, 136, false, true, IQ4_VALUES},   // IQ4_XS
    {4, 0, false, 32, 256, 272, 17, false, true, E2M1_VALUES},              // MXFP4
    {2, 0, true, 256, 128, 8 * 128 + 320, 84, true},     // Q2_K
    {3, 4, false, 256, 192, 8 * 192 + 224, 110, true},   // Q3_K
    {16, 0, false, 2, 0, 64, 4},                          // F16
};

constexpr int PANEL = KV_PANEL_OUTPUTS;

inline bool has_blocks(int64_t kind) { return kind != KV_BF16 && kind != KV_F16; }
inline bool is_kind(int64_t kind) { return kind >= 0 && kind < KV_KINDS; }
inline int64_t panel_bytes(int64_t kind, int64_t inputs) {
  return inputs / LAYOUTS[kind].unit * LAYOUTS[kind].unit_bytes;
}
inline int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

}  // namespace
