// A new entry of each lane, and the column that it takes: the step of every decoded token.
#pragma once

#include "kvkeep.h"
#include "simd.h"

namespace {

// The column of the least rank, an empty one (slot -1) before all others; of those that rank the same the oldest, or
// without `oldest` the first.
template <class T> static int64_t lowest_column(const T* ranks, const int32_t* slots, int64_t columns, bool oldest) {
  int64_t found = 0;
  for (int64_t i = 0; i < columns; i++) {
    if (slots[i] < 0) return i;
    if (ranks[i] < ranks[found] || (oldest && ranks[i] == ranks[found] && slots[i] < slots[found])) found = i;
  }
  return found;
}

static int64_t column_for_entry(const KvInsert& e, int64_t lane) {
  if (!e.ranks) return e.column;
  const int64_t first = lane * e.columns;
  const int32_t* slots = e.slots + first;
  return e.integer_ranks ? lowest_column((const int32_t*)e.ranks + first, slots, e.columns, e.oldest_first != 0)
                 : lowest_column((const float*)e.ranks + first, slots, e.columns, e.oldest_first != 0);
}

static void insert_in_lane(const KvInsert& e, int64_t lane, const char* new_key, const char* new_value) {
  const int64_t column = column_for_entry(e, lane), at = lane * e.columns + column;
  char* key = e.keys + lane * e.key_lane_bytes + column * e.key_bytes;
  char* value = e.values + lane * e.value_lane_bytes + column * e.value_bytes;
  if (e.evicted_keys) {
    memcpy(e.evicted_keys + lane * e.evicted_key_lane_bytes, key, size_t(e.key_bytes));
    memcpy(e.evicted_values + lane * e.evicted_value_lane_bytes, value, size_t(e.value_bytes));
    if (e.evicted_slots) e.evicted_slots[lane] = e.slots[at];
    if (e.evicted_scores) e.evicted_scores[lane] = e.scores[at];
    if (e.evicted_extra) e.evicted_extra[lane] = e.extra[at];
    if (e.evicted_newest) e.evicted_newest[lane] = e.newest[at];
  }
  memcpy(key, new_key, size_t(e.key_bytes));
  memcpy(value, new_value, size_t(e.value_bytes));
  if (e.slots) e.slots[at] = int32_t(e.new_slot);
  if (e.scores) e.scores[at] = e.new_scores ? e.new_scores[lane] : 0.0f;
  if (e.extra) { e.extra[at] = 0.0f; e.newest[at] = 0; }
}

static void insert(const KvInsert* e, int64_t lanes, const char* new_keys, const char* new_values) {
  for (int64_t lane = 0; lane < lanes; lane++)
    insert_in_lane(*e, lane, new_keys + lane * e->key_bytes, new_values + lane * e->value_bytes);
}

}  // namespace
