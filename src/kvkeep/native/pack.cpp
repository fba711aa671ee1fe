// Panels from the blocks of a GGUF file, and back. Nothing is rounded: codes, scales and offsets are moved.

#include <atomic>

#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "checks.h"
#include "float_mode.h"
#include "numbers.h"
#include "panels.h"
#include "runtime.h"

namespace {

struct BlockParts {  // one block of a row: its codes (unsigned where there is a zero point), scales and offsets
  uint8_t codes[256];
  uint8_t scales[16], offsets[8];  // of groups, in K kinds; of Q2_K and Q3_K as in the file
  uint16_t scale, offset;          // float16; the scale of MXFP4 is an exponent
};

// The low nibbles of `width` bytes, then their high ones, and so on.
void unpack_nibbles(const uint8_t* data, int bytes, int width, uint8_t* codes) {
  for (int at = 0; at < bytes; at += width, codes += 2 * width)
    for (int i = 0; i < width; i++) {
      codes[i] = data[at + i] & 15;
      codes[width + i] = data[at + i] >> 4;
    }
}
void pack_nibbles(const uint8_t* codes, int bytes, int width, uint8_t* data) {
  for (int at = 0; at < bytes; at += width, codes += 2 * width)
    for (int i = 0; i < width; i++) data[at + i] = uint8_t((codes[i] & 15) | codes[width + i] << 4);
}

void unpack_k_scales(const uint8_t* data, BlockParts& u) {  // 6 bits each, in 12 bytes
  for (int i = 0; i < 4; i++) {
    u.scales[i] = data[i] & 63;
    u.offsets[i] = data[4 + i] & 63;
    u.scales[4 + i] = uint8_t((data[8 + i] & 15) | (data[i] >> 2 & 48));
    u.offsets[4 + i] = uint8_t(data[8 + i] >> 4 | (data[4 + i] >> 2 & 48));
  }
}
void pack_k_scales(const BlockParts& u, uint8_t* data) {
  for (int i = 0; i < 4; i++) {
    data[i] = uint8_t(u.scales[i] | (u.scales[4 + i] & 48) << 2);
    data[4 + i] = uint8_t(u.offsets[i] | (u.offsets[4 + i] & 48) << 2);
    data[8 + i] = uint8_t((u.scales[4 + i] & 15) | u.offsets[4 + i] << 4);
  }
}

// Two bits of each code: those of 32 inputs that are 32 apart share bytes.
void unpack_pairs(const uint8_t* data, uint8_t* codes) {
  for (int i = 0; i < 256; i++) codes[i] = data[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
}
void pack_pairs(const uint8_t* codes, uint8_t* data) {
  for (int i = 0; i < 256; i++) data[i / 128 * 32 + i % 32] |= uint8_t((codes[i] & 3) << i % 128 / 32 * 2);
}

void read_block(int64_t kind, const uint8_t* block, BlockParts& u) {
  u.offset = 0;
  switch (kind) {
    case KV_Q4_0: memcpy(&u.scale, block, 2); unpack_nibbles(block + 2, 16, 16, u.codes); return;
    case KV_Q4_1:
      memcpy(&u.scale, block, 2);
      memcpy(&u.offset, block + 2, 2);
      return unpack_nibbles(block + 4, 16, 16, u.codes);
    case KV_Q5_0:
    case KV_Q5_1: {
      int at = kind == KV_Q5_0 ? 2 : 4;
      memcpy(&u.scale, block, 2);
      if (kind == KV_Q5_1) memcpy(&u.offset, block + 2, 2);
      unpack_nibbles(block + at + 4, 16, 16, u.codes);
      for (int i = 0; i < 32; i++) u.codes[i] |= uint8_t((block[at + i / 8] >> i % 8 & 1) << 4);
      return;
    }
    case KV_Q8_0: memcpy(&u.scale, block, 2); memcpy(u.codes, block + 2, 32); return;
    case KV_Q2_K:
      memcpy(u.scales, block, 16);
      memcpy(&u.scale, block + 80, 2);
      memcpy(&u.offset, block + 82, 2);
      return unpack_pairs(block + 16, u.codes);
    case KV_Q3_K:
      memcpy(u.scales, block + 96, 12);
      memcpy(&u.scale, block + 108, 2);
      unpack_pairs(block + 32, u.codes);
      for (int i = 0; i < 256; i++) u.codes[i] |= uint8_t((block[i % 32] >> i / 32 & 1) << 2);
      return;
    case KV_IQ4_NL: memcpy(&u.scale, block, 2); unpack_nibbles(block + 2, 16, 16, u.codes); return;
    case KV_MXFP4: u.scale = block[0]; unpack_nibbles(block + 1, 16, 16, u.codes); return;
    case KV_IQ4_XS:
      memcpy(&u.scale, block, 2);
      for (int g = 0; g < 8; g++) {
        const int high = (block[2 + g / 4] >> g % 4 * 2) & 3, low = (block[4 + g / 2] >> g % 2 * 4) & 15;
        u.scales[g] = uint8_t((high << 4 | low) - 32);
      }
      return unpack_nibbles(block + 8, 128, 16, u.codes);
    case KV_Q4_K:
    case KV_Q5_K: {
      memcpy(&u.scale, block, 2);
      memcpy(&u.offset, block + 2, 2);
      unpack_k_scales(block + 4, u);
      unpack_nibbles(block + (kind == KV_Q4_K ? 16 : 48), 128, 32, u.codes);
      if (kind == KV_Q5_K)
        for (int i = 0; i < 256; i++) u.codes[i] |= uint8_t((block[16 + i % 32] >> i / 32 & 1) << 4);
      return;
    }
    default:  // Q6_K
      unpack_nibbles(block, 128, 64, u.codes);
      for (int i = 0; i < 256; i++)
        u.codes[i] |= uint8_t((block[128 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) << 4);
      memcpy(u.scales, block + 192, 16);
      memcpy(&u.scale, block + 208, 2);
  }
}

void write_block(int64_t kind, const BlockParts& u, uint8_t* block) {
  memset(block, 0, LAYOUTS[kind].block_bytes);
  switch (kind) {
    case KV_Q4_0: memcpy(block, &u.scale, 2); pack_nibbles(u.codes, 16, 16, block + 2); return;
    case KV_Q4_1:
      memcpy(block, &u.scale, 2);
      memcpy(block + 2, &u.offset, 2);
      return pack_nibbles(u.codes, 16, 16, block + 4);
    case KV_Q5_0:
    case KV_Q5_1: {
      int at = kind == KV_Q5_0 ? 2 : 4;
      memcpy(block, &u.scale, 2);
      if (kind == KV_Q5_1) memcpy(block + 2, &u.offset, 2);
      pack_nibbles(u.codes, 16, 16, block + at + 4);
      for (int i = 0; i < 32; i++) block[at + i / 8] |= uint8_t((u.codes[i] >> 4 & 1) << i % 8);
      return;
    }
    case KV_Q8_0: memcpy(block, &u.scale, 2); memcpy(block + 2, u.codes, 32); return;
    case KV_Q2_K:
      memcpy(block, u.scales, 16);
      memcpy(block + 80, &u.scale, 2);
      memcpy(block + 82, &u.offset, 2);
      return pack_pairs(u.codes, block + 16);
    case KV_Q3_K:
      memcpy(block + 96, u.scales, 12);
      memcpy(block + 108, &u.scale, 2);
      for (int i = 0; i < 256; i++) block[i % 32] |= uint8_t((u.codes[i] >> 2 & 1) << i / 32);
      return pack_pairs(u.codes, block + 32);
    case KV_IQ4_NL: memcpy(block, &u.scale, 2); pack_nibbles(u.codes, 16, 16, block + 2); return;
    case KV_MXFP4: block[0] = uint8_t(u.scale); pack_nibbles(u.codes, 16, 16, block + 1); return;
    case KV_IQ4_XS:
      memcpy(block, &u.scale, 2);
      for (int g = 0; g < 8; g++) {
        const int scale = int8_t(u.scales[g]) + 32;
        block[2 + g / 4] |= uint8_t((scale >> 4) << g % 4 * 2);
        block[4 + g / 2] |= uint8_t((scale & 15) << g % 2 * 4);
      }
      return pack_nibbles(u.codes, 128, 16, block + 8);
    case KV_Q4_K:
    case KV_Q5_K: {
      memcpy(block, &u.scale, 2);
      memcpy(block + 2, &u.offset, 2);
      pack_k_scales(u, block + 4);
      pack_nibbles(u.codes, 128, 32, block + (kind == KV_Q4_K ? 16 : 48));
      if (kind == KV_Q5_K)
        for (int i = 0; i < 256; i++) block[16 + i % 32] |= uint8_t((u.codes[i] >> 4 & 1) << i / 32);
      return;
    }
    default:
      pack_nibbles(u.codes, 128, 64, block);
      for (int i = 0; i < 256; i++)
        block[128 + i / 128 * 32 + i % 32] |= uint8_t((u.codes[i] >> 4 & 3) << i % 128 / 32 * 2);
      memcpy(block + 192, u.scales, 16);
      memcpy(block + 208, &u.scale, 2);
  }
}

// The codes of a group, to or from the lane of one output.
void write_codes(int bits, const uint8_t* codes, int lane, uint8_t* out) {
  uint8_t* at = out + lane * 4;
  if (bits == 8) {
    for (int i = 0; i < 8; i++) memcpy(at + i * 64, codes + 4 * i, 4);
    return;
  }
  if (bits <= 3) {
    for (int b = 0; b < 4; b++) {
      int parts[2] = {0, 0}, third = 0;
      for (int i = 0; i < 8; i++) {
        parts[i / 4] |= (codes[4 * i + b] & 3) << i % 4 * 2;
        third |= (codes[4 * i + b] >> 2 & 1) << i;
      }
      for (int half = 0; half < 2; half++) at[half * 64 + b] = uint8_t(parts[half]);
      if (bits == 3) at[128 + b] = uint8_t(third);
    }
    return;
  }
  for (int j = 0; j < 4; j++)
    for (int b = 0; b < 4; b++) at[j * 64 + b] = uint8_t((codes[8 * j + b] & 15) | codes[8 * j + 4 + b] << 4);
  if (bits == 5)
    for (int b = 0; b < 4; b++) {
      int all = 0;
      for (int i = 0; i < 8; i++) all |= (codes[4 * i + b] >> 4 & 1) << i;
      at[256 + b] = uint8_t(all);
    }
  if (bits == 6)
    for (int half = 0; half < 2; half++)
      for (int b = 0; b < 4; b++) {
        int all = 0;
        for (int i = 0; i < 4; i++) all |= (codes[16 * half + 4 * i + b] >> 4 & 3) << 2 * i;
        at[256 + half * 64 + b] = uint8_t(all);
      }
}
void read_codes(int bits, const uint8_t* in, int lane, uint8_t* codes) {
  const uint8_t* at = in + lane * 4;
  for (int i = 0; i < 8; i++)
    for (int b = 0; b < 4; b++) {
      uint8_t& code = codes[4 * i + b];
      if (bits == 8) { code = at[i * 64 + b]; continue; }
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

// Bytes of the scales of a unit of 256 inputs, for each output.
int scale_count(int64_t kind) { return kind == KV_Q3_K ? 12 : LAYOUTS[kind].halves ? 16 : 8; }

// The scale of a half of Q3_K: six bits.
int third_scale(const uint8_t* scales, int half) {
  const int low = half < 8 ? scales[half] & 15 : scales[half - 8] >> 4, high = scales[8 + half % 4] >> half / 4 * 2 & 3;
  return (low | high << 4) - 32;
}

void write_unit(int64_t kind, const BlockParts& u, int lane, uint8_t* unit) {
  const KindLayout& l = LAYOUTS[kind];
  int groups = l.unit / 32;
  for (int g = 0; g < groups; g++) write_codes(l.bits, u.codes + 32 * g, lane, unit + g * l.group_bytes);
  uint8_t* rest = unit + groups * l.group_bytes;
  if (groups == 8) {
    int count = scale_count(kind);
    for (int i = 0; i < count; i++) rest[i * 16 + lane] = u.scales[i];
    rest += count * 16;
    if (l.offsets && !l.halves) {
      for (int i = 0; i < 8; i++) rest[i * 16 + lane] = u.offsets[i];
      rest += 128;
    }
  }
  if (kind == KV_MXFP4) { rest[lane] = uint8_t(u.scale); return; }
  memcpy(rest + lane * 2, &u.scale, 2);
  if (l.offsets) memcpy(rest + 32 + lane * 2, &u.offset, 2);
}
void read_unit(int64_t kind, const uint8_t* unit, int lane, BlockParts& u) {
  const KindLayout& l = LAYOUTS[kind];
  int groups = l.unit / 32;
  for (int g = 0; g < groups; g++) read_codes(l.bits, unit + g * l.group_bytes, lane, u.codes + 32 * g);
  const uint8_t* rest = unit + groups * l.group_bytes;
  if (groups == 8) {
    int count = scale_count(kind);
    for (int i = 0; i < count; i++) u.scales[i] = rest[i * 16 + lane];
    rest += count * 16;
    if (l.offsets && !l.halves) {
      for (int i = 0; i < 8; i++) u.offsets[i] = rest[i * 16 + lane];
      rest += 128;
    }
  }
  u.offset = 0;
  if (kind == KV_MXFP4) { u.scale = rest[lane]; return; }
  memcpy(&u.scale, rest + lane * 2, 2);
  if (l.offsets) memcpy(&u.offset, rest + 32 + lane * 2, 2);
}

// Two weights of 16 bits, which lie together in a file.
const uint8_t zeros[4] = {};
void write_pair(int64_t kind, const uint8_t* pair, int lane, uint8_t* unit) {
  if (kind == KV_BF16) { memcpy(unit + lane * 4, pair, 4); return; }
  for (int i = 0; i < 2; i++) memcpy(unit + i * 32 + lane * 2, pair + 2 * i, 2);
}
void read_pair(int64_t kind, const uint8_t* unit, int lane, uint8_t* pair) {
  if (kind == KV_BF16) { memcpy(pair, unit + lane * 4, 4); return; }
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
  for (int i = 0; i < l.unit; i++) {
    float s = scale, o = offset;
    if (kind == KV_Q6_K) s = scale * float(int8_t(u.scales[i / 16]));
    else if (kind == KV_Q2_K) {
      s = scale * float(u.scales[i / 16] & 15);
      o = -(offset * float(u.scales[i / 16] >> 4));
    }
    else if (kind == KV_Q3_K) s = scale * float(third_scale(u.scales, i / 16));
    else if (kind == KV_IQ4_XS) s = scale * float(int8_t(u.scales[i / 32]));
    else if (l.unit == 256) { s = scale * float(u.scales[i / 32]); o = -(offset * float(u.offsets[i / 32])); }
    int code = l.named ? l.values[u.codes[i]] : l.bits == 8 ? int8_t(u.codes[i]) : u.codes[i] - l.zero_point;
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
