// Single numbers: bfloat16 and float16 as float32, bits of a float, integers.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kvkeep.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")

namespace {

typedef uint16_t bf16;

INLINE float as_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
INLINE uint32_t as_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
INLINE int32_t load32(const void* p) { int32_t v; memcpy(&v, p, 4); return v; }
template <class T> INLINE T* numbers(const KvArray& array) { return (T*)array.data; }  // null: there is no array
template <class T> INLINE T* row_of(const KvRows& rows, int64_t lane, int64_t row) {
  return (T*)rows.numbers.data + lane * rows.lane_stride + row * rows.row_stride;
}
INLINE int64_t size_of(int64_t type) {  // bytes of a number; 0: there is no such type
  switch (type) {
    case KV_UINT8: case KV_INT8: return 1;
    case KV_INT16: case KV_FLOAT16: case KV_BFLOAT16: return 2;
    case KV_INT32: case KV_FLOAT32: return 4;
    case KV_INT64: case KV_FLOAT64: return 8;
    default: return 0;
  }
}
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

}  // namespace
