// The step of every decoded token: a new entry takes the place of the lowest-ranked one, in every lane.

#include "common.h"

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

extern "C" {

// ranks, slots, scores, extra, newest: (lanes, columns); those of new entries: (lanes). keys, values: rows of so many
// bytes, a lane's `.._lane` bytes apart. left: what was there, copied, by lane; null: nobody wants it. Null as well:
// scores, where nothing has any; new scores, where they are 0; extra and newest, where nothing was merged.
void kk_replace(const void* ranks, int whole, int oldest, int64_t lanes, int64_t columns, char* keys, int64_t key_lane,
                int64_t key_bytes, char* values, int64_t value_lane, int64_t value_bytes, int32_t* slots, float* scores,
                float* extra, int32_t* newest, const char* new_keys, const char* new_values, int32_t slot,
                const float* new_scores, char* left_keys, char* left_values, int32_t* left_slots, float* left_scores,
                float* left_extra, int32_t* left_newest) {
  for (int64_t lane = 0; lane < lanes; lane++) {
    int64_t first = lane * columns;
    int64_t at = whole ? lowest((const int32_t*)ranks + first, slots + first, columns, oldest)
                       : lowest((const float*)ranks + first, slots + first, columns, oldest);
    char *key = keys + lane * key_lane + at * key_bytes, *value = values + lane * value_lane + at * value_bytes;
    at += first;
    if (left_keys) {
      memcpy(left_keys + lane * key_bytes, key, key_bytes);
      memcpy(left_values + lane * value_bytes, value, value_bytes);
      left_slots[lane] = slots[at];
      if (left_scores) left_scores[lane] = scores[at];
      if (left_extra) left_extra[lane] = extra[at];
      if (left_newest) left_newest[lane] = newest[at];
    }
    memcpy(key, new_keys + lane * key_bytes, key_bytes);
    memcpy(value, new_values + lane * value_bytes, value_bytes);
    slots[at] = slot;
    if (scores) scores[at] = new_scores ? new_scores[lane] : 0.f;
    if (extra) { extra[at] = 0.f; newest[at] = 0; }
  }
}

}  // extern "C"
