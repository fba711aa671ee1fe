// The blocks of a GGUF file, taken apart and put together again.
#pragma once

#include <string.h>

#include "panels.h"

namespace {

struct BlockParts {  // one block of a row: its codes (unsigned where there is a zero point), scales and offsets
  uint8_t codes[256];      // where `is_raw`, the bytes of dwords as panels have them
  uint8_t scales[24];      // bytes of groups as panels have them
  uint16_t scale, offset;  // float16; the scale of MXFP4 is an exponent
};

// Whether the dwords of a panel are moved as they are, and name weights in ways of their own.
bool is_raw(int64_t kind) { return kind == KV_Q8_0 || kind == KV_TQ1_0 || has_codebook(kind); }

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

void unpack_k_scales(const uint8_t* data, BlockParts& u) {  // and offsets: 6 bits each, in 12 bytes
  for (int i = 0; i < 4; i++) {
    u.scales[i] = data[i] & 63;
    u.scales[8 + i] = data[4 + i] & 63;
    u.scales[4 + i] = uint8_t((data[8 + i] & 15) | (data[i] >> 2 & 48));
    u.scales[12 + i] = uint8_t(data[8 + i] >> 4 | (data[4 + i] >> 2 & 48));
  }
}
void pack_k_scales(const BlockParts& u, uint8_t* data) {
  for (int i = 0; i < 4; i++) {
    data[i] = uint8_t(u.scales[i] | (u.scales[4 + i] & 48) << 2);
    data[4 + i] = uint8_t(u.scales[8 + i] | (u.scales[12 + i] & 48) << 2);
    data[8 + i] = uint8_t((u.scales[4 + i] & 15) | u.scales[12 + i] << 4);
  }
}

// Adds bits of 32 bytes, `mask` of them from bit `from` on, to 32 codes from bit `to` on.
void add_bits(const uint8_t* data, int from, int mask, int to, uint8_t* codes) {
  for (int i = 0; i < 32; i++) codes[i] |= uint8_t((data[i] >> from & mask) << to);
}

// Two bits of each code: those of 32 inputs that are 32 apart share bytes.
void unpack_pairs(const uint8_t* data, uint8_t* codes) {
  memset(codes, 0, 256);
  for (int part = 0; part < 8; part++) add_bits(data + part / 4 * 32, part % 4 * 2, 3, 0, codes + 32 * part);
}
void pack_pairs(const uint8_t* codes, uint8_t* data) {
  for (int i = 0; i < 256; i++) data[i / 128 * 32 + i % 32] |= uint8_t((codes[i] & 3) << i % 128 / 32 * 2);
}

// ---- kinds with a codebook ------------------------------------------------------------------------------------------

template <bool BACK> void copy(void* part, void* file, int bytes) {
  if (BACK) memcpy(file, part, bytes);
  else memcpy(part, file, bytes);
}

// 32 bits, that of weight i in bit i, as panels have them: bit i / 4 of byte i % 4; and back.
uint32_t moved_bits(uint32_t bits, bool back) {
  uint32_t made = 0;
  for (int i = 0; i < 32; i++) {
    const int at = i % 4 * 8 + i / 4;
    made |= (bits >> (back ? at : i) & 1) << (back ? i : at);
  }
  return made;
}

// Four times seven bits, and four bits, as four bytes with one of the four in the highest bit; and back.
uint32_t moved_sevens(uint32_t bits, bool back) {
  uint32_t made = 0;
  for (int i = 0; i < 32; i++) {
    const int in_file = i % 8 < 7 ? i / 8 * 7 + i % 8 : 28 + i / 8;
    made |= (bits >> (back ? i : in_file) & 1) << (back ? in_file : i);
  }
  return made;
}

template <bool BACK> void move_signs(uint8_t* part, uint8_t* file, bool sevens) {
  uint32_t bits;
  memcpy(&bits, BACK ? part : file, 4);
  if (BACK) bits = moved_bits(bits, true);
  if (sevens) bits = moved_sevens(bits, BACK);
  if (!BACK) bits = moved_bits(bits, false);
  memcpy(BACK ? file : part, &bits, 4);
}

// The parts of a block, from a file or to it.
template <bool BACK> void move_entries(int64_t kind, uint8_t* block, BlockParts& u) {
  const int bytes = LAYOUTS[kind].group_bytes / PANEL, indices = kind == KV_IQ3_XXS || kind == KV_IQ3_S ? 8 : 4;
  uint8_t* part = u.codes;
  for (int g = 0; g < 8; g++, part += bytes) {
    if (kind == KV_IQ2_XS) {  // nine bits of an index and seven signs together
      uint8_t signs[4];
      if (BACK) move_signs<true>(part + 4, signs, false);
      for (int k = 0; k < 4; k++) {
        uint8_t* both = block + 2 + 8 * g + 2 * k;
        copy<BACK>(part + k, both, 1);
        if (BACK) both[1] = uint8_t(signs[k] << 1 | signs[k] >> 7);
        else signs[k] = uint8_t(both[1] >> 1 | both[1] << 7);
      }
      if (!BACK) move_signs<false>(part + 4, signs, false);
      continue;
    }
    copy<BACK>(part, block + (kind == KV_IQ1_M ? 0 : 2) + (kind == KV_IQ2_XXS ? 8 : indices) * g, indices);
    if (kind == KV_IQ2_XXS) move_signs<BACK>(part + 4, block + 6 + 8 * g, true);
    if (kind == KV_IQ2_S) move_signs<BACK>(part + 4, block + 34 + 4 * g, false);
    if (kind == KV_IQ3_XXS) move_signs<BACK>(part + 8, block + 66 + 4 * g, true);
    if (kind == KV_IQ3_S) move_signs<BACK>(part + 8, block + 74 + 4 * g, false);
  }
  if (kind == KV_IQ2_XS) copy<BACK>(u.scales, block + 66, 8);
  if (kind == KV_IQ2_S) copy<BACK>(u.scales, block + 66, 16);
  if (kind == KV_IQ3_S) {
    copy<BACK>(u.scales, block + 66, 8);
    copy<BACK>(u.scales + 8, block + 106, 4);
  }
  if (kind == KV_IQ1_S) copy<BACK>(u.scales, block + 34, 16);
  if (kind != KV_IQ1_M) return copy<BACK>(&u.scale, block, 2);
  copy<BACK>(u.scales, block + 32, 16);
  if (!BACK) u.scales[20] = u.scales[21] = 0, u.scale = 0;
  for (int p = 0; p < 4; p++) {  // scales of two groups, 12 bits, below four of the unit's
    uint8_t &low = u.scales[16 + p], &high = u.scales[20 + p / 2];
    uint8_t* both = block + 48 + 2 * p;
    copy<BACK>(&low, both, 1);
    if (BACK) both[1] = uint8_t((high >> p % 2 * 4 & 15) | (u.scale >> 4 * p & 15) << 4);
    else {
      high |= uint8_t((both[1] & 15) << p % 2 * 4);
      u.scale |= uint16_t(both[1] >> 4 << 4 * p);
    }
  }
}

// The codes of a block's weights, and the number of the scale of each half of a group.
void find_entries(int64_t kind, const BlockParts& u, uint8_t (&codes)[256], int (&numbers)[16]) {
  const Entries& e = LAYOUTS[kind].entries;
  const int bytes = LAYOUTS[kind].group_bytes / PANEL;
  for (int i = 0; i < 256; i++) {
    const int g = i / 32, k = i % 32 / e.weights, w = i % e.weights, pair = u.scales[2 * g] | u.scales[2 * g + 1] << 8;
    const uint8_t* part = u.codes + g * bytes;
    uint32_t signs = 0, high = uint32_t(pair);
    if (kind != KV_IQ1_S && kind != KV_IQ1_M) memcpy(&signs, part + bytes - 4, 4);
    const uint32_t beside = signs >> 25;
    if (kind == KV_IQ2_XXS || kind == KV_IQ2_XS || kind == KV_IQ3_XXS) {
      signs = moved_bits(signs, true) >> i % 32 / 8 * 8;
      signs = i % 8 < 7 ? signs >> i % 8 : uint32_t(__builtin_parity(signs & 127));
    } else if (kind == KV_IQ1_S || kind == KV_IQ1_M)
      signs = uint32_t(pair >> (kind == KV_IQ1_S ? 15 : 4 * k + 3));
    else signs = moved_bits(signs, true) >> i % 32;
    if (kind == KV_IQ2_XS) high = beside;
    if (kind == KV_IQ2_S || kind == KV_IQ3_S) high = u.scales[g];
    const uint32_t index = part[k] | (high >> e.step * k & ((1u << e.high) - 1)) << 8, entry = e.codes[index];
    const uint32_t code = e.weights == 8 ? entry >> (w % 4 * 8 + w / 4 * 2) & 3 : entry >> 8 * w & 7;
    codes[i] = uint8_t(code | (signs & 1) << (e.weights == 8 ? 2 : 3));

    const int half = i / 16;
    int& number = numbers[half];
    if (kind == KV_IQ2_XS) number = u.scales[g] >> half % 2 * 4 & 15;
    else if (kind == KV_IQ2_S) number = u.scales[8 + g] >> half % 2 * 4 & 15;
    else if (kind == KV_IQ3_S) number = u.scales[8 + g / 2] >> g % 2 * 4 & 15;
    else if (kind == KV_IQ1_S) number = pair >> 12 & 7;
    else if (kind == KV_IQ1_M)
      number = (u.scales[16 + g / 2] | (u.scales[20 + g / 4] >> g / 2 % 2 * 4 & 15) << 8) >> half % 4 * 3 & 7;
    else number = int((beside & 1) | (beside >> 1 & 2) | (beside >> 2 & 4) | (beside >> 3 & 8));
  }
}

// The codes of a block of TQ1_0: five digits of each of 32 bytes and of 16, four of each of four.
void find_digits(const BlockParts& u, uint8_t (&codes)[256]) {
  constexpr int POWERS[5] = {1, 3, 9, 27, 81};
  for (int i = 0; i < 256; i++) {
    const int byte = i < 160 ? i % 32 : i < 240 ? 32 + i % 16 : 48 + i % 4;
    const int digit = i < 160 ? i / 32 : i < 240 ? (i - 160) / 16 : (i - 240) / 4;
    codes[i] = uint8_t(u.codes[byte] * POWERS[digit] % 256 * 3 / 256);
  }
}

// ---- all kinds ------------------------------------------------------------------------------------------------------

void read_block(int64_t kind, const uint8_t* block, BlockParts& u) {
  u.offset = 0;
  if (has_codebook(kind)) return move_entries<false>(kind, const_cast<uint8_t*>(block), u);
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
      for (int part = 0; part < 8; part++) add_bits(block, part, 1, 2, u.codes + 32 * part);
      return;
    case KV_TQ1_0: memcpy(u.codes, block, 52); memcpy(&u.scale, block + 52, 2); return;
    case KV_TQ2_0: unpack_pairs(block, u.codes); memcpy(&u.scale, block + 64, 2); return;
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
        for (int part = 0; part < 8; part++) add_bits(block + 16, part, 1, 4, u.codes + 32 * part);
      return;
    }
    default:  // Q6_K
      unpack_nibbles(block, 128, 64, u.codes);
      for (int part = 0; part < 8; part++)
        add_bits(block + 128 + part / 4 * 32, part % 4 * 2, 3, 4, u.codes + 32 * part);
      memcpy(u.scales, block + 192, 16);
      memcpy(&u.scale, block + 208, 2);
  }
}

void write_block(int64_t kind, const BlockParts& u, uint8_t* block) {
  memset(block, 0, LAYOUTS[kind].block_bytes);
  if (has_codebook(kind)) return move_entries<true>(kind, block, const_cast<BlockParts&>(u));
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
    case KV_TQ1_0: memcpy(block, u.codes, 52); memcpy(block + 52, &u.scale, 2); return;
    case KV_TQ2_0: memcpy(block + 64, &u.scale, 2); pack_pairs(u.codes, block); return;
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

}  // namespace
