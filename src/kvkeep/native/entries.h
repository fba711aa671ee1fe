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

// A row of floats is padded, so that vectors of 16 fit.
INLINE int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }

INLINE const KvSide& side_of(const KvPiece& p, Side side) { return side == KEYS ? p.keys : p.values; }
INLINE int64_t lanes_of(const KvPiece& p) { return p.keys.rows.lanes; }

// What a lane sees; a range beyond its entries ends at them.
INLINE int64_t first_of(const KvAttention& a, int64_t lane) {
  const int32_t* first = numbers<int32_t>(a.first);
  return first ? min64(max64(first[lane], 0), a.entries) : 0;
}
INLINE int64_t stop_of(const KvAttention& a, int64_t lane) {
  const int32_t* stop = numbers<int32_t>(a.stop);
  return stop ? min64(stop[lane], a.entries) : a.entries;
}

// Decodes n entries of a piece, by channel or sketched, from number `first` on: rows of bfloat16.
static void decode_rows(const KvPiece& p, Side side, int64_t lane, int64_t first, int64_t n, int64_t dim, bf16* out) {
  const KvSide& from = side_of(p, side);
  if (p.format == KV_BY_CHANNEL) {
    const int8_t* codes = row_of<int8_t>(from.rows, lane, p.first + first);
    const uint16_t *scale = row_of<uint16_t>(from.scale, lane, 0), *offset = row_of<uint16_t>(from.offset, lane, 0);
    write_codes(codes, from.rows.row_stride, scale, offset, n, dim, out);
    return;
  }
  const int32_t* indices = numbers<int32_t>(p.cell_indices) + lane * p.entries + first;
  const float* mean = numbers<float>(from.mean);
  write_estimates(row_of<bf16>(from.rows, lane, 0), indices, lanes_of(p) * p.entries, p.sums, p.use_median != 0,
                  mean ? mean + lane * dim : nullptr, n, dim, out);
}

// Reads keys or values of a lane, in rising order.
struct Reader {
  const KvAttention& a;
  Side side;
  int64_t lane, first, stop;     // entries before `first` and from `stop` on are read as zeros
  int64_t piece = 0, start = 0;  // the current piece, and its first entry
  int64_t row_stride = 0;        // elements from one entry to the next

  Reader(const KvAttention& a, Side side, int64_t lane)
      : a(a), side(side), lane(lane), first(first_of(a, lane)), stop(stop_of(a, lane)) {}

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
      if (p.format == KV_PLAIN) {
        const KvRows& lie = side_of(p, side).rows;
        row_stride = lie.row_stride;
        from = row_of<bf16>(lie, lane % lie.lanes, p.first + number);
      } else {
        bf16* decoded = (bf16*)kv_scratch(KV_SCRATCH_ROWS, size_t(count * dim * 2));
        if (decoded) decode_rows(p, side, lane % lanes_of(p), number, n, dim, decoded + i * dim);
        row_stride = decoded ? dim : 0;
        from = decoded ? decoded + i * dim : ZEROS;
      }
      for (int64_t j = 0; j < n; j++) rows[i + j] = from + j * row_stride;
      i += n;
    }
  }

  // Returns the piece whose group of codes begins at an entry; null where there is none.
  const KvPiece* group_at(int64_t entry) {
    if (entry < 0 || entry >= stop) return nullptr;
    const KvPiece& p = find(entry);
    return p.format == KV_GROUPED ? &p : nullptr;
  }
};

// Writes the keys of 32 entries, [dim / 2][32] pairs of channels. Returns where the entries PREFETCH_ENTRIES further on
// lie if rows go on as they do: an address to fetch, and not to read.
static const bf16* write_keys(Reader& reader, int64_t entry, uint32_t* tile) {
  const int64_t dim = reader.a.dim;
  if (const KvPiece* p = reader.group_at(entry)) {
    write_group_of_keys(p->keys, reader.lane % lanes_of(*p), (entry - reader.start) / TILE_ENTRIES, dim, tile);
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
    write_group_of_values(p->values, reader.lane % lanes_of(*p), (entry - reader.start) / TILE_ENTRIES, dim, tile,
                          stride);
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
