// The dot product of a group: 32 codes of each of W outputs with 32 inputs of 8 bits, as an integer.
//
// An integer sum is exact in any order, so every instruction set gives the same one.
#pragma once

#include "simd.h"

namespace {

// ---- codes of a group -----------------------------------------------------------------------------------------------

template <int N> INLINE I moved(I a) {  // by N bits to the right, or -N to the left
  if constexpr (N < 0) return ishl<-N>(a);
  else if constexpr (N > 0) return ishr<N>(a);
  else return a;
}

// Bit i of each byte of `all` becomes bit AT of that byte of w[i].
template <int AT> INLINE void add_bits(I (&w)[8], I all) {
  const I bit = iset(0x01010101 << AT);
  w[0] = ior(w[0], iand(moved<0 - AT>(all), bit));
  w[1] = ior(w[1], iand(moved<1 - AT>(all), bit));
  w[2] = ior(w[2], iand(moved<2 - AT>(all), bit));
  w[3] = ior(w[3], iand(moved<3 - AT>(all), bit));
  w[4] = ior(w[4], iand(moved<4 - AT>(all), bit));
  w[5] = ior(w[5], iand(moved<5 - AT>(all), bit));
  w[6] = ior(w[6], iand(moved<6 - AT>(all), bit));
  w[7] = ior(w[7], iand(moved<7 - AT>(all), bit));
}

// w[i]: dword i of W outputs, as panels.h numbers them.
template <int BITS> INLINE void unpack_codes(const uint8_t* at, I (&w)[8]) {
  if constexpr (BITS == 8) {
    UNROLLED for (int i = 0; i < 8; i++) w[i] = iload(at + 64 * i);
    return;
  }
  if constexpr (BITS <= 3) {
    const I two = iset(0x03030303);
    UNROLLED for (int half = 0; half < 2; half++) {
      const I all = iload(at + 64 * half);
      w[4 * half] = iand(all, two);
      w[4 * half + 1] = iand(ishr<2>(all), two);
      w[4 * half + 2] = iand(ishr<4>(all), two);
      w[4 * half + 3] = iand(ishr<6>(all), two);
    }
    if constexpr (BITS == 3) add_bits<2>(w, iload(at + 128));
    return;
  }
  const I low = iset(0x0f0f0f0f);
  UNROLLED for (int j = 0; j < 4; j++) {
    I both = iload(at + 64 * j);
    w[2 * j] = iand(both, low);
    w[2 * j + 1] = iand(ishr<4>(both), low);
  }
  if constexpr (BITS == 5) add_bits<4>(w, iload(at + 256));
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

// The values of codes, 16 of them.
#if defined(KVKEEP_AVX512)
INLINE I values_of(I codes, const int8_t* values) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)values)), codes);
}
INLINE I product16(I a, I b) { return _mm512_mullo_epi16(a, b); }
INLINE I high_product16(I a, I b) { return _mm512_mulhi_epu16(a, b); }
#elif defined(KVKEEP_AVX2)
INLINE I values_of(I codes, const int8_t* values) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)values)), codes);
}
INLINE I product16(I a, I b) { return _mm256_mullo_epi16(a, b); }
INLINE I high_product16(I a, I b) { return _mm256_mulhi_epu16(a, b); }
#elif defined(KVKEEP_NEON)
INLINE I values_of(I codes, const int8_t* values) {
  return vreinterpretq_s32_s8(vqtbl1q_s8(vld1q_s8(values), vreinterpretq_u8_s32(codes)));
}
#else
INLINE I values_of(I codes, const int8_t* values) {
  uint32_t found = 0;
  for (int b = 0; b < 4; b++) found |= uint32_t(uint8_t(values[uint32_t(codes) >> 8 * b & 15])) << 8 * b;
  return I(found);
}
#endif

// The ternary digits of bytes, each five in 256ths of 243: the first digit, after a product with a power of 3.
#if defined(KVKEEP_AVX512) || defined(KVKEEP_AVX2)
INLINE I digits_of(I bytes, int power) {
  const I odd = iset(int32_t(0xff00ff00)), by = iset(power * 0x00010001), three = iset(0x00030003);
  const I first = high_product16(product16(iand(ishl<8>(bytes), odd), by), three);
  return ior(first, ishl<8>(high_product16(product16(iand(bytes, odd), by), three)));
}
#elif defined(KVKEEP_NEON)
INLINE I digits_of(I bytes, int power) {
  const uint8x16_t rest = vmulq_u8(vreinterpretq_u8_s32(bytes), vdupq_n_u8(uint8_t(power)));
  const uint8x16_t less = vaddq_u8(vcgeq_u8(rest, vdupq_n_u8(86)), vcgeq_u8(rest, vdupq_n_u8(171)));
  return vreinterpretq_s32_s8(vnegq_s8(vreinterpretq_s8_u8(less)));
}
#else
INLINE I digits_of(I bytes, int power) {
  uint32_t found = 0;
  for (int b = 0; b < 4; b++) found |= uint32_t(uint8_t(uint32_t(bytes) >> 8 * b) * power % 256 * 3 / 256) << 8 * b;
  return I(found);
}
#endif

// ---- integer sums of dwords FROM .. TO, added to `start` ------------------------------------------------------------
//
// Codes of up to 7 bits are unsigned, those of 8 bits and IQ4's values signed. VNNI multiplies unsigned bytes by signed
// ones: there, codes of 8 bits get +128, SIGNED_ZERO, as a zero point has it.

#if defined(KVKEEP_AVX512) || defined(KVKEEP_VNNI)
// sum + the products of codes and four inputs
#if defined(KVKEEP_SIMDE)  // SIMDe has the instruction by its name in AVX-512 only
#if defined(KVKEEP_AVX512)
INLINE I dot4(I sum, I codes, const int8_t* x) { return _mm512_dpbusd_epi32(sum, codes, iset(load32(x))); }
#else
INLINE I dot4(I sum, I codes, const int8_t* x) { return _mm256_dpbusd_epi32(sum, codes, iset(load32(x))); }
#endif
#elif defined(KVKEEP_AVX512)
INLINE I dot4(I sum, I codes, const int8_t* x) {  // the compiler would load the inputs by instructions of their own
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*(const int32_t*)x));
  return sum;
}
#else
INLINE I dot4(I sum, I codes, const int8_t* x) { return _mm256_dpbusd_avx_epi32(sum, codes, iset(load32(x))); }
#endif
constexpr int SIGNED_ZERO = 128;
INLINE I with_signed_zero(I codes) { return ixor(codes, iset(int32_t(0x80808080))); }
template <int BITS, int FROM, int TO> INLINE I integer_sum(const I (&w)[8], const int8_t* x, I start) {
  constexpr int CHAINS = W == 16 ? 1 : 2;  // AVX-512 has registers for enough rows to hide one long chain
  I other = iset(0);
  UNROLLED for (int i = FROM; i < TO; i += CHAINS) {
    start = dot4(start, w[i], x + 4 * i);
    if constexpr (CHAINS == 2) other = dot4(other, w[i + 1], x + 4 * i + 4);
  }
  return iadd(start, other);
}
#elif defined(KVKEEP_AVX2)
constexpr int SIGNED_ZERO = 0;
INLINE I with_signed_zero(I codes) { return codes; }
INLINE I pairs(I w, const int8_t* x) { return _mm256_maddubs_epi16(w, iset(load32(x))); }
INLINE I add16(I a, I b) { return _mm256_add_epi16(a, b); }
INLINE I widened(I sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
// Sums of two products in 16 bits: of up to 4 bits at most 2 * 15 * 127, so that eight fit; of 5 bits four, of 6 bits
// two, of 7 bits one; of 8 bits |w| <= 128 with inputs of w's sign, 2 * 128 * 127 = 32512.
template <int BITS, int FROM, int TO> INLINE I integer_sum(const I (&w)[8], const int8_t* x, I start) {
  if constexpr (BITS == 8) {
    UNROLLED for (int i = FROM; i < TO; i++) {
      I input = iset(load32(x + 4 * i));
      start = iadd(start, widened(_mm256_maddubs_epi16(_mm256_abs_epi8(w[i]), _mm256_sign_epi8(input, w[i]))));
    }
    return start;
  }
  constexpr int LARGEST = BITS <= 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1;
  constexpr int FIT = LARGEST < TO - FROM ? LARGEST : TO - FROM;
  UNROLLED for (int i = FROM; i < TO; i += FIT) {
    I part = pairs(w[i], x + 4 * i);
    UNROLLED for (int j = 1; j < FIT; j++) part = add16(part, pairs(w[i + j], x + 4 * (i + j)));
    start = iadd(start, widened(part));
  }
  return start;
}
#elif defined(KVKEEP_NEON)
constexpr int SIGNED_ZERO = 0;
INLINE I with_signed_zero(I codes) { return codes; }
template <int BITS, int FROM, int TO> INLINE I integer_sum(const I (&w)[8], const int8_t* x, I start) {
  UNROLLED for (int i = FROM; i < TO; i++) {
    const int8x16_t a = vreinterpretq_s8_s32(w[i]), b = vreinterpretq_s8_s32(vdupq_n_s32(load32(x + 4 * i)));
#if defined(KVKEEP_DOTPROD)
    start = vdotq_s32(start, a, b);
#else  // two products of at most 128 * 127 fit 16 bits
    start = vpadalq_s16(start, vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b)));
#endif
  }
  return start;
}
#else
constexpr int SIGNED_ZERO = 0;
INLINE I with_signed_zero(I codes) { return codes; }
template <int BITS, int FROM, int TO> INLINE I integer_sum(const I (&w)[8], const int8_t* x, I start) {
  for (int i = FROM; i < TO; i++)
    for (int b = 0; b < 4; b++) start += int8_t(uint32_t(w[i]) >> 8 * b) * x[4 * i + b];
  return start;
}
#endif

#if defined(KVKEEP_I8MM)
// Integer sums of two rows at once: smmla multiplies eight inputs of two rows by those of two outputs.
template <int FROM, int TO>
INLINE void integer_sums_of_two(const I (&w)[8], const int8_t* x, const int8_t* y, I& of_x, I& of_y) {
  I low = iset(0), high = iset(0);  // of outputs 0 and 1, 2 and 3: two sums of x, then two of y
  UNROLLED for (int i = FROM; i < TO; i += 2) {
    const int8x16_t rows = vcombine_s8(vld1_s8(x + 4 * i), vld1_s8(y + 4 * i));
    low = vmmlaq_s32(low, rows, vreinterpretq_s8_s32(vzip1q_s32(w[i], w[i + 1])));
    high = vmmlaq_s32(high, rows, vreinterpretq_s8_s32(vzip2q_s32(w[i], w[i + 1])));
  }
  of_x = vcombine_s32(vget_low_s32(low), vget_low_s32(high));
  of_y = vcombine_s32(vget_high_s32(low), vget_high_s32(high));
}
#endif

}  // namespace
