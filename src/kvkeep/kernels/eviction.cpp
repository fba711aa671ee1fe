// A new entry takes the place of the lowest-ranked one, in every lane.

#include "eviction.h"

// new_keys, new_values: of the lanes, one behind the other.
extern "C" void kk_replace(const Entering* given, int64_t lanes, const char* new_keys, const char* new_values) {
  for (int64_t lane = 0; lane < lanes; lane++)
    enter(*given, lane, new_keys + lane * given->key_bytes, new_values + lane * given->value_bytes);
}
