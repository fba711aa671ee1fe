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
  if (!e.ranks) return e.at;
  const int64_t first = lane * e.columns;
  const int32_t* slots = e.slots + first;
  return e.whole ? lowest_column((const int32_t*)e.ranks + first, slots, e.columns, e.oldest != 0)
                 : lowest_column((const float*)e.ranks + first, slots, e.columns, e.oldest != 0);
}

static void insert_in_lane(const KvInsert& e, int64_t lane, const char* new_key, const char* new_value) {
  const int64_t column = column_for_entry(e, lane), at = lane * e.columns + column;
  char* key = e.keys + lane * e.key_lane + column * e.key_bytes;
  char* value = e.values + lane * e.value_lane + column * e.value_bytes;
  if (e.left_keys) {
    memcpy(e.left_keys + lane * e.left_key_lane, key, size_t(e.key_bytes));
    memcpy(e.left_values + lane * e.left_value_lane, value, size_t(e.value_bytes));
    if (e.left_slots) e.left_slots[lane] = e.slots[at];
    if (e.left_scores) e.left_scores[lane] = e.scores[at];
    if (e.left_extra) e.left_extra[lane] = e.extra[at];
    if (e.left_newest) e.left_newest[lane] = e.newest[at];
  }
  memcpy(key, new_key, size_t(e.key_bytes));
  memcpy(value, new_value, size_t(e.value_bytes));
  if (e.slots) e.slots[at] = int32_t(e.slot);
  if (e.scores) e.scores[at] = e.new_scores ? e.new_scores[lane] : 0.0f;
  if (e.extra) { e.extra[at] = 0.0f; e.newest[at] = 0; }
}

static void insert(const KvInsert* e, int64_t lanes, const char* new_keys, const char* new_values) {
  for (int64_t lane = 0; lane < lanes; lane++)
    insert_in_lane(*e, lane, new_keys + lane * e->key_bytes, new_values + lane * e->value_bytes);
}

}  // namespace
