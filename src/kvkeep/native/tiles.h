// The two products of attention, by tiles of rows: scores of queries with keys, and mixes of values by weights.
//
// A score is one chain over the channels, a channel of a mix is one chain over the entries; each in a lane of its own,
// so that tiles of whatever size give the same bits.
#pragma once

#include "codes.h"
#include "vectors.h"

namespace {

constexpr int64_t BLOCK_ENTRIES = KV_BLOCK_ENTRIES;
constexpr int64_t SCORE_ROW = BLOCK_ENTRIES + 16;  // floats: a power of two would crowd rows into few sets of the cache

// Rows of a tile, and vectors beside each other: sums enough to keep the processor busy, and no more than registers.
#if defined(KVKEEP_AVX512)
constexpr int TILE_ROWS = 8, SUMS = 24;
#elif defined(KVKEEP_AVX2)
constexpr int TILE_ROWS = 6, SUMS = 12;
#elif defined(KVKEEP_NEON)
constexpr int TILE_ROWS = 6, SUMS = 24;
#else
constexpr int TILE_ROWS = 2, SUMS = 8;
#endif

constexpr int CACHE_LINE = 32;  // bfloat16 of a line of the caches

constexpr int64_t QUERY_ROW = TILE_ROWS;  // floats: a channel of the queries of a tile

constexpr int vectors_beside(int rows, int least, int limit, int sums) {  // a power of two
  int count = least;
  while (2 * count * rows <= sums && 2 * count <= limit) count *= 2;
  return count;
}

template <int R> struct Rows { static constexpr int count = R; };

// f(Rows<rows>()): kernels are compiled for each number of rows.
template <int R = TILE_ROWS, class F> INLINE void with_rows(int rows, const F& f) {
  if constexpr (R > 1) {
    if (rows < R) {
      with_rows<R - 1>(rows, f);
      return;
    }
  }
  f(Rows<R>());
}

// Adds the products of R numbers and C vectors to their sums. Whichever of the two are fewer wait in registers, and the
// others are read one by one: all of both and the sums would not fit.
template <int R, int C, class Row, class Column>
INLINE void add_products(F (&sums)[C][R], const Row& row, const Column& column) {
  if constexpr (R <= C) {
    F rows[R];
    UNROLLED for (int r = 0; r < R; r++) rows[r] = fset(row(r));
    UNROLLED for (int c = 0; c < C; c++) {
      const F one = column(c);
      UNROLLED for (int r = 0; r < R; r++) sums[c][r] = fma_bf16(rows[r], one, sums[c][r]);
    }
  } else {
    F columns[C];
    UNROLLED for (int c = 0; c < C; c++) columns[c] = column(c);
    UNROLLED for (int r = 0; r < R; r++) {
      const F one = fset(row(r));
      UNROLLED for (int c = 0; c < C; c++) sums[c][r] = fma_bf16(one, columns[c], sums[c][r]);
    }
  }
}

// Scores of R rows with the keys of a tile. query: [dim][QUERY_ROW]; keys: [dim / 2][32] pairs; scores: rows SCORE_ROW
// apart. ahead: later entries, of a tile's size; one cache line of them is prefetched with each channel.
// In one burst they would wait for each other, and in the nearest cache they would drive the tile out.
template <int R>
static void score_tile(const float* query, const uint32_t* keys, int64_t dim, float scaling, const bf16* ahead,
                       float* scores) {
  constexpr int C = vectors_beside(R, 1, TILE_ENTRIES / W, SUMS);
  const F factor = fset(scaling);
  for (int64_t first = 0; first < TILE_ENTRIES; first += C * W) {
    F part[C][R];
    UNROLLED for (int c = 0; c < C; c++)
      UNROLLED for (int r = 0; r < R; r++) part[c][r] = fset(0.0f);
    const float* q = query;
    const uint32_t* k = keys + first;
    for (int64_t d = 0; d < dim; d += 2, k += TILE_ENTRIES) {
      if (first == 0) __builtin_prefetch(ahead + d * CACHE_LINE, 0, 2);
      add_products<R, C>(part, [&](int r) { return q[r]; }, [&](int c) { return bf16_low(iload(k + c * W)); });
      q += QUERY_ROW;
      if (d + 1 == dim) break;
      const uint32_t* again = k;  // read anew: with both halves in registers, sums would not fit in them
      __asm__("" : "+r"(again));
      if (first == 0) __builtin_prefetch(ahead + d * CACHE_LINE + CACHE_LINE, 0, 2);
      add_products<R, C>(part, [&](int r) { return q[r]; }, [&](int c) { return bf16_high(iload(again + c * W)); });
      q += QUERY_ROW;
    }
    UNROLLED for (int c = 0; c < C; c++)
      UNROLLED for (int r = 0; r < R; r++) fstore(scores + r * SCORE_ROW + first + c * W, fmul(part[c][r], factor));
  }
}

// Values of entries as floats, in rows beside each other.
struct WrittenValues {
  static constexpr int VECTORS = 1;  // that are made of what is read at once
  const float* tile;
  int64_t stride;
  inline F read(int64_t entry, int64_t channel, int vector) const {
    return fload(tile + entry * stride + channel + vector * W);
  }
  inline void fetch(int64_t, int64_t, int) const {}
};

// Values of entries as they lie. Of 2 W channels the first vector has the even ones and the second the odd ones, which
// takes two instructions; `order_channels` puts the mix in order.
struct ValuesInPlace {
  static constexpr int VECTORS = 2;
  const bf16* const* rows;
  int64_t ahead;  // elements from an entry to the one that is fetched
  inline F read(int64_t entry, int64_t channel, int vector) const {
    const I pairs = iload(rows[entry] + channel + vector / 2 * 2 * W);
    return vector % 2 ? bf16_high(pairs) : bf16_low(pairs);
  }
  inline void fetch(int64_t entry, int64_t channel, int count) const {
    for (int c = 0; c < count; c += CACHE_LINE) __builtin_prefetch(rows[entry] + ahead + channel + c, 0, 2);
  }
};

INLINE void order_channels(float* mix, int64_t dim) {
  float evens[W];
  for (int64_t d = 0; d < dim; d += 2 * W) {
    float* at = mix + d;
    memcpy(evens, at, sizeof evens);
    for (int i = 0; i < W; i++) {
      const float odd = at[W + i];  // read before its place is written: 2 i + 1 <= W + i
      at[2 * i] = evens[i];
      at[2 * i + 1] = odd;
    }
  }
}

template <int R, int C, class Values>
INLINE void mix_channels(const float* weights, const Values& values, int64_t count, int64_t stride, int64_t d,
                         float* mix) {
  F part[C][R];
  UNROLLED for (int c = 0; c < C; c++)
    UNROLLED for (int r = 0; r < R; r++) part[c][r] = fload(mix + r * stride + d + c * W);
  for (int64_t i = 0; i < count; i++) {
    values.fetch(i, d, C * W);
    add_products<R, C>(part, [&](int r) { return weights[r * SCORE_ROW + i]; },
                       [&](int c) { return values.read(i, d, c); });
  }
  UNROLLED for (int c = 0; c < C; c++)
    UNROLLED for (int r = 0; r < R; r++) fstore(mix + r * stride + d + c * W, part[c][r]);
}

// Adds the values of `count` entries, weighted, to the mixes of R rows. weights: rows SCORE_ROW apart; mix: rows of
// `stride` floats, a multiple of 16 and of what Values read at once.
template <int R, class Values>
static void mix_tile(const float* weights, const Values& values, int64_t count, int64_t stride, float* mix) {
  constexpr int C = vectors_beside(R, Values::VECTORS, 64 / W, SUMS - 2 * (Values::VECTORS - 1));
  constexpr int STEP = PARTS > Values::VECTORS ? PARTS : Values::VECTORS, LESS = C < STEP ? C : STEP;
  int64_t d = 0;
  for (; d + C * W <= stride; d += C * W) mix_channels<R, C>(weights, values, count, stride, d, mix);
  for (; d < stride; d += LESS * W) mix_channels<R, LESS>(weights, values, count, stride, d, mix);
}

}  // namespace
