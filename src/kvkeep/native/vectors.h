// Vectors of 16 floats in as many registers as they need; exp and log.
#pragma once

#include "simd.h"

namespace {

// exp(x) for x <= 0: 2^n p(r), n the integer nearest to x / ln 2; 0 below -87.
INLINE F fexp(F x) {
  const F low = fset(-87.0f), magic = fset(12582912.0f);  // adding 1.5 * 2^23 rounds to the nearest integer
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

// ---- vf: 16 floats --------------------------------------------------------------------------------------------------

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

// One fixed tree: number i with number i + 8, then with i + 4, i + 2 and i + 1.
INLINE float sum(vf v) {
  UNROLLED for (int step = PARTS / 2; step; step /= 2)
    UNROLLED for (int i = 0; i < step; i++) v.part[i] = fadd(v.part[i], v.part[i + step]);
  return fsum(v.part[0]);
}
INLINE float maximum(vf v) {  // of numbers that are not NaN
  UNROLLED for (int step = PARTS / 2; step; step /= 2)
    UNROLLED for (int i = 0; i < step; i++) v.part[i] = fmax_(v.part[i], v.part[i + step]);
  return fmaximum(v.part[0]);
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
