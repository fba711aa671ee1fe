// Inserts of new entries into the columns of a bank, which every decoded token does.
#pragma once

#include "kvkeep.h"
#include "numbers.h"

namespace {

// Returns the first empty column (slot -1), else the one of lowest rank; of equal ranks the one of the lowest slot, or
// without `oldest_first` the first.
template <class T>
static int64_t lowest_column(const T* ranks, const int32_t* slots, int64_t columns, bool oldest_first) {
  int64_t found = 0;
  for (int64_t i = 0; i < columns; i++) {
    if (slots[i] < 0) return i;
    if (ranks[i] < ranks[found] || (oldest_first && ranks[i] == ranks[found] && slots[i] < slots[found])) found = i;
  }
  return found;
}

static int64_t column_for_entry(const KvInsert& e, int64_t lane) {
  if (!e.ranks.data) return e.column;
  const int64_t first = lane * e.columns;
  const int32_t* slots = numbers<int32_t>(e.slots) + first;
  const bool oldest_first = e.oldest_first != 0;
  return e.ranks.type == KV_INT32 ? lowest_column(numbers<int32_t>(e.ranks) + first, slots, e.columns, oldest_first)
                                  : lowest_column(numbers<float>(e.ranks) + first, slots, e.columns, oldest_first);
}

INLINE int64_t row_bytes(const KvRows& rows) { return rows.width * size_of(rows.numbers.type); }
INLINE char* bytes_of(const KvRows& rows, int64_t lane, int64_t row) {
  return (char*)rows.numbers.data + (lane * rows.lane_stride + row * rows.row_stride) * size_of(rows.numbers.type);
}

template <class T> INLINE void copy_number(const KvArray& from, int64_t place, const KvArray& to, int64_t lane) {
  if (to.data) numbers<T>(to)[lane] = numbers<T>(from)[place];
}

static void insert_in_lane(const KvInsert& e, int64_t lane, const char* new_key, const char* new_value) {
  const int64_t column = column_for_entry(e, lane), place = lane * e.columns + column;
  char *key = bytes_of(e.keys, lane, column), *value = bytes_of(e.values, lane, column);
  if (e.evicted_keys.numbers.data) {
    memcpy(bytes_of(e.evicted_keys, lane, e.evicted_row), key, size_t(row_bytes(e.keys)));
    memcpy(bytes_of(e.evicted_values, lane, e.evicted_row), value, size_t(row_bytes(e.values)));
    copy_number<int32_t>(e.slots, place, e.evicted_slots, lane);
    copy_number<float>(e.scores, place, e.evicted_scores, lane);
    copy_number<float>(e.extra, place, e.evicted_extra, lane);
    copy_number<int32_t>(e.newest, place, e.evicted_newest, lane);
  }
  memcpy(key, new_key, size_t(row_bytes(e.keys)));
  memcpy(value, new_value, size_t(row_bytes(e.values)));
  const float* new_scores = numbers<float>(e.new_scores);
  if (e.slots.data) numbers<int32_t>(e.slots)[place] = int32_t(e.new_slot);
  if (e.scores.data) numbers<float>(e.scores)[place] = new_scores ? new_scores[lane] : 0.0f;
  if (e.extra.data) { numbers<float>(e.extra)[place] = 0.0f; numbers<int32_t>(e.newest)[place] = 0; }
}

static KvStatus insert(const KvInsert* e, KvArray new_keys, KvArray new_values) {
  for (int64_t lane = 0; lane < e->keys.lanes; lane++)
    insert_in_lane(*e, lane, (const char*)new_keys.data + lane * row_bytes(e->keys),
                   (const char*)new_values.data + lane * row_bytes(e->values));
  return KV_DONE;
}

}  // namespace
