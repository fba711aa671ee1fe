// Entries that are kept as codes or as cells of a sketch, read back as bfloat16.
#pragma once

#include "kvkeep.h"
#include "vectors.h"

namespace {

constexpr int64_t TILE_ENTRIES = KV_TILE_ENTRIES;  // of a tile, and of a group of codes

INLINE vf rounded(vf v) {  // to bfloat16, as floats; numbers only
  PARTWISE {
    const I u = as_int(v.part[i]), odd = iand(ishr<16>(u), iset(1));
    v.part[i] = as_f(iand(iadd(u, iadd(iset(0x7fff), odd)), iset(int32_t(0xffff0000))));
  }
  return v;
}

INLINE vf signed_words(const uint8_t* p) {  // 16 signed integers of 16 bits
  vf r;
  PARTWISE {
    const I u = u16_to_int((const uint16_t*)p + i * W);
    r.part[i] = to_float(isub(iand(iadd(u, iset(0x8000)), iset(0xffff)), iset(0x8000)));
  }
  return r;
}

// Codes first .. first + 15 of `count`, packed as stores/evicted/coded.py packs them: of n bytes, byte j has codes
// j, j + n, ..
template <int BITS> INLINE vf decode_codes(const uint8_t* codes, int64_t count, int64_t first) {
  if constexpr (BITS == 16) return signed_words(codes + 2 * first) * vset(1.0f / 256);
  if constexpr (BITS == 8) return vload_ubytes(codes + first);
  constexpr int mask = (1 << BITS) - 1;
  const int64_t n = count * BITS / 8;
  if (n % 16 == 0) {  // they lie in sixteen bytes, at the same bits of each
    int shift = 0;
    for (; first >= n; first -= n) shift += BITS;
    vf r = vset(as_float(uint32_t(127 - shift) << 23));  // 2^-shift: exact, and no shift by a variable
    PARTWISE {
      const I shifted = iand(ubytes_to_int(codes + first + i * W), iset(mask << shift));
      r.part[i] = fmul(to_float(shifted), r.part[i]);
    }
    return r;
  }
  uint8_t bytes[16];
  if (n % 8 == 0) {
    for (int64_t i = 0; i < 16; i += 8) {  // eight codes at a time
      uint64_t eight;
      memcpy(&eight, codes + (first + i) % n, 8);
      eight = eight >> ((first + i) / n * BITS) & uint64_t(mask) * 0x0101010101010101u;
      memcpy(bytes + i, &eight, 8);
    }
  } else {
    for (int64_t i = 0; i < 16; i++) bytes[i] = uint8_t(codes[(first + i) % n] >> ((first + i) / n * BITS) & mask);
  }
  return vload_ubytes(bytes);
}

template <int BITS> struct Bits {};

// f(Bits<bits>()): kernels are compiled for each number of bits of a code.
template <class F> INLINE void with_bits(int64_t bits, const F& f) {
  switch (bits) {
    case 2: return f(Bits<2>());
    case 4: return f(Bits<4>());
    case 8: return f(Bits<8>());
    default: return f(Bits<16>());
  }
}

INLINE const uint8_t* codes_of_group(const KvSide& side, int64_t lane, int64_t group) {
  return side.bits == 16 ? row_of<uint8_t>(side.rows, 2 * lane, 2 * group) : row_of<uint8_t>(side.rows, lane, group);
}

// A group of keys as a tile, [dim / 2][32] pairs of channels (transpose.h).
template <int BITS>
static void write_group_of_keys(Bits<BITS>, const KvSide& keys, int64_t lane, int64_t group, int64_t dim,
                                uint32_t* tile) {
  const uint8_t* codes = codes_of_group(keys, lane, group);
  const uint16_t* scales = row_of<uint16_t>(keys.scale, lane, group);
  const uint16_t* offsets = row_of<uint16_t>(keys.offset, lane, group);
  constexpr int64_t bytes = TILE_ENTRIES * BITS / 8;
  auto channel = [&](int64_t d, int64_t i) {
    const vf scale = vset(half_to_float(scales[d])), offset = vset(half_to_float(offsets[d]));
    return rounded(vfma(decode_codes<BITS>(codes + d * bytes, TILE_ENTRIES, i), scale, offset));
  };
  for (int64_t d = 0; d < dim; d += 2, tile += TILE_ENTRIES)
    for (int64_t i = 0; i < TILE_ENTRIES; i += 16) {
      const vf first = channel(d, i), second = d + 1 < dim ? channel(d + 1, i) : vset(0.0f);
      for (int part = 0; part < PARTS; part++)
        istore(tile + i + part * W, ior(ishr<16>(as_int(first.part[part])), as_int(second.part[part])));
    }
}

// A group of values as a tile, 32 rows of floats, `stride` apart.
template <int BITS>
static void write_group_of_values(Bits<BITS>, const KvSide& values, int64_t lane, int64_t group, int64_t dim,
                                  float* tile, int64_t stride) {
  const int64_t width = values.group, parts = dim / width, bytes = width * BITS / 8;
  const uint8_t* codes = codes_of_group(values, lane, group);
  const uint16_t* scales = row_of<uint16_t>(values.scale, lane, group);
  const uint16_t* offsets = row_of<uint16_t>(values.offset, lane, group);
  const float *mean = numbers<float>(values.mean), *deviation = numbers<float>(values.deviation);
  for (int64_t part = 0; part < parts; part++)
    for (int64_t i = 0; i < TILE_ENTRIES; i++) {
      const int64_t at = part * TILE_ENTRIES + i;
      const vf scale = vset(half_to_float(scales[at])), offset = vset(half_to_float(offsets[at]));
      for (int64_t c = 0; c < width; c += 16) {
        const int64_t channel = part * width + c;
        vf x = vfma(decode_codes<BITS>(codes + at * bytes, width, c), scale, offset);
        const int64_t of_lane = lane * dim + channel;
        if (mean) x = vfma(x, vload(deviation + of_lane), vload(mean + of_lane));
        vstore(tile + i * stride + channel, rounded(x));
      }
    }
}

static void write_group_of_keys(const KvSide& keys, int64_t lane, int64_t group, int64_t dim, uint32_t* tile) {
  with_bits(keys.bits, [&](auto bits) { write_group_of_keys(bits, keys, lane, group, dim, tile); });
}

static void write_group_of_values(const KvSide& values, int64_t lane, int64_t group, int64_t dim, float* tile,
                                  int64_t stride) {
  with_bits(values.bits, [&](auto bits) { write_group_of_values(bits, values, lane, group, dim, tile, stride); });
}

// n entries of codes of 8 bits, offset + scale * code of each channel.
static void write_codes(const int8_t* codes, int64_t row, const uint16_t* scale, const uint16_t* offset, int64_t n,
                        int64_t dim, bf16* out) {
  for (int64_t d = 0; d < dim; d += 16) {
    const vf times = vload_half(scale + d), plus = vload_half(offset + d);
    for (int64_t i = 0; i < n; i++)
      vstore_bf16(out + i * dim + d, vfma(vload_bytes(codes + i * row + d), times, plus));
  }
}

INLINE vf median_of_3(vf a, vf b, vf c) { return vmax(vmin(a, b), vmin(vmax(a, b), c)); }

// What n entries of a sketch are estimated to be, the first of them having `places`, `apart` from one sum to the next.
static void write_estimates(const bf16* cells, const int32_t* places, int64_t apart, int64_t sums, bool median,
                            const float* mean, int64_t n, int64_t dim, bf16* out) {
  for (int64_t i = 0; i < n; i++, out += dim)
    for (int64_t d = 0; d < dim; d += 16) {
      auto cell = [&](int64_t s) { return vload_bf16(cells + places[s * apart + i] * dim + d); };
      vf estimate = vset(0.0f);
      if (!median || sums == 1) {
        for (int64_t s = 0; s < sums; s++) estimate = estimate + cell(s);
        estimate = estimate * vset(1.0f / float(sums));
      } else if (sums == 3) {
        estimate = median_of_3(cell(0), cell(1), cell(2));
      } else {  // neither the least nor the greatest of four is the median of five
        const vf a = cell(0), b = cell(1), c = cell(2), e = cell(3);
        estimate = median_of_3(vmax(vmin(a, b), vmin(c, e)), vmin(vmax(a, b), vmax(c, e)), cell(4));
      }
      vstore_bf16(out + d, mean ? estimate + vload(mean + d) : estimate);
    }
}

}  // namespace
