// Rows of inputs as products read them: rounded to 8 bits by groups of 32, or as floats.
#pragma once

#include "runtime.h"
#include "vectors.h"

namespace {

constexpr int ROW_TILE = 16;  // rows that pass a group of weights while its codes are in registers

struct InputGroup {  // 32 inputs of a row: scale * code
  int8_t codes[32];
  float scale;                             // the largest absolute value / 127
  float sum;                               // scale * total
  int32_t total, first_half, second_half;  // sums of all codes, and of each half
};

static void round_group(const bf16* x, InputGroup& to) {
  const vf a = vload_bf16(x), b = vload_bf16(x + 16), zero = vset(0.0f);
  if (sum((a - a) + (b - b)) != 0.0f) {  // an infinity or a NaN makes every output NaN, on every processor
    memset(to.codes, 0, sizeof to.codes);
    to.scale = to.sum = as_float(0x7fc00000);
    to.total = to.first_half = to.second_half = 0;
    return;
  }
  const float largest = maximum(vmax(vmax(a, zero - a), vmax(b, zero - b)));
  bool zero_group = largest < 1e-30f;  // keeps 127 / largest finite
  const vf inverse = vset(zero_group ? 0.0f : 127.0f / largest), magic = vset(12582912.0f);
  // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even. Sums of a few integers are exact.
  const vf first = a * inverse + magic, second = b * inverse + magic;
  UNROLLED for (int i = 0; i < PARTS; i++) {
    const I bias = iset(0x4b400000);
    int_to_bytes(to.codes + i * W, isub(as_int(first.part[i]), bias));
    int_to_bytes(to.codes + 16 + i * W, isub(as_int(second.part[i]), bias));
  }
  to.scale = zero_group ? 0.0f : largest / 127.0f;
  to.first_half = int32_t(sum(first - magic));
  to.second_half = int32_t(sum(second - magic));
  to.total = to.first_half + to.second_half;
  to.sum = to.scale * float(to.total);
}

// Writes a row to its place in a tile of `count` rows.
static void prepare_row(const bf16* x, int64_t inputs, bool round, void* tile, int64_t row, int64_t count) {
  if (round) {
    InputGroup* to = (InputGroup*)tile + row;
    for (int64_t g = 0; g < inputs / 32; g++) round_group(x + 32 * g, to[g * count]);
  } else {
    float* to = (float*)tile + row * inputs;
    for (int64_t i = 0; i < inputs; i++) to[i] = widen(x[i]);
  }
}

// The rows of a product. Rounded, they are tiles of ROW_TILE rows (the last may have fewer), [group][row] of
// InputGroup; for bfloat16 weights they are floats, [row][input].
struct InputRows {
  const bf16* x;
  int64_t rows, inputs, stride;
  void* data = nullptr;     // scratch of this thread, set by `prepare`
  bool is_rounded = false;  // what `data` holds

  int64_t tiles() const { return (rows + ROW_TILE - 1) / ROW_TILE; }
  int rows_of(int64_t tile) const { return int(min64(ROW_TILE, rows - tile * ROW_TILE)); }
  void* tile(int64_t t) const { return (char*)data + bytes_of(is_rounded, t * ROW_TILE, inputs); }

  static int64_t bytes_of(bool round, int64_t rows, int64_t inputs) {
    return round ? rows * (inputs / 32) * int64_t(sizeof(InputGroup)) : rows * inputs * 4;
  }
  static KvScratch kind_of(bool round) { return round ? KV_SCRATCH_INPUTS : KV_SCRATCH_FLOATS; }

  // Once for all matrices, one after the other, that want the same form.
  void prepare(bool round) {
    if (data && is_rounded == round) return;
    is_rounded = round;
    data = kv_scratch(kind_of(round), size_t(bytes_of(round, rows, inputs)));
    if (!data) return;
    for_each_row(rows, [&](int64_t r) {
      const int64_t first = r / ROW_TILE * ROW_TILE;
      prepare_row(x + r * stride, inputs, round, tile(r / ROW_TILE), r - first, min64(ROW_TILE, rows - first));
    });
  }
};

}  // namespace
