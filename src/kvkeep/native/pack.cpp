// Panels from the blocks of a GGUF file, and back. Nothing is rounded: codes, scales and offsets are moved.

#include <atomic>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "checks.h"
#include "file_blocks.h"
#include "float_mode.h"
#include "numbers.h"
#include "runtime.h"

namespace {

// Some bits of four codes at once, a byte each: `mask` of them from bit `first` on.
uint32_t bits_of(const uint8_t* codes, int first, uint32_t mask) {
  uint32_t found;
  memcpy(&found, codes, 4);
  return found >> first & mask * 0x01010101u;
}

// The codes of a group, to or from the lane of one output.
template <int BITS> void write_codes(const uint8_t* codes, int lane, uint8_t* out) {
  constexpr int LOWS = BITS <= 3 ? 2 : 4, HIGHS = BITS == 6 ? 2 : BITS % 2;  // dwords
  constexpr int LOW = 8 / LOWS, HIGH = HIGHS ? 8 / HIGHS : 8;                // groups of four codes in each
  constexpr int width = BITS <= 3 ? 2 : 4, above = BITS - width;
  uint32_t parts[LOWS + HIGHS] = {};
  for (int i = 0; i < 8; i++) {
    parts[i / LOW] |= bits_of(codes + 4 * i, 0, (1 << width) - 1) << i % LOW * width;
    if (HIGHS) parts[LOWS + i / HIGH] |= bits_of(codes + 4 * i, width, (1 << above) - 1) << i % HIGH * above;
  }
  for (int i = 0; i < LOWS + HIGHS; i++) memcpy(out + lane * 4 + 64 * i, &parts[i], 4);
}
void write_codes(int bits, const uint8_t* codes, int lane, uint8_t* out) {
  switch (bits) {
    case 2: return write_codes<2>(codes, lane, out);
    case 3: return write_codes<3>(codes, lane, out);
    case 4: return write_codes<4>(codes, lane, out);
    case 5: return write_codes<5>(codes, lane, out);
    default: return write_codes<6>(codes, lane, out);
  }
}
void read_codes(int bits, const uint8_t* in, int lane, uint8_t* codes) {
  const uint8_t* at = in + lane * 4;
  for (int i = 0; i < 8; i++)
    for (int b = 0; b < 4; b++) {
      uint8_t& code = codes[4 * i + b];
      if (bits <= 3) {
        code = uint8_t(at[i / 4 * 64 + b] >> i % 4 * 2 & 3);
        if (bits == 3) code |= uint8_t((at[128 + b] >> i & 1) << 2);
        continue;
      }
      code = uint8_t(at[i / 2 * 64 + b] >> i % 2 * 4 & 15);
      if (bits == 5) code |= uint8_t((at[256 + b] >> i & 1) << 4);
      if (bits == 6) code |= uint8_t((at[256 + i / 4 * 64 + b] >> i % 4 * 2 & 3) << 4);
    }
}

// Bytes of the scales and offsets of groups of a unit, for each output.
int scale_count(int64_t kind) {
  const KindLayout& l = LAYOUTS[kind];
  return l.unit < 256 ? 0 : (l.unit_bytes - 8 * l.group_bytes - (l.offsets ? 64 : 32)) / PANEL;
}

// The scale of a half of Q3_K: six bits.
int third_scale(const uint8_t* scales, int half) {
  const int low = half < 8 ? scales[half] & 15 : scales[half - 8] >> 4, high = scales[8 + half % 4] >> half / 4 * 2 & 3;
  return (low | high << 4) - 32;
}

void write_unit(int64_t kind, const BlockParts& u, int lane, uint8_t* unit) {
  const KindLayout& l = LAYOUTS[kind];
  const int groups = l.unit / 32, count = scale_count(kind);
  uint8_t* rest = unit + groups * l.group_bytes;
  if (is_raw(kind)) {
    for (int i = 0; unit + 64 * i < rest; i++) memcpy(unit + 64 * i + 4 * lane, u.codes + 4 * i, 4);
  } else
    for (int g = 0; g < groups; g++) write_codes(l.bits, u.codes + 32 * g, lane, unit + g * l.group_bytes);
  for (int i = 0; i < count; i++) rest[i * PANEL + lane] = u.scales[i];
  rest += count * PANEL;
  if (kind == KV_MXFP4) { rest[lane] = uint8_t(u.scale); return; }
  memcpy(rest + lane * 2, &u.scale, 2);
  if (l.offsets) memcpy(rest + 32 + lane * 2, &u.offset, 2);
}
void read_unit(int64_t kind, const uint8_t* unit, int lane, BlockParts& u) {
  const KindLayout& l = LAYOUTS[kind];
  const int groups = l.unit / 32, count = scale_count(kind);
  const uint8_t* rest = unit + groups * l.group_bytes;
  if (is_raw(kind)) {
    for (int i = 0; unit + 64 * i < rest; i++) memcpy(u.codes + 4 * i, unit + 64 * i + 4 * lane, 4);
  } else
    for (int g = 0; g < groups; g++) read_codes(l.bits, unit + g * l.group_bytes, lane, u.codes + 32 * g);
  for (int i = 0; i < count; i++) u.scales[i] = rest[i * PANEL + lane];
  rest += count * PANEL;
  u.offset = 0;
  if (kind == KV_MXFP4) { u.scale = rest[lane]; return; }
  memcpy(&u.scale, rest + lane * 2, 2);
  if (l.offsets) memcpy(&u.offset, rest + 32 + lane * 2, 2);
}

// Two weights of 16 bits, which lie together in a file, or one of 32.
const uint8_t zeros[4] = {};
void write_pair(int64_t kind, const uint8_t* pair, int lane, uint8_t* unit) {
  if (kind != KV_F16) { memcpy(unit + lane * 4, pair, 4); return; }
  for (int i = 0; i < 2; i++) memcpy(unit + i * 32 + lane * 2, pair + 2 * i, 2);
}
void read_pair(int64_t kind, const uint8_t* unit, int lane, uint8_t* pair) {
  if (kind != KV_F16) { memcpy(pair, unit + lane * 4, 4); return; }
  for (int i = 0; i < 2; i++) memcpy(pair + 2 * i, unit + i * 32 + lane * 2, 2);
}

bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }
bool is_finite(int64_t kind, const BlockParts& u) {
  if (kind == KV_MXFP4) return u.scale != 255;
  return is_finite(u.scale) && (!LAYOUTS[kind].offsets || is_finite(u.offset));
}

float scale_of(int64_t kind, const BlockParts& u) {
  if (kind != KV_MXFP4) return half_to_float(u.scale);
  return as_float(u.scale < 2 ? 0x00200000u << u.scale : uint32_t(u.scale - 1) << 23);  // 2^(scale - 128)
}

void dequantise(int64_t kind, const BlockParts& u, float* row) {
  const KindLayout& l = LAYOUTS[kind];
  float scale = scale_of(kind, u), offset = half_to_float(u.offset);
  uint8_t found[256];
  int numbers[16];
  if (has_codebook(kind)) find_entries(kind, u, found, numbers);
  if (kind == KV_TQ1_0) find_digits(u, found);
  const uint8_t* codes = has_codebook(kind) || kind == KV_TQ1_0 ? found : u.codes;
  for (int i = 0; i < l.unit; i++) {
    float s = scale, o = offset;
    if (has_codebook(kind)) s = scale * l.entries.part * float(2 * numbers[i / 16] + 1);
    else if (kind == KV_Q6_K) s = scale * float(int8_t(u.scales[i / 16]));
    else if (kind == KV_Q2_K) {
      s = scale * float(u.scales[i / 16] & 15);
      o = -(offset * float(u.scales[i / 16] >> 4));
    }
    else if (kind == KV_Q3_K) s = scale * float(third_scale(u.scales, i / 16));
    else if (kind == KV_IQ4_XS) s = scale * float(int8_t(u.scales[i / 32]));
    else if (scale_count(kind)) { s = scale * float(u.scales[i / 32]); o = -(offset * float(u.scales[8 + i / 32])); }
    int code = (l.values ? l.values[codes[i]] : l.bits == 8 ? int8_t(codes[i]) : codes[i]) - l.zero_point;
    row[i] = l.offsets ? s * float(code) + o : s * float(code);
  }
}

}  // namespace

// Asks for huge pages: a step reads all weights, and with small pages most of them miss the processor's TLB.
static void prefer_huge_pages(uint8_t* data, int64_t bytes) {
#if defined(__linux__)
  const uintptr_t size = uintptr_t(1) << 21, first = (uintptr_t(data) + size - 1) / size * size;
  const uintptr_t stop = (uintptr_t(data) + uintptr_t(bytes)) / size * size;
  if (stop > first) madvise((void*)first, stop - first, MADV_HUGEPAGE);  // if it fails, pages are small
#endif
}

int64_t kvkeep_packed_bytes(int64_t kind, int64_t inputs, int64_t outputs) {
  if (!is_kind(kind) || !is_size(inputs) || !inputs || inputs % LAYOUTS[kind].unit || !is_size(outputs)) return 0;
  return panels_of(outputs) * panel_bytes(kind, inputs);
}

KvStatus kvkeep_pack(int64_t kind, int64_t inputs, int64_t outputs, KvArray from, int64_t row_bytes, KvArray to) {
  const KvMatrix matrix{to, inputs, outputs, kind};
  if (!matrix_fits(matrix) || !file_rows_fit(matrix, from, row_bytes)) return KV_BAD_CALL;
  const KindLayout& l = LAYOUTS[kind];
  const uint8_t* rows = numbers<uint8_t>(from);
  uint8_t* panels = numbers<uint8_t>(to);
  int64_t size = panel_bytes(kind, inputs), units = inputs / l.unit;
  std::atomic<int> finite{1};
  prefer_huge_pages(panels, panels_of(outputs) * size);
  parallel_for(panels_of(outputs), [&](int64_t panel) {
    uint8_t* to = panels + panel * size;
    BlockParts unit, nothing;
    memset(&nothing, 0, sizeof nothing);
    memset(nothing.codes, l.zero_point, sizeof nothing.codes);
    for (int lane = 0; lane < PANEL; lane++) {
      int64_t output = panel * PANEL + lane;
      const uint8_t* row = rows + output * row_bytes;
      for (int64_t u = 0; u < units; u++) {
        if (!has_blocks(kind)) {
          write_pair(kind, output < outputs ? row + u * 4 : zeros, lane, to + u * 64);
          continue;
        }
        if (output < outputs) {
          read_block(kind, row + u * l.block_bytes, unit);
          if (!is_finite(kind, unit)) finite.store(0, std::memory_order_relaxed);
        }
        write_unit(kind, output < outputs ? unit : nothing, lane, to + u * l.unit_bytes);
      }
    }
  });
  return finite.load() ? KV_DONE : KV_NOT_FINITE;
}

KvStatus kvkeep_unpack(const KvMatrix* matrix, KvArray to, int64_t row_bytes) {
  if (!matrix_fits(*matrix) || !file_rows_fit(*matrix, to, row_bytes)) return KV_BAD_CALL;
  uint8_t* rows = numbers<uint8_t>(to);
  const KindLayout& l = LAYOUTS[matrix->kind];
  int64_t size = panel_bytes(matrix->kind, matrix->inputs), units = matrix->inputs / l.unit;
  parallel_for(panels_of(matrix->outputs), [&](int64_t panel) {
    const uint8_t* from = numbers<uint8_t>(matrix->panels) + panel * size;
    BlockParts unit;
    memset(&unit, 0, sizeof unit);
    for (int lane = 0; lane < PANEL && panel * PANEL + lane < matrix->outputs; lane++) {
      uint8_t* row = rows + (panel * PANEL + lane) * row_bytes;
      for (int64_t u = 0; u < units; u++) {
        if (!has_blocks(matrix->kind)) { read_pair(matrix->kind, from + u * 64, lane, row + u * 4); continue; }
        read_unit(matrix->kind, from + u * l.unit_bytes, lane, unit);
        write_block(matrix->kind, unit, row + u * l.block_bytes);
      }
    }
  });
  return KV_DONE;
}

KvStatus kvkeep_rows(const KvMatrix* matrix, KvArray chosen, KvArray to) {
  if (!matrix_fits(*matrix) || !outputs_fit(*matrix, chosen, to)) return KV_BAD_CALL;
  const int64_t* outputs = numbers<int64_t>(chosen);
  float* rows = numbers<float>(to);
  FloatMode mode;
  const KindLayout& l = LAYOUTS[matrix->kind];
  int64_t size = panel_bytes(matrix->kind, matrix->inputs), units = matrix->inputs / l.unit;
  BlockParts unit;
  memset(&unit, 0, sizeof unit);
  for (int64_t r = 0; r < chosen.length; r++, rows += matrix->inputs) {
    const uint8_t* from = numbers<uint8_t>(matrix->panels) + outputs[r] / PANEL * size;
    int lane = int(outputs[r] % PANEL);
    for (int64_t u = 0; u < units; u++) {
      if (!has_blocks(matrix->kind)) {
        uint8_t pair[4];
        read_pair(matrix->kind, from + u * 64, lane, pair);
        if (matrix->kind == KV_F32) { memcpy(rows + u, pair, 4); continue; }
        for (int i = 0; i < 2; i++) {
          uint16_t bits;
          memcpy(&bits, pair + 2 * i, 2);
          rows[2 * u + i] = matrix->kind == KV_F16 ? half_to_float(bits) : as_float(uint32_t(bits) << 16);
        }
        continue;
      }
      read_unit(matrix->kind, from + u * l.unit_bytes, lane, unit);
      dequantise(matrix->kind, unit, rows + u * l.unit);
    }
  }
  return KV_DONE;
}
