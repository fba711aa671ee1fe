// Attention of rows of queries over one block of entries.
//
// A lane's entries are counted from the row's first token and taken in blocks of 512. A masked entry, or a place in a
// block without one, adds exact zeros (as long as values are finite); so a query gives the same bits whatever other
// queries there are, however entries are split into pieces, and however long the padding before a row is.
#pragma once

#include "entries.h"
#include "tiles.h"

namespace {

constexpr int64_t PART_ROWS = 96;               // rows that share the tiles of a block
constexpr int64_t VALUE_TILE_ENTRIES = 64;      // values that are written to a tile at a time
constexpr int64_t VALUES_IN_PLACE_ENTRIES = 64;  // values that are read in place at a time
constexpr float MINUS_INFINITY = -__builtin_inff();

INLINE int64_t shift_of(const KvAttention& a, int64_t lane) {
  const int32_t* shift = numbers<int32_t>(a.shift);
  return shift ? shift[lane] : 0;
}
INLINE int64_t limit_of(const KvAttention& a, int64_t lane, int64_t query) {
  const int64_t stop = stop_of(a, lane);
  return a.causal_offset < 0 ? stop : min64(stop, a.causal_offset + query + 1);
}
INLINE int64_t first_seen(const KvAttention& a, int64_t lane, int64_t query) {
  const int64_t first = first_of(a, lane);
  return a.window ? max64(first, a.causal_offset + query + 1 - a.window) : first;
}

// The number of the block that a place lies in; places before the row's first token are negative.
INLINE int64_t block_of(int64_t place) {
  return (place < 0 ? place - BLOCK_ENTRIES + 1 : place) / BLOCK_ENTRIES;
}

struct Span { int64_t low, high; };  // of places in a block

// What a query sees of the block whose place 0 is entry `base`, but for the mask.
INLINE Span seen_by(const KvAttention& a, int64_t lane, int64_t query, int64_t base) {
  return {max64(0, first_seen(a, lane, query) - base), min64(BLOCK_ENTRIES, limit_of(a, lane, query) - base)};
}

// The tiles of a block that any of some rows sees: all its places from low to high, multiples of 32.
static Span seen_by_rows(const KvAttention& a, int64_t lane, int64_t row, int64_t rows, int64_t base) {
  int64_t query = row % a.queries, last = query + rows - 1;
  if (last >= a.queries) { query = 0; last = a.queries - 1; }
  const int64_t low = seen_by(a, lane, query, base).low / TILE_ENTRIES * TILE_ENTRIES;
  const int64_t high = seen_by(a, lane, last, base).high;  // no earlier query sees more, and no later one less
  if (high <= low) return {0, 0};
  return {low, (high + TILE_ENTRIES - 1) / TILE_ENTRIES * TILE_ENTRIES};
}

// What the last queries among some rows see, as above; nothing if none of the rows is one of them.
static Span seen_by_last_queries(const KvAttention& a, int64_t lane, int64_t row, int64_t rows, int64_t last,
                                 int64_t base) {
  if (row % a.queries + rows <= a.queries - last) return {0, 0};
  return seen_by_rows(a, lane, row, rows, base);
}

// Sets the scores from .. to of a block to -inf where the query of a row does not see the entry.
static void mask_scores(const KvAttention& a, int64_t lane, int64_t row, int64_t base, int64_t from, int64_t to,
                        float* scores) {
  const int64_t query = row % a.queries;
  const Span seen = seen_by(a, lane, query, base);
  for (int64_t i = from; i < min64(seen.low, to); i++) scores[i] = MINUS_INFINITY;
  for (int64_t i = max64(seen.high, from); i < to; i++) scores[i] = MINUS_INFINITY;
  if (!a.mask.numbers.data) return;
  const uint8_t* mask = row_of<uint8_t>(a.mask, a.mask.lanes > 1 ? lane : 0, a.mask.rows > 1 ? query : 0) + base;
  for (int64_t i = max64(seen.low, from); i < min64(seen.high, to); i++)
    if (!mask[i]) scores[i] = MINUS_INFINITY;
}

// Scores from .. to become cap * tanh(score / cap), if there is a cap; one that is NaN stays so.
static void cap_scores(float cap, int64_t from, int64_t to, float* scores) {
  if (cap == 0.0f) return;
  const vf zero = vset(0.0f), one = vset(1.0f), limit = vset(cap);
  for (int64_t i = from; i < to; i += 16) {
    const vf x = vload(scores + i) / limit, minus = zero - x, small = vexp(vmin(x, minus) + vmin(x, minus));
    const vf size = (one - small) / (one + small) * limit;
    vstore(scores + i, vwhere_at_least(x, zero, size, vwhere_at_least(minus, zero, zero - size, x)));
  }
}

struct Softmax { float maximum, sum; };  // of a row over some blocks; its mix of values lies beside

// Scores from .. to become weights, exp(score - maximum) rounded to bfloat16; the sum is that of weights not rounded.
// A score that is NaN is passed over by the maximum and gets the weight 0.
static Softmax weigh(float* scores, int64_t from, int64_t to) {
  vf top = vset(MINUS_INFINITY), total = vset(0.0f);
  for (int64_t i = from; i < to; i += 16) top = vmax(vload(scores + i), top);
  const float highest = maximum(top) + 0.0f;  // one zero, whatever the sign of the one that was found
  const vf minus = vset(highest == MINUS_INFINITY ? 0.0f : highest);
  for (int64_t i = from; i < to; i += 16) {
    const vf weight = vexp(vload(scores + i) - minus);
    total = total + weight;
    vstore(scores + i, rounded(weight));
  }
  return {highest, sum(total)};
}

// Where row number `row` of all lanes lies, (lanes, groups, queries); with `token_heads`, the heads of a token, rows
// lie token by token, (queries, heads).
INLINE int64_t place_of(const KvAttention& a, int64_t token_heads, int64_t row) {
  return token_heads ? row % a.queries * token_heads + row / a.queries : row;
}

static bool all_bfloat16(const KvAttention& a) {
  for (int64_t i = 0; i < a.piece_count; i++)
    if (a.pieces[i].format != KV_PLAIN) return false;
  return true;
}

// What BlockAttention needs for any rows of a lane.
static void add_needs(const KvAttention& a, Needs& needs) {
  const int64_t rows = min64(PART_ROWS, a.groups * a.queries), tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  const int64_t stride = padded(a.value_dim);
  needs.add(KV_SCRATCH_KEYS, TILE_ENTRIES * (a.dim + 1) / 2 * 4);
  needs.add(KV_SCRATCH_VALUES, VALUE_TILE_ENTRIES * stride * 4);
  needs.add(KV_SCRATCH_SCORES, (rows * (SCORE_ROW + stride) + tiles * QUERY_ROW * a.dim) * 4);
  needs.add(KV_SCRATCH_ROWS, VALUES_IN_PLACE_ENTRIES * max64(a.dim, a.value_dim) * 2);
}

// Attention of some rows of a lane over one block. The keys of 32 entries are written out as a tile, which all tiles of
// rows read while it is in the nearest cache. So are values, unless there is one tile of rows: it reads them in place.
class BlockAttention {
  const KvAttention& a;
  const int64_t lane, row, rows;     // rows of the lane, from `row` on
  const int64_t stride;              // floats of a mix
  const int64_t tiles, tile_height;  // tiles of rows, and rows of each but the last
  uint32_t* keys;                    // a tile of keys
  float* values;                     // VALUE_TILE_ENTRIES rows of `stride`
  float* queries;                    // of each tile of rows, [dim][QUERY_ROW]
  float* scores;                     // of each row, SCORE_ROW
  float* mixes;                      // of each row, `stride`
  bool is_ready = false;             // there is memory for these
  int64_t base = 0;                  // the entry at place 0 of the block
  Span spans[PART_ROWS / TILE_ROWS + 1];  // what each tile of rows sees

  int rows_of(int64_t tile) const { return int(min64(tile_height, rows - tile * tile_height)); }

  void score(Span span, bool in_place) {
    Reader reader(a, KEYS, lane), next(a, VALUES, lane);
    for (int64_t place = span.low; place < span.high; place += TILE_ENTRIES) {
      const bf16* ahead = write_keys(reader, base + place, keys);
      const int64_t values_from = place + PREFETCH_ENTRIES - span.high;  // the first values follow the last keys
      if (in_place && values_from >= 0 && span.low + values_from < span.high)
        next.rows_of(base + span.low + values_from, 1, &ahead);
      for (int64_t t = 0; t < tiles; t++) {
        if (place < spans[t].low || place >= spans[t].high) continue;
        with_rows(rows_of(t), [&](auto r) {
          score_tile<r.count>(queries + t * QUERY_ROW * a.dim, keys, a.dim, a.scaling, ahead, scores_of(t) + place);
        });
        ahead = ZEROS;  // once
      }
    }
  }

  void mix_in_place(Span span) {
    Reader reader(a, VALUES, lane);
    const bf16* places[VALUES_IN_PLACE_ENTRIES];
    for (int64_t place = span.low; place < span.high; place += VALUES_IN_PLACE_ENTRIES) {
      const int64_t entries = min64(VALUES_IN_PLACE_ENTRIES, span.high - place);
      reader.rows_of(base + place, entries, places);
      const ValuesInPlace read{places, PREFETCH_ENTRIES * reader.row_stride};
      with_rows(rows_of(0), [&](auto r) { mix_tile<r.count>(scores_of(0) + place, read, entries, stride, mixes); });
    }
    for (int64_t r = 0; r < rows; r++) order_channels(mixes + r * stride, stride);
  }

  void mix_written(Span span) {
    Reader reader(a, VALUES, lane);
    for (int64_t place = span.low; place < span.high; place += VALUE_TILE_ENTRIES) {
      const int64_t end = min64(place + VALUE_TILE_ENTRIES, span.high);
      for (int64_t i = place; i < end; i += TILE_ENTRIES) write_values(reader, base + i, values + (i - place) * stride);
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t low = max64(place, spans[t].low), high = min64(end, spans[t].high);
        if (low >= high) continue;
        const WrittenValues read{values + (low - place) * stride, stride};
        with_rows(rows_of(t), [&](auto r) {
          mix_tile<r.count>(scores_of(t) + low, read, high - low, stride, mixes + t * tile_height * stride);
        });
      }
    }
  }

  float* scores_of(int64_t tile) const { return scores + tile * tile_height * SCORE_ROW; }

 public:
  BlockAttention(const KvAttention& a, int64_t lane, int64_t row, int64_t rows, int64_t token_heads = 0)
      : a(a), lane(lane), row(row), rows(rows), stride(padded(a.value_dim)), tiles((rows + TILE_ROWS - 1) / TILE_ROWS),
        tile_height((rows + tiles - 1) / tiles) {
    keys = (uint32_t*)kv_scratch(KV_SCRATCH_KEYS, size_t(TILE_ENTRIES * (a.dim + 1) / 2 * 4));
    values = (float*)kv_scratch(KV_SCRATCH_VALUES, size_t(VALUE_TILE_ENTRIES * stride * 4));
    scores = (float*)kv_scratch(KV_SCRATCH_SCORES, size_t(rows * (SCORE_ROW + stride) + tiles * QUERY_ROW * a.dim) * 4);
    mixes = scores + rows * SCORE_ROW;
    queries = mixes + rows * stride;
    if (!(is_ready = keys && values && scores)) return;
    const int64_t first = lane * a.groups * a.queries + row;
    for (int64_t r = 0; r < rows; r++) {
      const bf16* query = numbers<bf16>(a.query) + place_of(a, token_heads, first + r) * a.dim;
      float* to = queries + r / tile_height * QUERY_ROW * a.dim + r % tile_height;
      for (int64_t d = 0; d < a.dim; d++) to[d * QUERY_ROW] = widen(query[d]);
    }
  }

  // Calls take(row, softmax, mix) for each row, if any of them sees an entry of this block.
  template <class Take> void attend(int64_t block, const Take& take) {
    if (!is_ready) return;
    base = block * BLOCK_ENTRIES - shift_of(a, lane);
    const Span span = seen_by_rows(a, lane, row, rows, base);
    if (span.low >= span.high) return;
    for (int64_t t = 0; t < tiles; t++) spans[t] = seen_by_rows(a, lane, row + t * tile_height, rows_of(t), base);
    const bool in_place = tiles == 1 && a.value_dim % (W > 8 ? 2 * W : 16) == 0 && all_bfloat16(a);
    score(span, in_place);
    Softmax found[PART_ROWS];
    for (int64_t r = 0; r < rows; r++) {
      const Span seen = spans[r / tile_height];
      float* scores_of_row = scores + r * SCORE_ROW;
      cap_scores(a.cap, seen.low, seen.high, scores_of_row);
      mask_scores(a, lane, row + r, base, seen.low, seen.high, scores_of_row);
      found[r] = weigh(scores_of_row, seen.low, seen.high);
    }
    memset(mixes, 0, size_t(rows * stride * 4));
    if (in_place) mix_in_place(span);
    else mix_written(span);
    for (int64_t r = 0; r < rows; r++) take(r, found[r], mixes + r * stride);
  }

  // Adds what `entries` entries from `first` on received from the last queries to `into`; with `reduce_max` takes the
  // maximum of both. A tile of rows that sees none of them, or has no such query, adds nothing.
  void receive(int64_t first, int64_t entries, const float* lse, int64_t last, bool reduce_max, float* into) {
    if (!is_ready) return;
    base = first;
    Span span{entries, 0};
    for (int64_t t = 0; t < tiles; t++) {
      spans[t] = seen_by_last_queries(a, lane, row + t * tile_height, rows_of(t), last, base);
      if (spans[t].low < spans[t].high) span = {min64(span.low, spans[t].low), max64(span.high, spans[t].high)};
    }
    Reader reader(a, KEYS, lane);
    for (int64_t place = span.low; place < span.high; place += TILE_ENTRIES) {
      const int64_t end = min64(entries, place + TILE_ENTRIES);
      const bf16* ahead = write_keys(reader, base + place, keys);
      for (int64_t t = 0; t < tiles; t++) {
        if (place < spans[t].low || place >= spans[t].high) continue;
        with_rows(rows_of(t), [&](auto r) {
          score_tile<r.count>(queries + t * QUERY_ROW * a.dim, keys, a.dim, a.scaling, ahead, scores_of(t) + place);
        });
        ahead = ZEROS;
      }
      for (int64_t r = 0; r < rows; r++) {
        const Span seen = spans[r / tile_height];
        if (place < seen.low || place >= seen.high) continue;
        if ((row + r) % a.queries < a.queries - last || lse[r] == MINUS_INFINITY) continue;
        float* received = scores + r * SCORE_ROW;
        const vf minus = vset(lse[r]);
        cap_scores(a.cap, place, place + TILE_ENTRIES, received);
        mask_scores(a, lane, row + r, base, place, place + TILE_ENTRIES, received);
        for (int64_t i = place; i < place + TILE_ENTRIES; i += 16)
          vstore(received + i, vexp(vload(received + i) - minus));
        for (int64_t i = place; i < end; i++)
          into[i] = !reduce_max ? into[i] + received[i] : into[i] > received[i] ? into[i] : received[i];
      }
    }
  }
};

}  // namespace
