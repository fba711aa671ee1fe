// Entries in any format, read as rows of bfloat16 or written out as tiles.
#pragma once

#include "codes.h"
#include "runtime.h"
#include "transpose.h"

namespace {

constexpr int64_t PREFETCH_ENTRIES = 64;  // how far ahead of the entries that are read others are fetched

alignas(64) static const bf16 ZEROS[KV_MAX_DIM] = {};  // read for a place of a block without an entry

enum Side { KEYS, VALUES };

INLINE int64_t dim_of(const KvAttention& a, Side side) { return side == KEYS ? a.dim : a.value_dim; }
INLINE bool is_bfloat16(const KvPiece& p) { return !p.key_bits && !p.cell_indices; }

// A row of floats is padded, so that vectors of 16 fit.
INLINE int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }

struct PieceSide {  // the keys or the values of a piece
  const bf16* data;
  int64_t lane_stride, row_stride;
  const uint16_t *scale, *offset;
  int64_t scale_stride;
  const float* mean;
};

INLINE PieceSide side_of(const KvPiece& p, Side side) {
  if (side == KEYS)
    return {p.keys, p.key_lane_stride, p.key_row_stride, p.key_scale, p.key_offset, p.key_scale_stride, p.key_mean};
  return {p.values,       p.value_lane_stride, p.value_row_stride, p.value_scale,
          p.value_offset, p.value_scale_stride, p.value_mean};
}

// Decodes n entries of a piece, by channel or sketched, from number `first` on: rows of bfloat16.
static void decode_rows(const KvAttention& a, Side side, const KvPiece& p, int64_t lane, int64_t first, int64_t n,
                        bf16* out) {
  const int64_t dim = dim_of(a, side);
  const PieceSide from = side_of(p, side);
  if (p.key_bits) {
    const int8_t* codes = (const int8_t*)from.data + lane * from.lane_stride + first * from.row_stride;
    const int64_t scales = lane * from.scale_stride;
    write_codes(codes, from.row_stride, from.scale + scales, from.offset + scales, n, dim, out);
    return;
  }
  const int32_t* indices = p.cell_indices + lane * p.entries + first;
  write_estimates(from.data + lane * from.lane_stride, indices, p.lanes * p.entries, p.sums, p.use_median != 0,
                  from.mean ? from.mean + lane * dim : nullptr, n, dim, out);
}

// Reads keys or values of a lane, in rising order.
struct Reader {
  const KvAttention& a;
  Side side;
  int64_t lane, first, stop;     // entries before `first` and from `stop` on are read as zeros
  int64_t piece = 0, start = 0;  // the current piece, and its first entry
  int64_t row_stride = 0;        // elements from one entry to the next

  Reader(const KvAttention& a, Side side, int64_t lane)
      : a(a), side(side), lane(lane), first(a.first ? max64(a.first[lane], 0) : 0),
        stop(a.stop ? min64(a.stop[lane], a.entries) : a.entries) {}

  // Moves to the piece of an entry.
  const KvPiece& find(int64_t entry) {
    while (entry >= start + a.pieces[piece].entries) start += a.pieces[piece++].entries;
    return a.pieces[piece];
  }

  // Finds where `count` entries lie, from `entry` on. Those that are not bfloat16 are decoded first.
  void rows_of(int64_t entry, int64_t count, const bf16** rows) {
    const int64_t dim = dim_of(a, side);
    for (int64_t i = 0; i < count;) {
      if (entry + i < first || entry + i >= stop) {
        rows[i++] = ZEROS;
        continue;
      }
      const KvPiece& p = find(entry + i);
      const int64_t number = entry + i - start, n = min64(count - i, min64(p.entries - number, stop - entry - i));
      const bf16* from;
      if (is_bfloat16(p)) {
        const PieceSide lies = side_of(p, side);
        row_stride = lies.row_stride;
        from = lies.data + lane % p.lanes * lies.lane_stride + number * row_stride;
      } else {
        bf16* decoded = (bf16*)kv_scratch(KV_SCRATCH_ROWS, size_t(count * dim * 2)) + i * dim;
        decode_rows(a, side, p, lane % p.lanes, number, n, decoded);
        row_stride = dim;
        from = decoded;
      }
      for (int64_t j = 0; j < n; j++) rows[i + j] = from + j * row_stride;
      i += n;
    }
  }

  // Returns the piece whose group of codes begins at an entry; null where there is none.
  const KvPiece* group_at(int64_t entry) {
    if (entry < 0 || entry >= stop) return nullptr;
    const KvPiece& p = find(entry);
    return p.value_group ? &p : nullptr;
  }
};

// Writes the keys of 32 entries, [dim / 2][32] pairs of channels. Returns where the entries PREFETCH_ENTRIES further on
// lie if rows go on as they do: an address to fetch, and not to read.
static const bf16* write_keys(Reader& reader, int64_t entry, uint32_t* tile) {
  const int64_t dim = reader.a.dim;
  if (const KvPiece* p = reader.group_at(entry)) {
    write_group_of_keys(*p, reader.lane % p->lanes, (entry - reader.start) / TILE_ENTRIES, dim, tile);
    return ZEROS;
  }
  const bf16* rows[TILE_ENTRIES];
  reader.rows_of(entry, TILE_ENTRIES, rows);
  for (int64_t i = 0; i < TILE_ENTRIES; i += W) pairs_of_rows(rows + i, dim, tile + i, TILE_ENTRIES);
  return rows[0] + PREFETCH_ENTRIES * reader.row_stride;
}

// Writes the values of 32 entries, rows of floats.
static void write_values(Reader& reader, int64_t entry, float* tile) {
  const int64_t dim = reader.a.value_dim, stride = padded(dim);
  if (const KvPiece* p = reader.group_at(entry)) {
    write_group_of_values(*p, reader.lane % p->lanes, (entry - reader.start) / TILE_ENTRIES, dim, tile, stride);
    return;
  }
  const bf16* rows[TILE_ENTRIES];
  reader.rows_of(entry, TILE_ENTRIES, rows);
  for (int64_t i = 0; i < TILE_ENTRIES; i++, tile += stride) {
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16) vstore(tile + d, vload_bf16(rows[i] + d));
    for (; d < stride; d++) tile[d] = d < dim ? widen(rows[i][d]) : 0.0f;
  }
}

}  // namespace
