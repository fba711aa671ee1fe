// Registers of floats and of 32-bit integers, on four kinds of processor.
//
// The kernels are compiled once for each instruction set. The sources differ in this header, in dot.h and transpose.h,
// and in the sizes of tiles.h. The bits agree because
//   - every output is one chain of operations in one fixed order, in its lane: no sum crosses lanes but `sum` of
//     vectors.h, which is one fixed tree of 16 numbers whatever the width of a register;
//   - every step of floats is one IEEE operation or one explicit fused multiply-add, rounded to nearest (the objects
//     are compiled with -ffp-contract=off, without -ffast-math); of the C library only fmaf and sqrtf are called, which
//     IEEE defines to the bit;
//   - sums of integers are exact in any order.
// Only headers without inline functions of C++ are included: one compiled for AVX-512 could be the copy that the linker
// keeps for everybody.
#pragma once

#include "numbers.h"

#if defined(KVKEEP_SIMDE)  // emulates AVX-512, to run its source on a machine without it
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#elif defined(KVKEEP_AVX2) || defined(KVKEEP_AVX512)
#include <immintrin.h>
#elif defined(KVKEEP_NEON)
#include <arm_neon.h>
#elif !defined(KVKEEP_PLAIN)
#error "define one of KVKEEP_PLAIN, KVKEEP_AVX2, KVKEEP_AVX512, KVKEEP_NEON"
#endif

namespace {

#if defined(KVKEEP_AVX2) || defined(KVKEEP_AVX512)
// One half with the other, until there is one number.
INLINE float sum_of_eight(__m256 a) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
INLINE float maximum_of_eight(__m256 a) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}
#endif

// ---- F: W floats; I: W integers of 32 bits -------------------------------------------------------------------------

#if defined(KVKEEP_AVX512)

enum { W = 16 };
typedef __m512 F;
typedef __m512i I;
INLINE F fload(const float* p) { return _mm512_loadu_ps(p); }
INLINE void fstore(float* p, F v) { _mm512_storeu_ps(p, v); }
INLINE F fset(float x) { return _mm512_set1_ps(x); }
INLINE F fmul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F fadd(F a, F b) { return _mm512_add_ps(a, b); }
INLINE F fsub(F a, F b) { return _mm512_sub_ps(a, b); }
INLINE F fdiv(F a, F b) { return _mm512_div_ps(a, b); }
INLINE F ffma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }  // a b + c
INLINE F fmax_(F a, F b) { return _mm512_max_ps(a, b); }
INLINE F fmin_(F a, F b) { return _mm512_min_ps(a, b); }
INLINE I as_int(F a) { return _mm512_castps_si512(a); }
INLINE F as_f(I a) { return _mm512_castsi512_ps(a); }
INLINE I iset(int32_t x) { return _mm512_set1_epi32(x); }
INLINE I iload(const void* p) { return _mm512_loadu_si512(p); }
INLINE void istore(void* p, I v) { _mm512_storeu_si512(p, v); }
INLINE I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
INLINE I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
INLINE I iand(I a, I b) { return _mm512_and_si512(a, b); }
INLINE I ior(I a, I b) { return _mm512_or_si512(a, b); }
INLINE I ixor(I a, I b) { return _mm512_xor_si512(a, b); }
template <int N> INLINE I ishl(I a) { return _mm512_slli_epi32(a, N); }
template <int N> INLINE I ishr(I a) { return _mm512_srli_epi32(a, N); }
#if defined(KVKEEP_SIMDE)  // not in SIMDe 0.7.4
INLINE F to_float(I a) {
  int32_t i[16]; float f[16]; memcpy(i, &a, 64);
  for (int k = 0; k < 16; k++) f[k] = float(i[k]);
  return fload(f);
}
INLINE F hload(const uint16_t* p) {
  float f[16];
  for (int k = 0; k < 16; k++) f[k] = half_to_float(p[k]);
  return fload(f);
}
template <class T> INLINE I widened_from(const T* p) {
  int32_t i[16];
  for (int k = 0; k < 16; k++) i[k] = p[k];
  return iload(i);
}
INLINE I bytes_to_int(const int8_t* p) { return widened_from(p); }
INLINE I ubytes_to_int(const uint8_t* p) { return widened_from(p); }
INLINE I u16_to_int(const uint16_t* p) { return widened_from(p); }
INLINE void int_to_u16(uint16_t* p, I v) {
  int32_t i[16];
  istore(i, v);
  for (int k = 0; k < 16; k++) p[k] = uint16_t(i[k]);
}
INLINE void int_to_bytes(int8_t* p, I v) {
  int32_t i[16];
  istore(i, v);
  for (int k = 0; k < 16; k++) p[k] = int8_t(i[k]);
}
INLINE __m256 high_eight(F a) {
  float f[16];
  fstore(f, a);
  return _mm256_loadu_ps(f + 8);
}
INLINE I found(const uint32_t* table, I index) {
  int32_t i[16];
  istore(i, index);
  for (int k = 0; k < 16; k++) i[k] = int32_t(table[i[k]]);
  return iload(i);
}
#else
INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
INLINE F hload(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE I bytes_to_int(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE I ubytes_to_int(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE I u16_to_int(const uint16_t* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
INLINE void int_to_u16(uint16_t* p, I v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(v)); }  // v < 2^16
INLINE void int_to_bytes(int8_t* p, I v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(v)); }
INLINE __m256 high_eight(F a) { return _mm512_maskz_extractf32x8_ps(0xff, a, 1); }
INLINE I found(const uint32_t* table, I index) { return _mm512_i32gather_epi32(index, table, 4); }  // of each lane
// The numbers of 16 bits that indices of 16 bits name, in a table of 64 << MORE.
template <int MORE> INLINE I halves_found(const uint16_t* table, I index) {
  if constexpr (MORE == 0) return _mm512_permutex2var_epi16(iload(table), index, iload(table + 32));
  else {
    const I first = halves_found<MORE - 1>(table, index), second = halves_found<MORE - 1>(table + (32 << MORE), index);
    return _mm512_mask_blend_epi16(_mm512_test_epi16_mask(index, _mm512_set1_epi16(32 << MORE)), first, second);
  }
}
#endif
INLINE float fsum(F a) { return sum_of_eight(_mm256_add_ps(_mm512_castps512_ps256(a), high_eight(a))); }
INLINE float fmaximum(F a) { return maximum_of_eight(_mm256_max_ps(_mm512_castps512_ps256(a), high_eight(a))); }
// where x >= limit: v, else `other`
INLINE F where_at_least(F x, F limit, F v, F other) {
  return _mm512_mask_mov_ps(other, _mm512_cmp_ps_mask(x, limit, _CMP_GE_OQ), v);
}

#elif defined(KVKEEP_AVX2)

enum { W = 8 };
typedef __m256 F;
typedef __m256i I;
INLINE F fload(const float* p) { return _mm256_loadu_ps(p); }
INLINE void fstore(float* p, F v) { _mm256_storeu_ps(p, v); }
INLINE F fset(float x) { return _mm256_set1_ps(x); }
INLINE F fmul(F a, F b) { return _mm256_mul_ps(a, b); }
INLINE F fadd(F a, F b) { return _mm256_add_ps(a, b); }
INLINE F fsub(F a, F b) { return _mm256_sub_ps(a, b); }
INLINE F fdiv(F a, F b) { return _mm256_div_ps(a, b); }
INLINE F ffma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
INLINE F fmax_(F a, F b) { return _mm256_max_ps(a, b); }
INLINE float fsum(F a) { return sum_of_eight(a); }
INLINE float fmaximum(F a) { return maximum_of_eight(a); }
INLINE F fmin_(F a, F b) { return _mm256_min_ps(a, b); }
INLINE I as_int(F a) { return _mm256_castps_si256(a); }
INLINE F as_f(I a) { return _mm256_castsi256_ps(a); }
INLINE I iset(int32_t x) { return _mm256_set1_epi32(x); }
INLINE I iload(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE void istore(void* p, I v) { _mm256_storeu_si256((__m256i*)p, v); }
INLINE I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
INLINE I isub(I a, I b) { return _mm256_sub_epi32(a, b); }
INLINE I iand(I a, I b) { return _mm256_and_si256(a, b); }
INLINE I ior(I a, I b) { return _mm256_or_si256(a, b); }
INLINE I ixor(I a, I b) { return _mm256_xor_si256(a, b); }
template <int N> INLINE I ishl(I a) { return _mm256_slli_epi32(a, N); }
template <int N> INLINE I ishr(I a) { return _mm256_srli_epi32(a, N); }
INLINE F to_float(I a) { return _mm256_cvtepi32_ps(a); }
INLINE F hload(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE I bytes_to_int(const int8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE I ubytes_to_int(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE I u16_to_int(const uint16_t* p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE void int_to_u16(uint16_t* p, I v) {
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(v, v), 0x08);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
INLINE void int_to_bytes(int8_t* p, I v) {  // within int8
  const __m256i words = _mm256_packs_epi32(v, v), bytes = _mm256_packs_epi16(words, words);
  _mm_storel_epi64((__m128i*)p, _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
}
INLINE I found(const uint32_t* table, I index) { return _mm256_i32gather_epi32((const int*)table, index, 4); }
INLINE F where_at_least(F x, F limit, F v, F other) {
  return _mm256_blendv_ps(other, v, _mm256_cmp_ps(x, limit, _CMP_GE_OQ));
}

#elif defined(KVKEEP_NEON)

enum { W = 4 };
typedef float32x4_t F;
typedef int32x4_t I;
INLINE F fload(const float* p) { return vld1q_f32(p); }
INLINE void fstore(float* p, F v) { vst1q_f32(p, v); }
INLINE F fset(float x) { return vdupq_n_f32(x); }
INLINE F fmul(F a, F b) { return vmulq_f32(a, b); }
INLINE F fadd(F a, F b) { return vaddq_f32(a, b); }
INLINE F fsub(F a, F b) { return vsubq_f32(a, b); }
INLINE F fdiv(F a, F b) { return vdivq_f32(a, b); }
INLINE F ffma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
INLINE F fmax_(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // the second where one is no number, as on x86
INLINE F fmin_(F a, F b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
INLINE float fsum(F a) {
  const float32x2_t two = vadd_f32(vget_low_f32(a), vget_high_f32(a));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
INLINE float fmaximum(F a) { return vmaxvq_f32(a); }
INLINE I as_int(F a) { return vreinterpretq_s32_f32(a); }
INLINE F as_f(I a) { return vreinterpretq_f32_s32(a); }
INLINE I iset(int32_t x) { return vdupq_n_s32(x); }
INLINE I iload(const void* p) { return vld1q_s32((const int32_t*)p); }
INLINE void istore(void* p, I v) { vst1q_s32((int32_t*)p, v); }
INLINE I iadd(I a, I b) { return vaddq_s32(a, b); }
INLINE I isub(I a, I b) { return vsubq_s32(a, b); }
INLINE I iand(I a, I b) { return vandq_s32(a, b); }
INLINE I ior(I a, I b) { return vorrq_s32(a, b); }
INLINE I ixor(I a, I b) { return veorq_s32(a, b); }
template <int N> INLINE I ishl(I a) { return vshlq_n_s32(a, N); }
template <int N> INLINE I ishr(I a) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), N)); }
INLINE F to_float(I a) { return vcvtq_f32_s32(a); }
INLINE F hload(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE I bytes_to_int(const int8_t* p) {
  return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(load32(p))))));
}
INLINE I ubytes_to_int(const uint8_t* p) {
  return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_s32(vdup_n_s32(load32(p)))))));
}
INLINE I u16_to_int(const uint16_t* p) { return vreinterpretq_s32_u32(vmovl_u16(vld1_u16(p))); }
INLINE void int_to_u16(uint16_t* p, I v) { vst1_u16(p, vmovn_u32(vreinterpretq_u32_s32(v))); }
INLINE void int_to_bytes(int8_t* p, I v) {
  const int8x8_t bytes = vmovn_s16(vcombine_s16(vmovn_s32(v), vmovn_s32(v)));
  memcpy(p, &bytes, 4);
}
INLINE I found(const uint32_t* table, I index) {
  int32_t i[4];
  istore(i, index);
  for (int k = 0; k < 4; k++) i[k] = int32_t(table[i[k]]);
  return iload(i);
}
INLINE F where_at_least(F x, F limit, F v, F other) { return vbslq_f32(vcgeq_f32(x, limit), v, other); }

#else

enum { W = 1 };
typedef float F;
typedef int32_t I;
INLINE F fload(const float* p) { return *p; }
INLINE void fstore(float* p, F v) { *p = v; }
INLINE F fset(float x) { return x; }
INLINE F fmul(F a, F b) { return a * b; }
INLINE F fadd(F a, F b) { return a + b; }
INLINE F fsub(F a, F b) { return a - b; }
INLINE F fdiv(F a, F b) { return a / b; }
INLINE F ffma(F a, F b, F c) { return __builtin_fmaf(a, b, c); }
INLINE F fmax_(F a, F b) { return a > b ? a : b; }
INLINE F fmin_(F a, F b) { return a < b ? a : b; }
INLINE float fsum(F a) { return a; }
INLINE float fmaximum(F a) { return a; }
INLINE I as_int(F a) { return I(as_bits(a)); }
INLINE F as_f(I a) { return as_float(uint32_t(a)); }
INLINE I iset(int32_t x) { return x; }
INLINE I iload(const void* p) { return load32(p); }
INLINE void istore(void* p, I v) { memcpy(p, &v, 4); }
INLINE I iadd(I a, I b) { return I(uint32_t(a) + uint32_t(b)); }
INLINE I isub(I a, I b) { return I(uint32_t(a) - uint32_t(b)); }
INLINE I iand(I a, I b) { return a & b; }
INLINE I ior(I a, I b) { return a | b; }
INLINE I ixor(I a, I b) { return a ^ b; }
template <int N> INLINE I ishl(I a) { return I(uint32_t(a) << N); }
template <int N> INLINE I ishr(I a) { return I(uint32_t(a) >> N); }
INLINE F to_float(I a) { return float(a); }
INLINE F hload(const uint16_t* p) { return half_to_float(*p); }
INLINE I bytes_to_int(const int8_t* p) { return *p; }
INLINE I ubytes_to_int(const uint8_t* p) { return *p; }
INLINE I u16_to_int(const uint16_t* p) { return *p; }
INLINE void int_to_u16(uint16_t* p, I v) { *p = uint16_t(v); }
INLINE void int_to_bytes(int8_t* p, I v) { *p = int8_t(v); }
INLINE I found(const uint32_t* table, I index) { return I(table[index]); }
INLINE F where_at_least(F x, F limit, F v, F other) { return x >= limit ? v : other; }

#endif

// A product of two bfloat16 between 2^-126 and 2^128 is exact in float32, so that a fused multiply-add of two is a
// product and a sum: `plain`, whose processor may have no fused one, computes that. A smaller product it rounds before
// the sum, and a greater one is infinite, so that there its bits may be others.
INLINE F fma_bf16(F a, F b, F c) {
#if defined(KVKEEP_PLAIN)
  return a * b + c;
#else
  return ffma(a, b, c);
#endif
}

INLINE F bf16_low(I pairs) { return as_f(ishl<16>(pairs)); }                            // the first of each pair
INLINE F bf16_high(I pairs) { return as_f(iand(pairs, iset(int32_t(0xffff0000)))); }  // the second
INLINE F bload(const bf16* p) { return as_f(ishl<16>(u16_to_int(p))); }
INLINE void bstore(bf16* p, F v) {  // as `narrow`; numbers only
  I u = as_int(v), odd = iand(ishr<16>(u), iset(1));
  int_to_u16(p, ishr<16>(iadd(u, iadd(iset(0x7fff), odd))));
}

}  // namespace
