// Attention of rows of queries over one block of entries.
//
// A lane's entries are counted from the row's first token and taken in blocks of 512. A masked entry, or a place in a
// block without one, adds exact zeros (as long as values are finite); so a query gives the same bits whatever other
// queries there are, however entries are split into pieces, and however long the padding before a row is.
#pragma once

#include "entries.h"
#include "tiles.h"

namespace {

constexpr int64_t PART_ROWS = 96;      // rows that share what is written of a block
constexpr int64_t VALUE_ENTRIES = 64;  // whose values are written before they are read
constexpr int64_t PLACE_ENTRIES = 64;  // whose values are read in place before the next channels are
constexpr float NOTHING = -__builtin_inff();

INLINE int64_t first_of(const KvAttention& a, int64_t lane) { return a.first ? a.first[lane] : 0; }
INLINE int64_t shift_of(const KvAttention& a, int64_t lane) { return a.shift ? a.shift[lane] : 0; }
INLINE int64_t limit_of(const KvAttention& a, int64_t lane, int64_t query) {
  const int64_t stop = a.stop ? a.stop[lane] : a.entries;
  return a.causal_offset < 0 ? stop : min64(stop, a.causal_offset + query + 1);
}

// The number of the block that a place lies in; places before the row's first token are negative.
INLINE int64_t block_of(int64_t place) {
  return (place < 0 ? place - BLOCK_ENTRIES + 1 : place) / BLOCK_ENTRIES;
}

struct Span { int64_t low, high; };  // of places in a block

// What a query sees of the block whose place 0 is entry `base`, but for the mask.
INLINE Span seen_by(const KvAttention& a, int64_t lane, int64_t query, int64_t base) {
  return {max64(0, first_of(a, lane) - base), min64(BLOCK_ENTRIES, limit_of(a, lane, query) - base)};
}

// The tiles of a block that any of some rows sees: all its places from low to high, multiples of 32.
static Span seen_by_rows(const KvAttention& a, int64_t lane, int64_t row, int64_t rows, int64_t base) {
  int64_t query = row % a.queries, last = query + rows - 1;
  if (last >= a.queries) { query = 0; last = a.queries - 1; }
  const int64_t low = seen_by(a, lane, query, base).low / TILE_ENTRIES * TILE_ENTRIES;
  const int64_t high = seen_by(a, lane, last, base).high;  // no earlier query sees more
  if (high <= low) return {0, 0};
  return {low, (high + TILE_ENTRIES - 1) / TILE_ENTRIES * TILE_ENTRIES};
}

// Hides what the query of a row does not see: scores from .. to of a block.
static void hide_scores(const KvAttention& a, int64_t lane, int64_t row, int64_t base, int64_t from, int64_t to,
                        float* scores) {
  const int64_t query = row % a.queries;
  const Span seen = seen_by(a, lane, query, base);
  for (int64_t i = from; i < min64(seen.low, to); i++) scores[i] = NOTHING;
  for (int64_t i = max64(seen.high, from); i < to; i++) scores[i] = NOTHING;
  if (!a.mask) return;
  const uint8_t* mask = a.mask + lane * a.mask_lane_stride + query * a.mask_query_stride + base;
  for (int64_t i = max64(seen.low, from); i < min64(seen.high, to); i++)
    if (!mask[i]) scores[i] = NOTHING;
}

struct Softmax { float maximum, sum; };  // of a row over some blocks; its mix of values lies beside

// Scores from .. to become weights, exp(score - maximum) rounded to bfloat16; the sum is that of weights not rounded.
// A score that is NaN is passed over by the maximum and gets the weight 0.
static Softmax weigh(float* scores, int64_t from, int64_t to) {
  vf top = vset(NOTHING), total = vset(0.0f);
  for (int64_t i = from; i < to; i += 16) top = vmax(vload(scores + i), top);
  const float highest = maximum(top) + 0.0f;  // one zero, whatever the sign of the one that was found
  const vf minus = vset(highest == NOTHING ? 0.0f : highest);
  for (int64_t i = from; i < to; i += 16) {
    const vf weight = vexp(vload(scores + i) - minus);
    total = total + weight;
    vstore(scores + i, rounded(weight));
  }
  return {highest, sum(total)};
}

// The queries of a tile of rows, [dim][QUERY_ROW] floats.
static void write_queries(const bf16* query, int rows, int64_t dim, float* out) {
  for (int r = 0; r < rows; r++)
    for (int64_t d = 0; d < dim; d++) out[d * QUERY_ROW + r] = widen(query[r * dim + d]);
}

static bool all_plain(const KvAttention& a) {
  for (int64_t i = 0; i < a.piece_count; i++)
    if (!is_plain(a.pieces[i])) return false;
  return true;
}

// Some rows of a lane over one block. Rows are taken in tiles; keys of 32 entries are written out, and read by all of
// these tiles while they are in the nearest cache. So are values, except for one tile of rows: it reads them in place.
class Block {
  const KvAttention& a;
  const int64_t lane, row, rows, across;
  const int64_t count, height;  // tiles of rows, and rows of each but the last
  uint32_t* keys;
  float *values, *queries, *scores, *mixes;
  int64_t base = 0;
  Span spans[PART_ROWS / TILE_ROWS + 1];

  int rows_of(int64_t tile) const { return int(min64(height, rows - tile * height)); }

  void score(Span all, bool in_place) {
    Reader reader(a, KEYS, lane), next(a, VALUES, lane);
    for (int64_t at = all.low; at < all.high; at += TILE_ENTRIES) {
      const bf16* ahead = write_keys(reader, base + at, keys);
      const int64_t value_at = at + PREFETCH_ENTRIES - all.high;  // the first values follow the last keys
      if (in_place && value_at >= 0 && all.low + value_at < all.high)
        next.rows_of(base + all.low + value_at, 1, &ahead);
      for (int64_t t = 0; t < count; t++) {
        if (at < spans[t].low || at >= spans[t].high) continue;
        with_rows(rows_of(t), [&](auto r) {
          score_tile<r.count>(queries + t * QUERY_ROW * a.dim, keys, a.dim, a.scaling, ahead, scores_of(t) + at);
        });
        ahead = ZEROS;  // once
      }
    }
  }

  void mix_in_place(Span all) {
    Reader reader(a, VALUES, lane);
    const bf16* rows_at[PLACE_ENTRIES];
    for (int64_t at = all.low; at < all.high; at += PLACE_ENTRIES) {
      const int64_t entries = min64(PLACE_ENTRIES, all.high - at);
      reader.rows_of(base + at, entries, rows_at);
      const ValuesInPlace read{rows_at, PREFETCH_ENTRIES * reader.row};
      with_rows(rows_of(0), [&](auto r) { mix_tile<r.count>(scores_of(0) + at, read, entries, across, mixes); });
    }
    for (int64_t r = 0; r < rows; r++) order_channels(mixes + r * across, across);
  }

  void mix_written(Span all) {
    Reader reader(a, VALUES, lane);
    for (int64_t at = all.low; at < all.high; at += VALUE_ENTRIES) {
      const int64_t end = min64(at + VALUE_ENTRIES, all.high);
      for (int64_t i = at; i < end; i += TILE_ENTRIES) write_values(reader, base + i, values + (i - at) * across);
      for (int64_t t = 0; t < count; t++) {
        const int64_t low = max64(at, spans[t].low), high = min64(end, spans[t].high);
        if (low >= high) continue;
        const WrittenValues read{values + (low - at) * across, across};
        with_rows(rows_of(t), [&](auto r) {
          mix_tile<r.count>(scores_of(t) + low, read, high - low, across, mixes + t * height * across);
        });
      }
    }
  }

  float* scores_of(int64_t tile) const { return scores + tile * height * SCORE_ROW; }

 public:
  Block(const KvAttention& a, int64_t lane, int64_t row, int64_t rows)
      : a(a), lane(lane), row(row), rows(rows), across(padded(a.value_dim)), count((rows + TILE_ROWS - 1) / TILE_ROWS),
        height((rows + count - 1) / count) {
    keys = (uint32_t*)kv_scratch(KV_SCRATCH_KEYS, size_t(TILE_ENTRIES * (a.dim + 1) / 2 * 4));
    values = (float*)kv_scratch(KV_SCRATCH_VALUES, size_t(VALUE_ENTRIES * across * 4));
    scores = (float*)kv_scratch(KV_SCRATCH_SCORES, size_t(rows * (SCORE_ROW + across) + count * QUERY_ROW * a.dim) * 4);
    mixes = scores + rows * SCORE_ROW;
    queries = mixes + rows * across;
    const bf16* query = a.query + (lane * a.groups * a.queries + row) * a.dim;
    for (int64_t t = 0; t < count; t++)
      write_queries(query + t * height * a.dim, rows_of(t), a.dim, queries + t * QUERY_ROW * a.dim);
  }

  // take(row, softmax, mix) of each row that sees anything of this block.
  template <class Take> void attend(int64_t block, const Take& take) {
    base = block * BLOCK_ENTRIES - shift_of(a, lane);
    const Span all = seen_by_rows(a, lane, row, rows, base);
    if (all.low >= all.high) return;
    for (int64_t t = 0; t < count; t++) spans[t] = seen_by_rows(a, lane, row + t * height, rows_of(t), base);
    const bool in_place = count == 1 && a.value_dim % (W > 8 ? 2 * W : 16) == 0 && all_plain(a);
    score(all, in_place);
    Softmax found[PART_ROWS];
    for (int64_t r = 0; r < rows; r++) {
      const Span span = spans[r / height];
      float* scores_of_row = scores + r * SCORE_ROW;
      hide_scores(a, lane, row + r, base, span.low, span.high, scores_of_row);
      found[r] = weigh(scores_of_row, span.low, span.high);
    }
    memset(mixes, 0, size_t(rows * across * 4));
    if (in_place) mix_in_place(all);
    else mix_written(all);
    for (int64_t r = 0; r < rows; r++) take(r, found[r], mixes + r * across);
  }

  // What entries of a block received of the last queries, added to `into`, or with `greatest` the maximum. base: of the
  // first entry; entries: how many.
  void receive(int64_t first, int64_t entries, const float* lse, int64_t last, bool greatest, float* into) {
    Reader reader(a, KEYS, lane);
    base = first;
    for (int64_t at = 0; at < entries; at += TILE_ENTRIES) {
      const int64_t end = min64(entries, at + TILE_ENTRIES);
      const bf16* ahead = write_keys(reader, base + at, keys);
      for (int64_t t = 0; t < count; t++) {
        with_rows(rows_of(t), [&](auto r) {
          score_tile<r.count>(queries + t * QUERY_ROW * a.dim, keys, a.dim, a.scaling, ahead, scores_of(t) + at);
        });
        ahead = ZEROS;
      }
      for (int64_t r = 0; r < rows; r++) {
        if ((row + r) % a.queries < a.queries - last || lse[r] == NOTHING) continue;
        float* received = scores + r * SCORE_ROW;
        const vf minus = vset(lse[r]);
        hide_scores(a, lane, row + r, base, at, at + TILE_ENTRIES, received);
        for (int64_t i = at; i < at + TILE_ENTRIES; i += 16) vstore(received + i, vexp(vload(received + i) - minus));
        for (int64_t i = at; i < end; i++)
          into[i] = !greatest ? into[i] + received[i] : into[i] > received[i] ? into[i] : received[i];
      }
    }
  }
};

}  // namespace
