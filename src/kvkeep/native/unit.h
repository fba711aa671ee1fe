// A unit of a panel as products read it: the weights of a group of 32 inputs as integers, and their scales.
#pragma once

#include "dot.h"
#include "panels.h"

namespace {

// 2^(exponent - 128), as the product of two powers that are not too small.
INLINE F power_of_two(I exponent) {
  const I half = ishr<1>(exponent), bias = iset(127 - 64);
  return fmul(as_f(ishl<23>(iadd(half, bias))), as_f(ishl<23>(iadd(isub(exponent, half), bias))));
}

template <int KIND> constexpr int bits_of() {
  return LAYOUTS[KIND].values && !has_codebook(KIND) ? 8 : LAYOUTS[KIND].bits;
}
template <int KIND> constexpr int zero_point_of() {
  return bits_of<KIND>() == 8 ? SIGNED_ZERO : LAYOUTS[KIND].zero_point;
}

template <int KIND> struct Unit {  // one unit of a panel, for the outputs from `lane` on
  static constexpr KindLayout L = LAYOUTS[KIND];
  static constexpr int GROUPS = L.unit / 32, BYTES = L.unit_bytes, BITS = bits_of<KIND>(), ZERO = zero_point_of<KIND>();
  static constexpr bool HALVES = L.halves, OFFSETS = L.offsets, FETCHES = true;
  static constexpr bool SCALED = L.unit_bytes > GROUPS * L.group_bytes + (L.offsets ? 64 : 32);  // of groups
  const uint8_t *codes, *scales;
  F scale, offset;

  INLINE Unit at(const uint8_t* unit, int lane) {
    Unit u;
    u.codes = unit + 4 * lane;
    u.scales = unit + GROUPS * L.group_bytes + lane;
    if constexpr (KIND == KV_MXFP4) {
      u.scale = power_of_two(ubytes_to_int(u.scales));
      u.offset = fset(0.0f);
      return u;
    }
    const uint16_t* halves = (const uint16_t*)(unit + L.unit_bytes - (L.offsets ? 64 : 32)) + lane;
    u.scale = hload(halves);
    if constexpr (has_codebook(KIND)) u.scale = fmul(u.scale, fset(L.entries.part));
    u.offset = L.offsets ? hload(halves + 16) : fset(0.0f);
    return u;
  }
  // Of 6 bits times float16: exact.
  __attribute__((always_inline)) F scale_of(int g) const {
    if constexpr (has_codebook(KIND)) return odd_scale_of(g);
    if constexpr (KIND == KV_IQ4_XS) return fmul(scale, to_float(bytes_to_int((const int8_t*)scales + 16 * g)));
    return SCALED ? fmul(scale, to_float(ubytes_to_int(scales + 16 * g))) : scale;
  }
  // Of half a group. Q3_K has the low four bits of two halves in a byte, and the high two of four in another.
  __attribute__((always_inline)) F half_scale_of(int half) const {
    if constexpr (has_codebook(KIND)) return odd_scale_of(half);
    if constexpr (KIND == KV_Q2_K) return fmul(scale, to_float(iand(ubytes_to_int(scales + 16 * half), iset(15))));
    if constexpr (KIND == KV_Q3_K) {
      I low = ubytes_to_int(scales + 16 * (half & 7)), high = ubytes_to_int(scales + 16 * (8 + (half & 3)));
      low = half < 8 ? iand(low, iset(15)) : ishr<4>(low);
      high = half < 4 ? high : half < 8 ? ishr<2>(high) : half < 12 ? ishr<4>(high) : ishr<6>(high);
      return fmul(scale, to_float(isub(ior(low, ishl<4>(iand(high, iset(3)))), iset(32))));
    }
    return fmul(scale, to_float(bytes_to_int((const int8_t*)scales + 16 * half)));
  }
  __attribute__((always_inline)) F half_offset_of(int half) const {
    return fmul(fsub(fset(0.0f), offset), to_float(ishr<4>(ubytes_to_int(scales + 16 * half))));
  }
  __attribute__((always_inline)) F offset_of(int g) const {
    return GROUPS == 1 ? offset : fmul(fsub(fset(0.0f), offset), to_float(ubytes_to_int(scales + 128 + 16 * g)));
  }

  // ---- kinds with a codebook ----------------------------------------------------------------------------------------

  __attribute__((always_inline)) I half_byte(const uint8_t* at, int number) const {
    const I both = ubytes_to_int(at + number / 2 * 16);
    return number & 1 ? ishr<4>(both) : iand(both, iset(15));
  }
  __attribute__((always_inline)) I pair(int g) const {
    return ior(ubytes_to_int(scales + 32 * g), ishl<8>(ubytes_to_int(scales + 32 * g + 16)));
  }
  __attribute__((always_inline)) I signs(int g) const {
    return iload(codes + g * L.group_bytes + L.group_bytes - 64);
  }
  // The scale of group `at`, or of half `at`: an odd number times the unit's.
  __attribute__((always_inline)) F odd_scale_of(int at) const {
    I number;
    if constexpr (KIND == KV_IQ2_XXS || KIND == KV_IQ3_XXS) {
      number = iand(ishr<25>(signs(at)), iset(0x55));
      number = iand(ior(number, ishr<1>(number)), iset(0x33));
      number = iand(ior(number, ishr<2>(number)), iset(0x0f));
    } else if constexpr (KIND == KV_IQ1_S) {
      number = iand(ishr<12>(pair(at)), iset(7));
    } else if constexpr (KIND == KV_IQ1_M) {
      number = ior(ubytes_to_int(scales + 256 + at / 4 * 16), ishl<8>(half_byte(scales + 320, at / 4)));
      number = at & 2 ? ishr<6>(number) : number;
      number = iand(at & 1 ? ishr<3>(number) : number, iset(7));
    } else
      number = half_byte(scales + (KIND == KV_IQ2_XS ? 0 : 128), at);
    return fmul(scale, to_float(ior(ishl<1>(number), iset(1))));
  }
  // The high bits of the indices of a group, those of the first one from bit 8 on.
  __attribute__((always_inline)) I high_bits(int g) const {
    if constexpr (KIND == KV_IQ2_XS) return ishr<17>(signs(g));
    return ishl<8>(KIND == KV_IQ2_S || KIND == KV_IQ3_S ? ubytes_to_int(scales + 16 * g) : pair(g));
  }
};

struct Scales { F first, second, offset, second_offset; };  // of a group; `second` is of its second half

template <int KIND> INLINE Scales scales_of(const Unit<KIND>& unit, int g) {
  constexpr KindLayout L = LAYOUTS[KIND];
  if constexpr (L.halves) {
    const F first = unit.half_scale_of(2 * g), second = unit.half_scale_of(2 * g + 1);
    if constexpr (L.offsets) return {first, second, unit.half_offset_of(2 * g), unit.half_offset_of(2 * g + 1)};
    return {first, second, first, first};
  }
  const F all = unit.scale_of(g), offset = L.offsets ? unit.offset_of(g) : all;
  return {all, all, offset, offset};
}

// All signs of a group, where the file has seven of eight. The eighth, bit 2 k + 1 of the last byte, makes their number
// even: they are bits 2 k and 2 k + 1 of all bytes.
INLINE I all_signs(I some) {
  some = iand(some, iset(0x55ffffff));
  I odd = ixor(some, ishr<1>(some));
  odd = ixor(odd, ishr<16>(odd));
  odd = ixor(odd, ishr<8>(odd));
  return ior(some, ishl<25>(iand(odd, iset(0x55))));
}

// The entries of four indices, whose low bytes are those of `low` in each lane; high: their higher bits, from bit 8 on.
template <int KIND> INLINE void entries_of_four(I low, const I (&high)[4], I (&entries)[4]) {
  constexpr Entries E = LAYOUTS[KIND].entries;
  const I above = iset(((1 << E.high) - 1) << 8);
#if defined(KVKEEP_AVX512) && !defined(KVKEEP_SIMDE)
  if constexpr (E.high <= 2) {  // larger codebooks would need 32 permutations each time
    UNROLLED for (int i = 0; i < 2; i++) {  // indices i and i + 2, in the halves of a lane
      I index = iand(i ? ishr<8>(low) : low, iset(0x00ff00ff));
      if constexpr (E.high) index = ior(index, ior(iand(high[i], above), ishl<16>(iand(high[i + 2], above))));
      const I both = halves_found<2 + E.high>(E.halves, index), nibbles = iset(0x0f0f0f0f);
      const I one = iand(both, iset(0xffff)), other = ishr<16>(both);
      entries[i] = iand(ior(one, ishl<12>(one)), nibbles);
      entries[i + 2] = iand(ior(other, ishl<12>(other)), nibbles);
    }
    return;
  }
#endif
  UNROLLED for (int i = 0; i < 4; i++) {
    entries[i] = found(E.codes, ior(iand(low, iset(255)), iand(high[i], above)));
    low = ishr<8>(low);
  }
}

// The codes of a group of a kind with a codebook.
template <int KIND> INLINE void codes_of_entries(const Unit<KIND>& unit, int g, I (&w)[8]) {
  constexpr Entries E = LAYOUTS[KIND].entries;
  constexpr bool IQ1 = KIND == KV_IQ1_S || KIND == KV_IQ1_M;
  const I two = iset(0x03030303), third = iset(0x04040404);
  I rest = E.high ? unit.high_bits(g) : iset(0), less = isub(iset(0), ishr<23>(rest));
  UNROLLED for (int first = 0; first < 32 / E.weights; first += 4) {
    I high[4], entries[4];
    UNROLLED for (int i = 0; i < 4; i++) { high[i] = rest; rest = moved<E.step>(rest); }
    entries_of_four<KIND>(iload(unit.codes + g * LAYOUTS[KIND].group_bytes + 16 * first), high, entries);
    UNROLLED for (int i = 0; i < 4; i++) {
      if constexpr (E.weights == 4) w[first + i] = entries[i];
      else {
        w[2 * i] = iand(entries[i], two);
        w[2 * i + 1] = iand(ishr<2>(entries[i]), two);
      }
      if constexpr (IQ1) {  // what is added to all weights of a group, or in IQ1_M of an entry
        if constexpr (KIND == KV_IQ1_M) less = isub(iset(0), iand(ishr<11>(high[i]), iset(1)));
        w[2 * i] = ior(w[2 * i], iand(less, third));
        w[2 * i + 1] = ior(w[2 * i + 1], iand(less, third));
      }
    }
  }
  if constexpr (!IQ1) {
    const I signs = unit.signs(g);
    add_bits<E.weights == 8 ? 2 : 3>(w, KIND == KV_IQ2_S || KIND == KV_IQ3_S ? signs : all_signs(signs));
  }
}

// The codes of a group of TQ1_0: a digit of each of 32 bytes, two of 16, or one of 16 and four of four.
INLINE void codes_of_digits(const uint8_t* bytes, int g, I (&w)[8]) {
  constexpr int POWERS[5] = {1, 3, 9, 27, 81};
  if (g < 5) {
    UNROLLED for (int i = 0; i < 8; i++) w[i] = digits_of(iload(bytes + 64 * i), POWERS[g]);
    return;
  }
  UNROLLED for (int i = 0; i < 4; i++) {
    const I some = iload(bytes + 512 + 64 * i);
    w[i] = digits_of(some, POWERS[2 * g - 10]);
    w[4 + i] = g < 7 ? digits_of(some, POWERS[2 * g - 9]) : digits_of(iload(bytes + 768), POWERS[i]);
  }
}

// What codes stand for: dword i of W outputs.
template <int KIND> INLINE void weights_of(const Unit<KIND>& unit, int g, I (&w)[8]) {
  constexpr KindLayout L = LAYOUTS[KIND];
  if constexpr (KIND == KV_TQ1_0) codes_of_digits(unit.codes, g, w);
  else if constexpr (has_codebook(KIND)) codes_of_entries(unit, g, w);
  else unpack_codes<L.bits>(unit.codes + g * L.group_bytes, w);
  if constexpr (L.values != nullptr) { UNROLLED for (int i = 0; i < 8; i++) w[i] = values_of(w[i], L.values); }
  if constexpr (bits_of<KIND>() == 8) { UNROLLED for (int i = 0; i < 8; i++) w[i] = with_signed_zero(w[i]); }
}

// A group whose codes were looked up, for many rows: [8][16 lanes] dwords of codes of 8 bits, and the scales of its
// halves, or twice that of all, [2][16 lanes] floats.
template <bool TWO_SCALES> struct FoundGroup {
  static constexpr int GROUPS = 1, BYTES = 10 * 64, BITS = 8, ZERO = SIGNED_ZERO;
  static constexpr bool HALVES = TWO_SCALES, OFFSETS = false, FETCHES = false;
  const uint8_t* at_lane;

  INLINE FoundGroup at(const uint8_t* group, int lane) { return {group + 4 * lane}; }
};
template <bool HALVES> INLINE void weights_of(const FoundGroup<HALVES>& group, int, I (&w)[8]) {
  unpack_codes<8>(group.at_lane, w);
}
template <bool HALVES> INLINE Scales scales_of(const FoundGroup<HALVES>& group, int) {
  const F first = fload((const float*)(group.at_lane + 512)), second = fload((const float*)(group.at_lane + 576));
  return {first, second, first, first};
}

// Writes the groups of a unit, each as FoundGroup reads it. A code less the zero point fits 8 bits with a sign.
template <int KIND> static void find_groups(const uint8_t* unit_at, uint8_t* to) {
  using U = Unit<KIND>;
  static_assert(U::BITS < 8 && !U::OFFSETS, "codes must be less than 128, and nothing is added to them");
  const I shift = iset((128 - U::ZERO) * 0x01010101), sign = iset(int32_t(0x80808080));
  for (int lane = 0; lane < PANEL; lane += W) {
    const U unit = U::at(unit_at, lane);
    for (int g = 0; g < U::GROUPS; g++) {
      uint8_t* at = to + g * FoundGroup<U::HALVES>::BYTES + 4 * lane;
      I w[8];
      weights_of(unit, g, w);
      UNROLLED for (int i = 0; i < 8; i++) istore(at + 64 * i, with_signed_zero(ixor(iadd(w[i], shift), sign)));
      const Scales scales = scales_of(unit, g);
      fstore((float*)(at + 512), scales.first);
      fstore((float*)(at + 576), scales.second);
    }
  }
}

}  // namespace
