// Attention over entries that lie in pieces.
//
// The entries of a lane are counted from the row's first token and taken in blocks of 512: scores, their maximum, the
// exponentials and their sum, and the mix of values, each in one order. Blocks are combined in order. A masked entry, or
// a place in a block without one, adds exact zeros; so a query gives the same bits whatever other queries there are,
// however entries are split into pieces, and however long the padding before a row is.

#include "common.h"
#include "eviction.h"

#include <limits>

constexpr int64_t BLOCK = 512, TILE = 32, FEW = 4, AHEAD = 64;  // entries of a block, of a tile; tiles written at once for few rows; entries fetched early
constexpr int ROWS = 6;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

struct Piece {  // entries (lanes, count, dim) of bfloat16; strides in elements
  const bf16 *keys, *values;
  int64_t count, lanes, key_lane, key_row, value_lane, value_row;  // lane l of the query reads lane l % lanes
  // Or codes of 2, 4, 8 or 16 bits in groups of 32 entries, offset + scale * code; rows are groups then, strides bytes.
  // keys: for each channel the codes, a scale and an offset of 32 entries; values: by parts of `width` channels, for each
  // entry the codes, a scale and an offset of a part. Scales and offsets are float16, their strides elements. Values may
  // be of channels made even: times a deviation, plus a mean, (lanes, dim) float32 each.
  const uint16_t *key_scale, *key_offset, *value_scale, *value_offset;
  const float *mean, *deviation;
  int64_t key_bits, value_bits, width, key_scale_lane, value_scale_lane;
  // Or codes of 8 bits with a sign, (lanes, count, dim), strides bytes; `width` is 0, scales and offsets are of a lane's
  // channels, (lanes, dim) float16.
  // Or cells of a sketch, (lanes, cells, dim) of bfloat16, `places` (sums, lanes, count) of them to an entry: their median
  // (of 1, 3 or 5) or mean, plus a mean of all, (lanes, dim) float32, if there is one; `mean` is that of values.
  const int32_t* places;
  const float* key_mean;
  int64_t sums, median;
};

struct Attention {
  const bf16* query;  // (lanes, groups, queries, dim)
  const Piece* pieces;
  const int32_t* first;  // by lane: the first entry that is seen; null: 0
  const int32_t* stop;   // by lane: the first entry that is not seen; null: all are
  const int32_t* shift;  // by lane: what is added to an entry's number for its place in blocks; null: 0
  const uint8_t* mask;   // (.., entries), 1 is seen; null: none
  int64_t lanes, groups, queries, dim, value_dim, count, entries;
  int64_t past;    // query m sees entries before past + m + 1; negative: all
  int64_t mask_lane, mask_query;
  float scaling;
};

static inline int64_t limit_of(const Attention& a, int64_t lane, int64_t m) {
  int64_t stop = a.stop ? a.stop[lane] : a.entries;
  return a.past < 0 ? stop : std::min(stop, a.past + m + 1);
}
static inline int64_t first_of(const Attention& a, int64_t lane) { return a.first ? a.first[lane] : 0; }
static inline int64_t shift_of(const Attention& a, int64_t lane) { return a.shift ? a.shift[lane] : 0; }

#if defined(__AVX512F__)
// 16 by 16 pairs of keys, from `pair` on: pair d of 16 entries becomes vector d.
static inline __attribute__((always_inline)) void transposed(const bf16* const* rows, int64_t pair, __m512i* out) {
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(rows[i] + 2 * pair);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[8 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    out[i] = _mm512_shuffle_i32x4(t[i], t[4 + i], 0x88);
    out[8 + i] = _mm512_shuffle_i32x4(t[i], t[4 + i], 0xdd);
    out[4 + i] = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0x88);
    out[12 + i] = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0xdd);
  }
}
#endif

static inline void turned(const bf16* const* rows, int64_t pair, int64_t pairs, char* out) {
#if defined(__AVX512F__)
  if (pairs - pair >= 16) {
    __m512i columns[16];
    transposed(rows, pair, columns);
    for (int i = 0; i < 16; i++) store(out + (pair + i) * 128, columns[i]);
    return;
  }
#endif
  for (int64_t d = pair; d < std::min(pairs, pair + 16); d++)
    for (int i = 0; i < 16; i++) memcpy(out + d * 128 + i * 4, rows[i] + 2 * d, 4);
}

alignas(64) static const bf16 ZEROS[1024] = {};

// Finds entries in pieces; `next` must be asked in rising order.
struct Walk {
  const Attention& a; int64_t lane, piece = 0, start = 0, key_row = 0, value_row = 0;
  int64_t find(int64_t entry, const bf16** key, const bf16** value) {  // returns how many lie there in a row
    while (entry >= start + a.pieces[piece].count) start += a.pieces[piece++].count;
    const Piece& p = a.pieces[piece];
    *key = p.keys + lane % p.lanes * p.key_lane + (entry - start) * p.key_row;
    *value = p.values + lane % p.lanes * p.value_lane + (entry - start) * p.value_row;
    key_row = p.key_row; value_row = p.value_row;
    return start + p.count - entry;
  }
};

static inline float half1(const uint16_t* p) { _Float16 h; memcpy(&h, p, 2); return float(h); }
static inline vf halves16(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
  vf r; for (int i = 0; i < 16; i++) r[i] = half1(p + i); return r;
#endif
}

// Codes first .. first + 15 of `count`, packed as stores/coded.py packs them: of n bytes, byte j has codes j, j + n, ..
static inline vf codes16(const uint8_t* codes, int64_t bits, int64_t count, int64_t first) {
  vi r;
  int64_t n = count * bits / 8;
  if (bits == 16) {
    for (int i = 0; i < 16; i++) r[i] = load<int16_t>(codes + 2 * (first + i));
  } else if (n % 16) {
    for (int i = 0; i < 16; i++) r[i] = codes[(first + i) % n] >> ((first + i) / n * bits) & ((1 << bits) - 1);
  } else {
#if defined(__AVX512F__)
    r = (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(codes + first % n)));
#else
    for (int i = 0; i < 16; i++) r[i] = codes[first % n + i];
#endif
    if (bits < 8) r = r >> int(first / n * bits) & splati((1 << bits) - 1);
  }
#if defined(__AVX512F__)
  vf f = (vf)_mm512_cvtepi32_ps((__m512i)r);
#else
  vf f; for (int i = 0; i < 16; i++) f[i] = float(r[i]);
#endif
  return bits == 16 ? f * splat(1.f / 256) : f;
}

static inline vi paired(vf even, vf odd) {  // two rows of floats as one of pairs of bfloat16
#if defined(__AVX512BF16__)
  __m512i x = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)even));
  __m512i y = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)odd));
  return (vi)_mm512_or_si512(x, _mm512_slli_epi32(y, 16));
#else
  vi r; for (int i = 0; i < 16; i++) r[i] = narrow(even[i]) | uint32_t(narrow(odd[i])) << 16; return r;
#endif
}

// Writes out one group of codes as a tile.
static void write_group(const Attention& a, const Piece& p, int64_t lane, int64_t group, char* keys, char* values) {
  lane %= p.lanes;
  if (keys) {
    const uint8_t* codes = (const uint8_t*)p.keys + lane * p.key_lane + group * p.key_row;
    const uint16_t *scale = p.key_scale + lane * p.key_scale_lane + group * a.dim;
    const uint16_t *offset = p.key_offset + lane * p.key_scale_lane + group * a.dim;
    int64_t bits = p.key_bits, bytes = TILE * bits / 8;
    for (int64_t pair = 0; pair < a.dim / 2; pair++) {
      const uint8_t *even = codes + 2 * pair * bytes, *odd = even + bytes;
      vf s0 = splat(half1(scale + 2 * pair)), s1 = splat(half1(scale + 2 * pair + 1));
      vf o0 = splat(half1(offset + 2 * pair)), o1 = splat(half1(offset + 2 * pair + 1));
      for (int part = 0; part < 2; part++)
        store(keys + pair * 128 + part * 64, paired(fma16(codes16(even, bits, TILE, 16 * part), s0, o0),
                                                    fma16(codes16(odd, bits, TILE, 16 * part), s1, o1)));
    }
  }
  if (!values) return;
  int64_t bits = p.value_bits, parts = a.value_dim / p.width, bytes = p.width * bits / 8;
  const uint8_t* codes = (const uint8_t*)p.values + lane * p.value_lane + group * p.value_row;
  const uint16_t* scale = p.value_scale + lane * p.value_scale_lane + group * parts * TILE;
  const uint16_t* offset = p.value_offset + lane * p.value_scale_lane + group * parts * TILE;
  for (int64_t part = 0; part < parts; part++)
    for (int64_t i = 0; i < TILE; i += 2) {
      const uint8_t *even = codes + (part * TILE + i) * bytes, *odd = even + bytes;
      vf s0 = splat(half1(scale + part * TILE + i)), s1 = splat(half1(scale + part * TILE + i + 1));
      vf o0 = splat(half1(offset + part * TILE + i)), o1 = splat(half1(offset + part * TILE + i + 1));
      for (int64_t c = 0; c < p.width; c += 16) {
        vf x = fma16(codes16(even, bits, p.width, c), s0, o0), y = fma16(codes16(odd, bits, p.width, c), s1, o1);
        if (p.mean) {
          vf mean = load<vf>(p.mean + lane * a.value_dim + c), deviation = load<vf>(p.deviation + lane * a.value_dim + c);
          x = fma16(x, deviation, mean);
          y = fma16(y, deviation, mean);
        }
        store(values + (i / 2 * a.value_dim + part * p.width + c) * 4, paired(x, y));
      }
    }
}

static inline vf smaller(vf a, vf b) { return a < b ? a : b; }
static inline vf median3(vf a, vf b, vf c) { return larger(smaller(a, b), smaller(larger(a, b), c)); }

// Writes out n entries, offset + scale * code of each channel.
static void write_codes(const int8_t* codes, int64_t row, const uint16_t* scale, const uint16_t* offset, int64_t n,
                        int64_t dim, bf16* out) {
  for (int64_t i = 0; i < n; i++, codes += row, out += dim)
    for (int64_t d = 0; d < dim; d += 16) {
      vf x;
      for (int j = 0; j < 16; j++) x[j] = float(codes[d + j]);
      narrow16(out + d, fma16(x, halves16(scale + d), halves16(offset + d)));
    }
}

// Writes out what n entries are estimated to be, the first of them having `places`, `apart` from one sum to the next.
static void write_estimates(const bf16* cells, const int32_t* places, int64_t apart, int64_t sums, bool median,
                            const float* mean, int64_t n, int64_t dim, bf16* out) {
  for (int64_t i = 0; i < n; i++, out += dim)
    for (int64_t d = 0; d < dim; d += 16) {
      vf x[5], total = vf{};
      auto cell = [&](int64_t s) { return wide16(cells + places[s * apart + i] * dim + d); };
      if (!median || sums == 1) {
        for (int64_t s = 0; s < sums; s++) total += cell(s);
        total = total * splat(1.f / float(sums));
      } else {
        for (int64_t s = 0; s < sums; s++) x[s] = cell(s);
        if (sums == 5) {  // neither the least nor the greatest of four is the median of five
          vf low = larger(smaller(x[0], x[1]), smaller(x[2], x[3])), high = smaller(larger(x[0], x[1]), larger(x[2], x[3]));
          total = median3(low, high, x[4]);
        } else total = median3(x[0], x[1], x[2]);
      }
      narrow16(out + d, mean ? total + load<vf>(mean + d) : total);
    }
}

// Writes out tile `t` of a block whose place 0 is entry `base`: keys [dim / 2][32], values [16 pairs][value_dim][2].
static void write_tile(const Attention& a, Walk& walk, int64_t base, int64_t t, int64_t low, int64_t high, char* keys,
                       char* values) {
  const bf16 *k[TILE], *v[TILE];
  int64_t entry = base + t * TILE, run = 0;
  if (entry >= low && entry < high) {
    walk.find(entry, &k[0], &v[0]);
    const Piece& p = a.pieces[walk.piece];
    if (p.width) return write_group(a, p, walk.lane, (entry - walk.start) / TILE, keys, values);
  }
  for (int64_t i = 0; i < TILE; i++, entry++, run--) {
    if (entry < low || entry >= high) { k[i] = v[i] = ZEROS; run = 0; }
    else if (run > 0) { k[i] = k[i - 1] + walk.key_row; v[i] = v[i - 1] + walk.value_row; }
    else {
      run = walk.find(entry, &k[i], &v[i]);
      if (const Piece& p = a.pieces[walk.piece]; p.places || p.key_bits) {  // as many as fit in the tile
        int64_t lane = walk.lane % p.lanes, n = run = std::min(run, TILE - i), at = entry - walk.start;
        char* room = (char*)own.at(4, TILE * (a.dim + a.value_dim) * 2);
        bf16 *key = (bf16*)room + i * a.dim, *value = (bf16*)room + TILE * a.dim + i * a.value_dim;
        if (p.key_bits) {
          const int8_t *key_codes = (const int8_t*)p.keys + lane * p.key_lane + at * p.key_row, *value_codes = (const int8_t*)p.values + lane * p.value_lane + at * p.value_row;
          int64_t own_key = lane * p.key_scale_lane, own_value = lane * p.value_scale_lane;
          if (keys) write_codes(key_codes, p.key_row, p.key_scale + own_key, p.key_offset + own_key, n, a.dim, key);
          if (values) write_codes(value_codes, p.value_row, p.value_scale + own_value, p.value_offset + own_value, n, a.value_dim, value);
        }
        const int32_t* places = p.places + lane * p.count + at;
        int64_t apart = p.lanes * p.count;
        if (p.places && keys) write_estimates(p.keys + lane * p.key_lane, places, apart, p.sums, p.median, p.key_mean ? p.key_mean + lane * a.dim : nullptr, n, a.dim, key);
        if (p.places && values) write_estimates(p.values + lane * p.value_lane, places, apart, p.sums, p.median, p.mean ? p.mean + lane * a.value_dim : nullptr, n, a.value_dim, value);
        k[i] = key; v[i] = value; walk.key_row = a.dim; walk.value_row = a.value_dim;
      }
    }
    if (keys) for (int64_t d = 0; d < a.dim; d += 32) __builtin_prefetch(k[i] + AHEAD * walk.key_row + d, 0, 2);
    if (values) for (int64_t d = 0; d < a.value_dim; d += 32) __builtin_prefetch(v[i] + AHEAD * walk.value_row + d, 0, 2);
  }
  if (keys)
    for (int side = 0; side < 2; side++)
      for (int64_t pair = 0; pair < a.dim / 2; pair += 16) turned(k + 16 * side, pair, a.dim / 2, keys + 64 * side);
  if (!values) return;
  for (int64_t pair = 0; pair < TILE / 2; pair++) {
    const bf16 *even = v[2 * pair], *odd = v[2 * pair + 1];
    char* out = values + pair * a.value_dim * 4;
    int64_t d = 0;
    for (; d + 16 <= a.value_dim; d += 16) {
#if defined(__AVX512F__)
      __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(even + d)));
      __m512i y = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(odd + d)));
      store(out + d * 4, _mm512_or_si512(x, _mm512_slli_epi32(y, 16)));
#else
      for (int i = 0; i < 16; i++) { uint32_t both = even[d + i] | uint32_t(odd[d + i]) << 16; memcpy(out + (d + i) * 4, &both, 4); }
#endif
    }
    for (; d < a.value_dim; d++) { uint32_t both = even[d] | uint32_t(odd[d]) << 16; memcpy(out + d * 4, &both, 4); }
  }
}

// Scores of R rows with T written tiles: sums enough to keep the processor busy.
template <int R, int T>
static inline __attribute__((always_inline)) void score_tiles(const Attention& a, const bf16* query, const char* keys, float* scores) {
  vf part[2 * T][R];
#pragma GCC unroll 8
  for (int c = 0; c < 2 * T; c++)
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) part[c][r] = vf{};
  for (int64_t pair = 0; pair < a.dim / 2; pair++) {
    vi row[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) row[r] = splati(load<int32_t>(query + r * a.dim + 2 * pair));
#pragma GCC unroll 8
    for (int c = 0; c < 2 * T; c++) {
      vi column = load<vi>(keys + c / 2 * a.dim * 64 + pair * 128 + (c & 1) * 64);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) part[c][r] = dot(part[c][r], row[r], column);
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < 2 * T; c++)
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) store(scores + r * BLOCK + c * 16, part[c][r] * splat(a.scaling));
}

template <int R> static inline void score_rows(const Attention& a, const bf16* query, const char* keys, int64_t tiles, float* scores) {
  constexpr int T = R <= 3 ? 4 : 2;
  int64_t t = 0;
  for (; t + T <= tiles; t += T) score_tiles<R, T>(a, query, keys + t * a.dim * 64, scores + t * TILE);
  for (; t < tiles; t++) score_tiles<R, 1>(a, query, keys + t * a.dim * 64, scores + t * TILE);
}

template <int R, int C>
static inline __attribute__((always_inline)) void mix_columns(const Attention& a, const bf16* weights, const char* values,
                                                              int64_t pairs, int64_t d, float* out) {
  vf part[C][R];
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) part[c][r] = load<vf>(out + r * a.value_dim + d + 16 * c);
  for (int64_t pair = 0; pair < pairs; pair++) {
    vi row[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) row[r] = splati(load<int32_t>(weights + r * BLOCK + 2 * pair));
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      vi column = load<vi>(values + pair * a.value_dim * 4 + (d + 16 * c) * 4);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) part[c][r] = dot(part[c][r], row[r], column);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) store(out + r * a.value_dim + d + 16 * c, part[c][r]);
}

// Adds the values of written tiles, weighted, to `out`: rows of value_dim floats.
template <int R>
static inline void mix_rows(const Attention& a, const bf16* weights, const char* values, int64_t pairs, float* out) {
  int64_t across = a.value_dim * 4, d = 0;
  for (; d + 64 <= a.value_dim; d += 64) mix_columns<R, 4>(a, weights, values, pairs, d, out);
  for (; d + 16 <= a.value_dim; d += 16) mix_columns<R, 1>(a, weights, values, pairs, d, out);
  for (; d < a.value_dim; d++)
    for (int r = 0; r < R; r++) {
      float total = out[r * a.value_dim + d];
      for (int64_t pair = 0; pair < pairs; pair++) {
        const bf16* w = weights + r * BLOCK + 2 * pair;
        const bf16* v = (const bf16*)(values + pair * across + d * 4);
        total += wide(w[0]) * wide(v[0]);
        total += wide(w[1]) * wide(v[1]);
      }
      out[r * a.value_dim + d] = total;
    }
}

// Where few rows read a block once, nothing is written out: the same chains, on entries as they lie.
static bool direct(const Attention& a, int64_t rows) {
#if defined(__AVX512F__)
  bool plain = rows <= ROWS && a.dim % 32 == 0 && a.value_dim % 32 == 0;
  for (int64_t i = 0; i < a.count && plain; i++) plain = !a.pieces[i].key_bits && !a.pieces[i].places;
  return plain;
#else
  return false;
#endif
}

// Rows of keys and values of the places from .. to of a block whose place 0 is entry `base`.
static void find_rows(Walk& walk, int64_t base, int64_t from, int64_t to, int64_t low, int64_t high, const bf16** keys,
                      const bf16** values) {
  int64_t run = 0;
  for (int64_t i = from, entry = base + from; i < to; i++, entry++, run--) {
    if (entry < low || entry >= high) { keys[i] = values[i] = ZEROS; run = 0; }
    else if (run > 0) { keys[i] = keys[i - 1] + walk.key_row; values[i] = values[i - 1] + walk.value_row; }
    else run = walk.find(entry, &keys[i], &values[i]);
  }
}

#if defined(__AVX512F__)
template <int R>
static void score_rows_of(const Attention& a, const bf16* query, const bf16* const* keys, int64_t from, int64_t to,
                          int64_t ahead, float* scores) {
  for (int64_t i = from; i < to; i += 16) {
    vf part[R];
    for (int r = 0; r < R; r++) part[r] = vf{};
    for (int64_t pair = 0; pair < a.dim / 2; pair += 16) {
      __m512i columns[16];
      transposed(keys + i, pair, columns);
#pragma GCC unroll 16
      for (int c = 0; c < 16; c++) {
        __builtin_prefetch(keys[i + c] + ahead + 2 * pair, 0, 2);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
          part[r] = dot(part[r], splati(load<int32_t>(query + r * a.dim + 2 * (pair + c))), (vi)columns[c]);
      }
    }
    for (int r = 0; r < R; r++) store(scores + r * BLOCK + i, part[r] * splat(a.scaling));
  }
}

// C vectors of channels from d on: those of a pair of entries are interleaved by fours, and put in order at the end.
template <int R, int C>
static inline __attribute__((always_inline)) void mix_channels_of(const Attention& a, const bf16* weights,
                                                                  const bf16* const* values, int64_t from, int64_t to,
                                                                  int64_t ahead, int64_t d, float* out) {
  vf part[C][R];
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) part[c][r] = vf{};
  for (int64_t i = from; i < to; i += 2) {
    const bf16 *even = values[i] + d, *odd = values[i + 1] + d;
    vi row[R], column[C];
#pragma GCC unroll 2
    for (int c = 0; c < C; c += 2) {
      __builtin_prefetch(even + ahead + 16 * c, 0, 2);
      __builtin_prefetch(odd + ahead + 16 * c, 0, 2);
      __m512i x = _mm512_loadu_si512(even + 16 * c), y = _mm512_loadu_si512(odd + 16 * c);
      column[c] = (vi)_mm512_unpacklo_epi16(x, y);
      column[c + 1] = (vi)_mm512_unpackhi_epi16(x, y);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) row[r] = splati(load<int32_t>(weights + r * BLOCK + i));
#pragma GCC unroll 4
    for (int c = 0; c < C; c++)
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) part[c][r] = dot(part[c][r], row[r], column[c]);
  }
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int c = 0; c < C; c += 2)
    for (int r = 0; r < R; r++) {
      __m512 x = (__m512)part[c][r], y = (__m512)part[c + 1][r];
      store(out + r * a.value_dim + d + 16 * c, _mm512_permutex2var_ps(x, low, y));
      store(out + r * a.value_dim + d + 16 * c + 16, _mm512_permutex2var_ps(x, high, y));
    }
}

template <int R>
static void mix_rows_of(const Attention& a, const bf16* weights, const bf16* const* values, int64_t from, int64_t to,
                        int64_t ahead, float* out) {
  int64_t d = 0;
  for (; d + 64 <= a.value_dim; d += 64) mix_channels_of<R, 4>(a, weights, values, from, to, ahead, d, out);
  for (; d < a.value_dim; d += 32) mix_channels_of<R, 2>(a, weights, values, from, to, ahead, d, out);
}
#else
template <int R> static void score_rows_of(const Attention&, const bf16*, const bf16* const*, int64_t, int64_t, int64_t, float*) {}
template <int R> static void mix_rows_of(const Attention&, const bf16*, const bf16* const*, int64_t, int64_t, int64_t, float*) {}
#endif

#define BY_ROWS(rows, call) \
  switch (rows) { \
    case 1: { constexpr int R = 1; call; break; } \
    case 2: { constexpr int R = 2; call; break; } \
    case 3: { constexpr int R = 3; call; break; } \
    case 4: { constexpr int R = 4; call; break; } \
    case 5: { constexpr int R = 5; call; break; } \
    default: { constexpr int R = 6; call; break; } \
  }

struct Part { float most, sum; };  // of a row over some blocks; its mix of values lies beside

static void combine(Part& into, float* out, const Part& more, const float* mix, int64_t dim) {
  if (more.most == NOTHING) return;
  if (into.most == NOTHING) { into = more; memcpy(out, mix, dim * 4); return; }
  float most_of_both = std::max(into.most, more.most);
  float own_weight = std::exp(into.most - most_of_both), other = std::exp(more.most - most_of_both);
  into.sum = into.sum * own_weight + more.sum * other;
  into.most = most_of_both;
  for (int64_t d = 0; d < dim; d++) out[d] = out[d] * own_weight + mix[d] * other;
}

// What a query sees of a block: places low .. high.
static inline void seen(const Attention& a, int64_t lane, int64_t m, int64_t base, int64_t* low, int64_t* high) {
  int64_t limit = limit_of(a, lane, m), start = first_of(a, lane);
  *low = std::max<int64_t>(0, start - base);
  *high = std::min<int64_t>(BLOCK, limit - base);
}

// Masks scores of a tile of rows, [rows][BLOCK], of tiles from .. to.
static void hide(const Attention& a, int64_t lane, int64_t row, int rows, int64_t base, int64_t from, int64_t to, float* scores) {
  for (int r = 0; r < rows; r++) {
    int64_t m = (row + r) % a.queries, low, high;
    seen(a, lane, m, base, &low, &high);
    float* own_scores = scores + r * BLOCK;
    for (int64_t i = from * TILE; i < std::min(low, to * TILE); i++) own_scores[i] = NOTHING;
    for (int64_t i = std::max(high, from * TILE); i < to * TILE; i++) own_scores[i] = NOTHING;
    if (!a.mask) continue;
    const uint8_t* mask = a.mask + lane * a.mask_lane + m * a.mask_query + base;
    for (int64_t i = std::max(low, from * TILE); i < std::min(high, to * TILE); i++) if (!mask[i]) own_scores[i] = NOTHING;
  }
}

static inline void span(const Attention& a, int64_t lane, int64_t row, int64_t rows, int64_t base, int64_t* from, int64_t* to) {
  // the tiles of a block that any of some rows sees
  int64_t low = BLOCK, high = 0;
  int64_t m = row % a.queries;
  int64_t ms[2] = {m, m + rows - 1};
  if (m + rows > a.queries) { ms[0] = 0; ms[1] = a.queries - 1; }
  for (int64_t one : ms) {
    int64_t own_low, own_high;
    seen(a, lane, one, base, &own_low, &own_high);
    low = std::min(low, own_low); high = std::max(high, own_high);
  }
  *from = low / TILE;
  *to = high <= low ? *from : (high + TILE - 1) / TILE;
}

struct Room {  // scratch of a block: written keys and values, and a tile of rows
  char *keys, *values; float *scores, *mix; bf16* weights;
  explicit Room(const Attention& a) {
    keys = (char*)own.at(0, BLOCK * a.dim * 2);
    values = (char*)own.at(1, BLOCK * a.value_dim * 2);
    scores = (float*)own.at(2, ROWS * BLOCK * 6 + ROWS * a.value_dim * 4);
    weights = (bf16*)(scores + ROWS * BLOCK);
    mix = (float*)(weights + ROWS * BLOCK);
  }
};

// Rows row .. row + rows of a lane over one block; result: a Part and a mix for each row.
template <class Take>
static void block_of(const Attention& a, int64_t lane, int64_t row, int64_t rows, int64_t block, Room& room, Take take) {
  int64_t base = block * BLOCK - shift_of(a, lane), from, to;
  span(a, lane, row, rows, base, &from, &to);
  if (from >= to) return;
  int64_t start = first_of(a, lane), stop = a.entries;
  bool straight = direct(a, rows), once = rows <= ROWS;  // one tile of rows: what is written is read at once
  Walk walk{a, lane};
  const bf16 *keys_of[BLOCK], *values_of[BLOCK];
  if (straight) find_rows(walk, base, from * TILE, to * TILE, start, stop, keys_of, values_of);
  else if (!once)
    for (int64_t t = from; t < to; t++)
      write_tile(a, walk, base, t, start, stop, room.keys + t * a.dim * 64, room.values + t * a.value_dim * 64);
  for (int64_t r = 0; r < rows; r += ROWS) {
    int tile = int(std::min<int64_t>(ROWS, rows - r));
    int64_t low, high;
    span(a, lane, row + r, tile, base, &low, &high);
    if (low >= high) continue;
    const bf16* query = a.query + (lane * a.groups * a.queries + row + r) * a.dim;
    if (straight) BY_ROWS(tile, score_rows_of<R>(a, query, keys_of, low * TILE, high * TILE, AHEAD * walk.key_row, room.scores))
    else for (int64_t t = low; t < high; t += FEW) {
      int64_t count = std::min(FEW, high - t);
      if (once) for (int64_t i = 0; i < count; i++) write_tile(a, walk, base, t + i, start, stop, room.keys + i * a.dim * 64, nullptr);
      const char* keys = once ? room.keys : room.keys + t * a.dim * 64;
      BY_ROWS(tile, score_rows<R>(a, query, keys, count, room.scores + t * TILE))
    }
    hide(a, lane, row + r, tile, base, low, high, room.scores);
    Part parts[ROWS];
    for (int i = 0; i < tile; i++) {
      float* scores = room.scores + i * BLOCK;
      vf top = splat(NOTHING);
      for (int64_t j = low * TILE; j < high * TILE; j += 16) top = larger(load<vf>(scores + j), top);
      parts[i] = {most(top), 0.f};
      vf minus = splat(parts[i].most == NOTHING ? 0.f : parts[i].most), total = vf{};
      for (int64_t j = low * TILE; j < high * TILE; j += 16) {
        vf p = exp16(load<vf>(scores + j) - minus);
        total += p;
        narrow16(room.weights + i * BLOCK + j, p);
      }
      parts[i].sum = sum(total);
    }
    Walk again{a, lane};
    if (straight) BY_ROWS(tile, mix_rows_of<R>(a, room.weights, values_of, low * TILE, high * TILE, AHEAD * walk.value_row, room.mix))
    else memset(room.mix, 0, tile * a.value_dim * 4);
    if (!straight) for (int64_t t = low; t < high; t += once ? FEW : high - low) {
      int64_t count = once ? std::min(FEW, high - t) : high - low;
      if (once) for (int64_t i = 0; i < count; i++) write_tile(a, again, base, t + i, start, stop, nullptr, room.values + i * a.value_dim * 64);
      const char* values = once ? room.values : room.values + t * a.value_dim * 64;
      BY_ROWS(tile, mix_rows<R>(a, room.weights + t * TILE, values, count * TILE / 2, room.mix))
    }
    for (int i = 0; i < tile; i++) take(row + r + i, parts[i], room.mix + i * a.value_dim);
  }
}

static void finish(const Part& part, const float* mix, int64_t dim, void* out, int64_t at, bool floats, float* lse) {
  bool blind = part.most == NOTHING;
  *lse = blind ? NOTHING : part.most + std::log(part.sum);
  float factor = blind ? 0.f : 1.f / part.sum;
  for (int64_t d = 0; d < dim; d++) {
    float value = blind ? 0.f : mix[d] * factor;
    if (floats) ((float*)out)[at + d] = value;
    else ((bf16*)out)[at + d] = narrow(value);
  }
}

constexpr int64_t TOGETHER = 16 * ROWS;  // rows that share a written block

struct Job {  // an attention, and where its result goes, as kk_attend has it
  const Attention* given; void* out; int floats; float *lse, *state; int resumes;
  int64_t rows() const { return given->groups * given->queries; }
  int64_t parts() const { return (rows() + TOGETHER - 1) / TOGETHER; }
  Part* before() const { return (Part*)state; }
  float* mixed() const { return state ? state + given->lanes * rows() * 2 : nullptr; }
  void blocks(int64_t* least, int64_t* greatest) const {
    const Attention& a = *given;
    *least = 1 << 30; *greatest = 0;
    for (int64_t lane = 0; lane < a.lanes; lane++) {
      *least = std::min(*least, (first_of(a, lane) + shift_of(a, lane)) / BLOCK);
      *greatest = std::max(*greatest, (a.entries - 1 + shift_of(a, lane)) / BLOCK);
    }
  }
};

// A part of a lane's rows, all blocks in order.
static void attend_part(const Job& job, int64_t least, int64_t greatest, int64_t lane, int64_t part) {
  const Attention& a = *job.given;
  int64_t dim = a.value_dim, row = part * TOGETHER, count = std::min(TOGETHER, job.rows() - row), at = lane * job.rows() + row;
  Room room(a);
  float* own_mixes = (float*)own.at(3, count * (dim * 4 + sizeof(Part)));
  float* mixes = job.state ? job.mixed() + at * dim : own_mixes;
  Part* have = job.state ? job.before() + at : (Part*)(own_mixes + count * dim);
  if (!job.state) for (int64_t i = 0; i < count; i++) have[i] = {NOTHING, 0.f};
  for (int64_t block = least; block <= greatest; block++)
    block_of(a, lane, row, count, block, room, [&](int64_t r, const Part& more, const float* mix) {
      combine(have[r - row], mixes + (r - row) * dim, more, mix, dim);
    });
  if (job.out) for (int64_t i = 0; i < count; i++) finish(have[i], mixes + i * dim, dim, job.out, (at + i) * dim, job.floats, job.lse + at + i);
}

// Few rows: blocks are tasks, and are combined in the same order after.
static void attend_blocks(const Job& job, int64_t least, int64_t greatest) {
  const Attention& a = *job.given;
  int64_t rows = job.rows(), dim = a.value_dim, blocks = greatest - least + 1;
  Part* before = job.before();
  float *state = job.state, *mixed = job.mixed();
  float* mixes = (float*)own.at(3, a.lanes * rows * blocks * (dim * 4 + sizeof(Part)));
  Part* have = (Part*)(mixes + a.lanes * rows * blocks * dim);
  for (int64_t i = 0; i < a.lanes * rows * blocks; i++) have[i] = {NOTHING, 0.f};
  each(a.lanes * blocks, [&](int64_t task) {
    int64_t lane = task / blocks, block = task % blocks;
    Room room(a);
    for (int64_t row = 0; row < rows; row += TOGETHER)
      block_of(a, lane, row, std::min(TOGETHER, rows - row), least + block, room, [&](int64_t r, const Part& more, const float* mix) {
        int64_t at = (lane * rows + r) * blocks + block;
        have[at] = more;
        memcpy(mixes + at * dim, mix, dim * 4);
      });
  });
  for (int64_t r = 0; r < a.lanes * rows; r++) {
    Part whole = {NOTHING, 0.f};
    Part& into = state ? before[r] : whole;
    float* mix = state ? mixed + r * dim : mixes + r * blocks * dim;
    if (!state) whole = have[r * blocks];
    for (int64_t block = state ? 0 : 1; block < blocks; block++)
      combine(into, mix, have[r * blocks + block], mixes + (r * blocks + block) * dim, dim);
    if (job.out) finish(into, mix, dim, job.out, r * dim, job.floats, job.lse + r);
  }
}

// As many attentions as there are, by lanes and parts of rows where these are enough to keep all threads busy.
static void attend_jobs(const Job* jobs, int64_t count) {
  struct Task { const Job* job; int64_t least, greatest, lane, part; };
  int64_t total = 0, most = 1;
  for (int64_t j = 0; j < count; j++) total += jobs[j].given->lanes * jobs[j].parts();
  Task* tasks = (Task*)own.at(5, total * sizeof(Task));
  Task* task = tasks;
  for (int64_t j = 0; j < count; j++) {
    int64_t least, greatest;
    jobs[j].blocks(&least, &greatest);
    most = std::max(most, greatest - least + 1);
    if (jobs[j].state && !jobs[j].resumes)
      for (int64_t r = 0; r < jobs[j].given->lanes * jobs[j].rows(); r++) jobs[j].before()[r] = {NOTHING, 0.f};
    for (int64_t lane = 0; lane < jobs[j].given->lanes; lane++)
      for (int64_t part = 0; part < jobs[j].parts(); part++) *task++ = {jobs + j, least, greatest, lane, part};
  }
  if (total < 4 * threads() && most > 1) {
    for (int64_t t = 0; t < total; t++) if (!tasks[t].lane && !tasks[t].part) attend_blocks(*tasks[t].job, tasks[t].least, tasks[t].greatest);
    return;
  }
  each(total, [&](int64_t t) { attend_part(*tasks[t].job, tasks[t].least, tasks[t].greatest, tasks[t].lane, tasks[t].part); });
}

// What the entries of one block of a lane received, as kk_received has it.
static void received_of(const Attention& a, const float* lse, int64_t last, int greatest, float* out, int64_t lane, int64_t block) {
  int64_t rows = a.groups * a.queries;
  Room room(a);
  Walk walk{a, lane};
  int64_t base = block * BLOCK, high = std::min(BLOCK, a.entries - base), tiles = (high + TILE - 1) / TILE;
  for (int64_t t = 0; t < tiles; t++) write_tile(a, walk, base, t, 0, a.entries, room.keys + t * a.dim * 64, nullptr);
  float* into = out + lane * a.entries + base;
  for (int64_t i = 0; i < high; i++) into[i] = 0.f;
  for (int64_t r = 0; r < rows; r += ROWS) {
    int tile = int(std::min<int64_t>(ROWS, rows - r));
    bool wanted = false;
    for (int i = 0; i < tile; i++) wanted |= (r + i) % a.queries >= a.queries - last;
    if (!wanted) continue;
    const bf16* query = a.query + (lane * rows + r) * a.dim;
    BY_ROWS(tile, score_rows<R>(a, query, room.keys, tiles, room.scores))
    hide(a, lane, r, tile, base, 0, tiles, room.scores);
    for (int i = 0; i < tile; i++) {
      float own_lse = lse[lane * rows + r + i];
      if ((r + i) % a.queries < a.queries - last || std::isinf(own_lse)) continue;
      vf minus = splat(own_lse);
      float* scores = room.scores + i * BLOCK;
      for (int64_t j = 0; j < tiles * TILE; j += 16) store(scores + j, exp16(load<vf>(scores + j) - minus));
      for (int64_t j = 0; j < high; j++) into[j] = greatest ? std::max(into[j], scores[j]) : into[j] + scores[j];
    }
  }
  if (!greatest) for (int64_t i = 0; i < high; i++) into[i] /= float(a.groups);
}

struct Arrival {  // one new entry of each lane of a session's layer, and what its query attends to once it is there
  Attention attention;  // of one query that sees everything; its numbers come with the row
  Entering entering;
  float* received;  // (lanes, entries), null: nobody asks
  int64_t greatest, token;  // token: its place in the row
};

extern "C" {

// out: (lanes, groups, queries, value_dim), bfloat16 or float32; lse: (lanes, groups, queries) float32. state: null, or
// room for what is combined so far, a Part and value_dim floats a row, from which a later call goes on (`resumes`) with
// the next whole blocks. A call that is not the last (`out` is null) leaves the state only.
void kk_attend(const Attention* given, void* out, int floats, float* lse, float* state, int resumes) {
  Job job{given, out, floats, lse, state, resumes};
  attend_jobs(&job, 1);
}

// The attention that entries received of the last `last` queries: the mean over groups of the sum (or, with `greatest`,
// the maximum over all) of exp(score - lse). out: (lanes, entries) float32.
void kk_received(const Attention* given, const float* lse, int64_t last, int greatest, float* out) {
  int64_t blocks = (given->entries + BLOCK - 1) / BLOCK;
  each(given->lanes * blocks, [&](int64_t task) { received_of(*given, lse, last, greatest, out, task / blocks, task % blocks); });
}

// A token of each of `count` sessions in one layer: its entry is kept, and then it attends. query: (tokens, heads, dim);
// key, value: (kv heads, tokens, dim), or (tokens, kv heads, dim) `by_token`; out: (tokens, heads, value_dim) and lse:
// (tokens, heads), of these tokens only.
void kk_together(Arrival* const* arrivals, int64_t count, const bf16* query, const bf16* key, const bf16* value,
                 int64_t tokens, int64_t heads, int by_token, float scaling, bf16* out, float* lse) {
  Job* job = (Job*)own.at(6, count * sizeof(Job));
  bool asked = false;
  for (int64_t i = 0; i < count; i++) {
    Attention& a = arrivals[i]->attention;
    int64_t token = arrivals[i]->token, row = token * heads;
    a.groups = heads / a.lanes;
    a.query = query + row * a.dim;
    a.scaling = scaling;
    job[i] = {&a, out + row * a.value_dim, 0, lse + row, nullptr, 0};
    asked |= arrivals[i]->received != nullptr;
    for (int64_t lane = 0; lane < a.lanes; lane++) {
      int64_t at = by_token ? token * a.lanes + lane : lane * tokens + token;
      enter(arrivals[i]->entering, lane, (const char*)(key + at * a.dim), (const char*)(value + at * a.value_dim));
    }
  }
  attend_jobs(job, count);
  int64_t lanes = count ? arrivals[0]->attention.lanes : 0;
  if (asked) each(count * lanes, [&](int64_t task) {
    const Arrival& mine = *arrivals[task / lanes];
    if (!mine.received) return;
    for (int64_t block = 0; block < (mine.attention.entries + BLOCK - 1) / BLOCK; block++)
      received_of(mine.attention, job[task / lanes].lse, 1, int(mine.greatest), mine.received, task % lanes, block);
  });
}

// Attention over all entries of lanes whose rows lie behind each other, in one piece, without a mask: what a step does.
// With `received` also what they received of all queries.
void kk_attend_alone(const bf16* query, const bf16* keys, const bf16* values, int64_t key_lane, int64_t value_lane,
                     int64_t lanes, int64_t groups, int64_t queries, int64_t dim, int64_t value_dim, int64_t entries,
                     float scaling, bf16* out, float* lse, float* received, int greatest) {
  Piece piece{};
  piece.keys = keys; piece.values = values; piece.count = entries; piece.lanes = lanes;
  piece.key_lane = key_lane; piece.key_row = dim; piece.value_lane = value_lane; piece.value_row = value_dim;
  Attention a{};
  a.query = query; a.pieces = &piece; a.lanes = lanes; a.groups = groups; a.queries = queries; a.dim = dim;
  a.value_dim = value_dim; a.count = 1; a.entries = entries; a.past = entries - queries; a.scaling = scaling;
  kk_attend(&a, out, 0, lse, nullptr, 0);
  if (received) kk_received(&a, lse, queries, greatest, received);
}

}  // extern "C"
