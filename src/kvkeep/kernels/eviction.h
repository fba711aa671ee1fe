// A new entry of each lane, and the column that it takes: the step of every decoded token.

#pragma once

#include "common.h"

// ranks, slots, scores, extra, newest: (lanes, columns). The column is that of the least rank; without ranks it is `at`.
// keys, values: rows of so many bytes, a lane's `.._lane` bytes apart. left: where what was there is copied to; null:
// nobody wants it. Null as well: slots, where lanes are in order; scores, where nothing has any; new scores, where they
// are 0; extra and newest, where nothing was merged.
struct Entering {
  const void* ranks;
  int64_t whole, oldest, columns, at, slot;  // whole: ranks are int32, else float32; slot: of the new entry
  char *keys, *values;
  int64_t key_lane, key_bytes, value_lane, value_bytes;
  int32_t* slots;
  float *scores, *extra;
  int32_t* newest;
  const float* new_scores;
  char *left_keys, *left_values;
  int64_t left_key_lane, left_value_lane;
  int32_t* left_slots;
  float *left_scores, *left_extra;
  int32_t* left_newest;
};

// The column of the least rank, an empty one (slot -1) before all others; of those that rank the same the oldest, or
// without `oldest` the first.
template <class T> static int64_t lowest(const T* ranks, const int32_t* slots, int64_t columns, bool oldest) {
  int64_t found = 0;
  for (int64_t i = 0; i < columns; i++) {
    if (slots[i] < 0) return i;
    if (ranks[i] < ranks[found] || (oldest && ranks[i] == ranks[found] && slots[i] < slots[found])) found = i;
  }
  return found;
}

static inline void enter(const Entering& e, int64_t lane, const char* new_key, const char* new_value) {
  int64_t first = lane * e.columns, at = e.at;
  if (e.ranks)
    at = e.whole ? lowest((const int32_t*)e.ranks + first, e.slots + first, e.columns, e.oldest)
                 : lowest((const float*)e.ranks + first, e.slots + first, e.columns, e.oldest);
  char *key = e.keys + lane * e.key_lane + at * e.key_bytes, *value = e.values + lane * e.value_lane + at * e.value_bytes;
  at += first;
  if (e.left_keys) {
    memcpy(e.left_keys + lane * e.left_key_lane, key, e.key_bytes);
    memcpy(e.left_values + lane * e.left_value_lane, value, e.value_bytes);
    if (e.left_slots) e.left_slots[lane] = e.slots[at];
    if (e.left_scores) e.left_scores[lane] = e.scores[at];
    if (e.left_extra) e.left_extra[lane] = e.extra[at];
    if (e.left_newest) e.left_newest[lane] = e.newest[at];
  }
  memcpy(key, new_key, e.key_bytes);
  memcpy(value, new_value, e.value_bytes);
  if (e.slots) e.slots[at] = int32_t(e.slot);
  if (e.scores) e.scores[at] = e.new_scores ? e.new_scores[lane] : 0.f;
  if (e.extra) { e.extra[at] = 0.f; e.newest[at] = 0; }
}
