// Rows of bfloat16 turned into columns of pairs: a tile of keys has the entries side by side, so that each score is a
// chain in a lane of its own. Two channels of an entry share 32 bits, as they do in memory; they become floats when
// they are multiplied.
#pragma once

#include "simd.h"

namespace {

#if !defined(KVKEEP_PLAIN)

// 8 channels of W rows, four rows apart in the parts of 128 bits: rows[0], rows[4], ..
#if defined(KVKEEP_AVX512)
INLINE __m128i eight(const bf16* p) { return _mm_loadu_si128((const __m128i*)p); }
INLINE I rows_by_four(const bf16* const* rows, int64_t d) {  // a masked load of parts is cheaper than an insertion
  I r = _mm512_castsi128_si512(eight(rows[0] + d));
  r = _mm512_mask_broadcast_i32x4(r, 0x00f0, eight(rows[4] + d));
  r = _mm512_mask_broadcast_i32x4(r, 0x0f00, eight(rows[8] + d));
  return _mm512_mask_broadcast_i32x4(r, 0xf000, eight(rows[12] + d));
}
INLINE I low32(I a, I b) { return _mm512_unpacklo_epi32(a, b); }
INLINE I high32(I a, I b) { return _mm512_unpackhi_epi32(a, b); }
INLINE I low64(I a, I b) { return _mm512_unpacklo_epi64(a, b); }
INLINE I high64(I a, I b) { return _mm512_unpackhi_epi64(a, b); }
#elif defined(KVKEEP_AVX2)
INLINE I rows_by_four(const bf16* const* rows, int64_t d) {
  const __m128i first = _mm_loadu_si128((const __m128i*)(rows[0] + d));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(first), _mm_loadu_si128((const __m128i*)(rows[4] + d)), 1);
}
INLINE I low32(I a, I b) { return _mm256_unpacklo_epi32(a, b); }
INLINE I high32(I a, I b) { return _mm256_unpackhi_epi32(a, b); }
INLINE I low64(I a, I b) { return _mm256_unpacklo_epi64(a, b); }
INLINE I high64(I a, I b) { return _mm256_unpackhi_epi64(a, b); }
#else
INLINE I rows_by_four(const bf16* const* rows, int64_t d) { return vreinterpretq_s32_u16(vld1q_u16(rows[0] + d)); }
INLINE I low32(I a, I b) { return vzip1q_s32(a, b); }
INLINE I high32(I a, I b) { return vzip2q_s32(a, b); }
INLINE int64x2_t halves(I a) { return vreinterpretq_s64_s32(a); }
INLINE I low64(I a, I b) { return vreinterpretq_s32_s64(vzip1q_s64(halves(a), halves(b))); }
INLINE I high64(I a, I b) { return vreinterpretq_s32_s64(vzip2q_s64(halves(a), halves(b))); }
#endif

// Channels d .. d + 7 of W rows: pair number c goes to out + c * stride.
INLINE void four_pairs(const bf16* const* rows, int64_t d, uint32_t* out, int64_t stride) {
  const I a = rows_by_four(rows, d), b = rows_by_four(rows + 1, d);
  const I c = rows_by_four(rows + 2, d), e = rows_by_four(rows + 3, d);
  const I ab = low32(a, b), ce = low32(c, e), ab_high = high32(a, b), ce_high = high32(c, e);
  istore(out, low64(ab, ce));
  istore(out + stride, high64(ab, ce));
  istore(out + 2 * stride, low64(ab_high, ce_high));
  istore(out + 3 * stride, high64(ab_high, ce_high));
}

#endif

// W rows of `dim` channels: channels 2 c and 2 c + 1 go to out + c * stride. The last of an odd number has 0 beside it.
INLINE void pairs_of_rows(const bf16* const* rows, int64_t dim, uint32_t* out, int64_t stride) {
  int64_t d = 0;
#if !defined(KVKEEP_PLAIN)
  for (; d + 8 <= dim; d += 8) four_pairs(rows, d, out + d / 2 * stride, stride);
#endif
  for (; d < dim; d += 2)
    for (int i = 0; i < W; i++)
      out[d / 2 * stride + i] = rows[i][d] | (d + 1 < dim ? uint32_t(rows[i][d + 1]) << 16 : 0);
}

}  // namespace
