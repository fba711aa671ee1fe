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
  if (!e.ranks) return e.column;
  const int64_t first = lane * e.columns;
  const int32_t* slots = e.slots + first;
  const bool oldest_first = e.oldest_first != 0;
  return e.integer_ranks ? lowest_column((const int32_t*)e.ranks + first, slots, e.columns, oldest_first)
                         : lowest_column((const float*)e.ranks + first, slots, e.columns, oldest_first);
}

static void insert_in_lane(const KvInsert& e, int64_t lane, const char* new_key, const char* new_value) {
  const int64_t column = column_for_entry(e, lane), place = lane * e.columns + column;
  char* key = e.keys + lane * e.key_lane_bytes + column * e.key_bytes;
  char* value = e.values + lane * e.value_lane_bytes + column * e.value_bytes;
  if (e.evicted_keys) {
    memcpy(e.evicted_keys + lane * e.evicted_key_lane_bytes, key, size_t(e.key_bytes));
    memcpy(e.evicted_values + lane * e.evicted_value_lane_bytes, value, size_t(e.value_bytes));
    if (e.evicted_slots) e.evicted_slots[lane] = e.slots[place];
    if (e.evicted_scores) e.evicted_scores[lane] = e.scores[place];
    if (e.evicted_extra) e.evicted_extra[lane] = e.extra[place];
    if (e.evicted_newest) e.evicted_newest[lane] = e.newest[place];
  }
  memcpy(key, new_key, size_t(e.key_bytes));
  memcpy(value, new_value, size_t(e.value_bytes));
  if (e.slots) e.slots[place] = int32_t(e.new_slot);
  if (e.scores) e.scores[place] = e.new_scores ? e.new_scores[lane] : 0.0f;
  if (e.extra) { e.extra[place] = 0.0f; e.newest[place] = 0; }
}

static void insert(const KvInsert* e, int64_t lanes, const char* new_keys, const char* new_values) {
  for (int64_t lane = 0; lane < lanes; lane++)
    insert_in_lane(*e, lane, new_keys + lane * e->key_bytes, new_values + lane * e->value_bytes);
}

}  // namespace
