// Vectors of floats and whole numbers on four kinds of processor, and vectors of 16 floats made of them.
//
// One kernel source is compiled once for each instruction set; this header is all that differs. The bits agree because
//   - every output is one chain of operations in one fixed order, in a lane of its own: no sum crosses lanes but `sum`,
//     which is one fixed tree of 16 numbers whatever the width of a register;
//   - every step of floats is one IEEE operation or one explicit fused multiply-add, rounded to nearest (the objects
//     are compiled with -ffp-contract=off, without -ffast-math); of the C library only fmaf and sqrtf are called, which
//     IEEE defines to the bit;
//   - sums of whole numbers are exact in any order.
// Only headers without inline functions of C++ are included: one compiled for AVX-512 could be the copy that the linker
// keeps for everybody.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(KVKEEP_SIMDE)  // AVX-512 by other means, to run its source on a machine without it
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

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")

typedef uint16_t bf16;

INLINE float as_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
INLINE uint32_t as_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
INLINE int32_t load32(const void* p) { int32_t v; memcpy(&v, p, 4); return v; }
INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE float widen(bf16 x) { return as_float(uint32_t(x) << 16); }
INLINE bf16 narrow(float f) {  // to the nearest, ties to even
  uint32_t u = as_bits(f);
  if ((u & 0x7fffffff) > 0x7f800000) return bf16((u >> 16) | 64);
  return bf16((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
INLINE float half_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest >= 0x400) return as_float(sign | ((rest + (112 << 10)) << 13));
  float tiny = float(rest) * as_float(0x33800000);  // 2^-24: exact
  return as_float(sign | as_bits(tiny));
}

// ---- F: W floats; I: W whole numbers of 32 bits ---------------------------------------------------------------------

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
#else
INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
INLINE F hload(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE I bytes_to_int(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE I ubytes_to_int(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE I u16_to_int(const uint16_t* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
INLINE void int_to_u16(uint16_t* p, I v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(v)); }  // v < 2^16
#endif
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
INLINE I as_int(F a) { return vreinterpretq_s32_f32(a); }
INLINE F as_f(I a) { return vreinterpretq_f32_s32(a); }
INLINE I iset(int32_t x) { return vdupq_n_s32(x); }
INLINE I iload(const void* p) { return vld1q_s32((const int32_t*)p); }
INLINE void istore(void* p, I v) { vst1q_s32((int32_t*)p, v); }
INLINE I iadd(I a, I b) { return vaddq_s32(a, b); }
INLINE I isub(I a, I b) { return vsubq_s32(a, b); }
INLINE I iand(I a, I b) { return vandq_s32(a, b); }
INLINE I ior(I a, I b) { return vorrq_s32(a, b); }
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
INLINE I as_int(F a) { return I(as_bits(a)); }
INLINE F as_f(I a) { return as_float(uint32_t(a)); }
INLINE I iset(int32_t x) { return x; }
INLINE I iload(const void* p) { return load32(p); }
INLINE void istore(void* p, I v) { memcpy(p, &v, 4); }
INLINE I iadd(I a, I b) { return I(uint32_t(a) + uint32_t(b)); }
INLINE I isub(I a, I b) { return I(uint32_t(a) - uint32_t(b)); }
INLINE I iand(I a, I b) { return a & b; }
INLINE I ior(I a, I b) { return a | b; }
template <int N> INLINE I ishl(I a) { return I(uint32_t(a) << N); }
template <int N> INLINE I ishr(I a) { return I(uint32_t(a) >> N); }
INLINE F to_float(I a) { return float(a); }
INLINE F hload(const uint16_t* p) { return half_to_float(*p); }
INLINE I bytes_to_int(const int8_t* p) { return *p; }
INLINE I ubytes_to_int(const uint8_t* p) { return *p; }
INLINE I u16_to_int(const uint16_t* p) { return *p; }
INLINE void int_to_u16(uint16_t* p, I v) { *p = uint16_t(v); }
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

// exp(x) for x <= 0: 2^n p(r), n the whole number nearest to x / ln 2; 0 below -87.
INLINE F fexp(F x) {
  const F low = fset(-87.0f), magic = fset(12582912.0f);  // adding 1.5 * 2^23 rounds to the nearest whole number
  const F c = fmax_(x, low), shifted = ffma(c, fset(1.44269504f), magic), n = fsub(shifted, magic);
  F r = ffma(n, fset(-0.693359375f), c);
  r = ffma(n, fset(2.12194440e-4f), r);
  F p = fset(1.9875691500e-4f);
  p = ffma(p, r, fset(1.3981999507e-3f));
  p = ffma(p, r, fset(8.3334519073e-3f));
  p = ffma(p, r, fset(4.1665795894e-2f));
  p = ffma(p, r, fset(1.6666665459e-1f));
  p = ffma(p, r, fset(5.0000001201e-1f));
  p = ffma(p, r, fset(1.0f));
  p = ffma(p, r, fset(1.0f));
  const I power = ishl<23>(isub(as_int(shifted), iset(0x4b400000)));
  return where_at_least(x, low, as_f(iadd(as_int(p), power)), fset(0.0f));
}

// ---- vf: 16 floats, in as many registers as they need ---------------------------------------------------------------

enum { PARTS = 16 / W };
struct vf { F part[PARTS]; };

#define PARTWISE UNROLLED for (int i = 0; i < PARTS; i++)
INLINE vf vload(const float* p) { vf r; PARTWISE r.part[i] = fload(p + i * W); return r; }
INLINE void vstore(float* p, vf v) { PARTWISE fstore(p + i * W, v.part[i]); }
INLINE vf vset(float x) { vf r; PARTWISE r.part[i] = fset(x); return r; }
INLINE vf vload_bf16(const bf16* p) { vf r; PARTWISE r.part[i] = bload(p + i * W); return r; }
INLINE void vstore_bf16(bf16* p, vf v) { PARTWISE bstore(p + i * W, v.part[i]); }
INLINE vf vload_half(const uint16_t* p) { vf r; PARTWISE r.part[i] = hload(p + i * W); return r; }
INLINE vf vload_bytes(const int8_t* p) { vf r; PARTWISE r.part[i] = to_float(bytes_to_int(p + i * W)); return r; }
INLINE vf vload_ubytes(const uint8_t* p) { vf r; PARTWISE r.part[i] = to_float(ubytes_to_int(p + i * W)); return r; }
INLINE vf operator+(vf a, vf b) { PARTWISE a.part[i] = fadd(a.part[i], b.part[i]); return a; }
INLINE vf operator-(vf a, vf b) { PARTWISE a.part[i] = fsub(a.part[i], b.part[i]); return a; }
INLINE vf operator*(vf a, vf b) { PARTWISE a.part[i] = fmul(a.part[i], b.part[i]); return a; }
INLINE vf operator/(vf a, vf b) { PARTWISE a.part[i] = fdiv(a.part[i], b.part[i]); return a; }
INLINE vf vfma(vf a, vf b, vf c) { PARTWISE c.part[i] = ffma(a.part[i], b.part[i], c.part[i]); return c; }
INLINE vf vfma_bf16(vf a, vf b, vf c) { PARTWISE c.part[i] = fma_bf16(a.part[i], b.part[i], c.part[i]); return c; }
INLINE vf vmax(vf a, vf b) { PARTWISE a.part[i] = fmax_(a.part[i], b.part[i]); return a; }
INLINE vf vmin(vf a, vf b) { PARTWISE a.part[i] = fmin_(a.part[i], b.part[i]); return a; }
INLINE vf vexp(vf x) { PARTWISE x.part[i] = fexp(x.part[i]); return x; }
INLINE vf vwhere_at_least(vf x, vf limit, vf v, vf other) {
  PARTWISE x.part[i] = where_at_least(x.part[i], limit.part[i], v.part[i], other.part[i]);
  return x;
}
INLINE vf vpairs_low(const void* p) {
  vf r;
  PARTWISE r.part[i] = bf16_low(iload((const char*)p + 4 * W * i));
  return r;
}
INLINE vf vpairs_high(const void* p) {
  vf r;
  PARTWISE r.part[i] = bf16_high(iload((const char*)p + 4 * W * i));
  return r;
}

INLINE float sum(vf v) {  // one fixed tree
  float a[16];
  vstore(a, v);
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; i++) a[i] += a[i + step];
  return a[0];
}
INLINE float maximum(vf v) {
  float a[16], m;
  vstore(a, v);
  m = a[0];
  for (int i = 1; i < 16; i++) m = a[i] > m ? a[i] : m;
  return m;
}

// ---- single numbers -------------------------------------------------------------------------------------------------

INLINE float exp1(float x) {  // as `fexp`: x <= 0
  float lanes[W];
  fstore(lanes, fexp(fset(x)));
  return lanes[0];
}
INLINE float log1(float x) {  // of a positive, normal number
  uint32_t u = as_bits(x);
  int32_t exponent = int32_t(u >> 23) - 126;
  float m = as_float((u & 0x7fffff) | 0x3f000000);  // 0.5 <= m < 1
  if (m < 0.707106781f) { exponent--; m = m + m; }
  float f = m - 1.0f, square = f * f, e = float(exponent);
  float y = 7.0376836292e-2f;
  const float terms[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                         -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
  for (float term : terms) { y = y * f; y = y + term; }
  y = y * f;
  y = y * square;
  float low = e * -2.12194440e-4f;
  y = y + low;
  low = 0.5f * square;
  y = y - low;
  f = f + y;
  low = e * 0.693359375f;
  return f + low;
}

}  // namespace
