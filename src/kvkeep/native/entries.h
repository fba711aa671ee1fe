// Entries wherever they lie, written out as tiles of floats.
#pragma once

#include "codes.h"
#include "runtime.h"
#include "transpose.h"

namespace {

constexpr int64_t PREFETCH_ENTRIES = 64;  // fetched ahead of those that are read

alignas(64) static const bf16 ZEROS[KV_MAX_DIM] = {};  // a place of a block without an entry

enum Side { KEYS, VALUES };

INLINE int64_t dim_of(const KvAttention& a, Side side) { return side == KEYS ? a.dim : a.value_dim; }
INLINE bool is_plain(const KvPiece& p) { return !p.key_bits && !p.cell_indices; }

// Rows of so many floats that vectors of 16 fit.
INLINE int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }

// n entries of a piece that are not plain, from `at` on, as rows of bfloat16.
static void decode_rows(const KvAttention& a, Side side, const KvPiece& p, int64_t lane, int64_t at, int64_t n,
                        bf16* out) {
  const int64_t dim = dim_of(a, side);
  const bool keys = side == KEYS;
  const bf16* data = keys ? p.keys : p.values;
  const int64_t of_lane = lane * (keys ? p.key_lane_stride : p.value_lane_stride), row = keys ? p.key_row_stride : p.value_row_stride;
  if (p.key_bits) {
    const int64_t first = lane * (keys ? p.key_scale_stride : p.value_scale_stride);
    write_codes((const int8_t*)data + of_lane + at * row, row, (keys ? p.key_scale : p.value_scale) + first,
                (keys ? p.key_offset : p.value_offset) + first, n, dim, out);
    return;
  }
  const float* mean = keys ? p.key_mean : p.value_mean;
  write_estimates(data + of_lane, p.cell_indices + lane * p.entries + at, p.lanes * p.entries, p.sums, p.use_median != 0,
                  mean ? mean + lane * dim : nullptr, n, dim, out);
}

// Reads keys or values of a lane, in rising order.
struct Reader {
  const KvAttention& a;
  Side side;
  int64_t lane, first, stop;  // entries before `first` and from `stop` on are not there
  int64_t piece = 0, start = 0;  // the piece at hand, and its first entry
  int64_t row = 0;               // elements from one entry to the next

  Reader(const KvAttention& a, Side side, int64_t lane)
      : a(a), side(side), lane(lane), first(a.first ? max64(a.first[lane], 0) : 0),
        stop(a.stop ? min64(a.stop[lane], a.entries) : a.entries) {}

  const KvPiece& find(int64_t entry) {
    while (entry >= start + a.pieces[piece].entries) start += a.pieces[piece++].entries;
    return a.pieces[piece];
  }

  // Where `count` entries lie, from `entry` on; those that are not plain are decoded first.
  void rows_of(int64_t entry, int64_t count, const bf16** rows) {
    const int64_t dim = dim_of(a, side);
    for (int64_t i = 0; i < count;) {
      if (entry + i < first || entry + i >= stop) {
        rows[i++] = ZEROS;
        continue;
      }
      const KvPiece& p = find(entry + i);
      const int64_t at = entry + i - start, n = min64(count - i, min64(p.entries - at, stop - entry - i));
      const bf16* from;
      if (is_plain(p)) {
        const int64_t of_lane = lane % p.lanes;
        row = side == KEYS ? p.key_row_stride : p.value_row_stride;
        from = (side == KEYS ? p.keys + of_lane * p.key_lane_stride : p.values + of_lane * p.value_lane_stride) + at * row;
      } else {
        bf16* decoded = (bf16*)kv_scratch(KV_SCRATCH_ROWS, size_t(count * dim * 2)) + i * dim;
        decode_rows(a, side, p, lane % p.lanes, at, n, decoded);
        row = dim;
        from = decoded;
      }
      for (int64_t j = 0; j < n; j++) rows[i + j] = from + j * row;
      i += n;
    }
  }

  // The group of codes that the tile from `entry` on is; null where it is none.
  const KvPiece* group_at(int64_t entry) {
    if (entry < 0 || entry >= stop) return nullptr;
    const KvPiece& p = find(entry);
    return p.value_group ? &p : nullptr;
  }
};

// The keys of 32 entries, [dim / 2][32] pairs of channels. Returns where those lie that are PREFETCH_ENTRIES further
// on; a place that is none may be fetched as well.
static const bf16* write_keys(Reader& reader, int64_t entry, uint32_t* tile) {
  const int64_t dim = reader.a.dim;
  if (const KvPiece* p = reader.group_at(entry)) {
    write_group_of_keys(*p, reader.lane % p->lanes, (entry - reader.start) / TILE_ENTRIES, dim, tile);
    return ZEROS;
  }
  const bf16* rows[TILE_ENTRIES];
  reader.rows_of(entry, TILE_ENTRIES, rows);
  for (int64_t i = 0; i < TILE_ENTRIES; i += W) pairs_of_rows(rows + i, dim, tile + i, TILE_ENTRIES);
  return rows[0] + PREFETCH_ENTRIES * reader.row;
}

// The values of 32 entries, rows of floats.
static void write_values(Reader& reader, int64_t entry, float* tile) {
  const int64_t dim = reader.a.value_dim, across = padded(dim);
  if (const KvPiece* p = reader.group_at(entry)) {
    write_group_of_values(*p, reader.lane % p->lanes, (entry - reader.start) / TILE_ENTRIES, dim, tile, across);
    return;
  }
  const bf16* rows[TILE_ENTRIES];
  reader.rows_of(entry, TILE_ENTRIES, rows);
  for (int64_t i = 0; i < TILE_ENTRIES; i++, tile += across) {
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16) vstore(tile + d, vload_bf16(rows[i] + d));
    for (; d < across; d++) tile[d] = d < dim ? widen(rows[i][d]) : 0.0f;
  }
}

}  // namespace
