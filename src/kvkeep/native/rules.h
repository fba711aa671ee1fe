// What the checks of calls share (checks.h): how a rule is stated, and arrays and rows that hold what a rule needs.
#pragma once

#include "checks.h"
#include "numbers.h"

#pragma GCC visibility push(hidden)
extern thread_local const char* broken_rule;

// Whether a step of a layer fits its tensors, and what the call shares (attention_checks.cpp).
struct Tokens {
  int64_t tokens, heads;
  KvArray query, key, value, out, lse;
};
bool step_fits(const KvStep& step, const Tokens& shared);
bool cap_fits(float cap);
#pragma GCC visibility pop

typedef __int128 Wide;  // products of sizes do not overflow it

#define RULE(holds, sentence)  \
  do {                         \
    if (!(holds)) {            \
      broken_rule = sentence;  \
      return false;            \
    }                          \
  } while (false)

namespace {

inline bool has(const KvArray& array) { return array.type != KV_NOTHING; }

// Whether there are `needed` numbers of a type; there may be more.
inline bool holds(const KvArray& array, int64_t type, Wide needed) {
  return array.type == type && needed >= 0 && needed <= array.length && array.length <= MAX_SIZE &&
         (array.data || !needed);
}
inline bool holds_or_nothing(const KvArray& array, int64_t type, Wide needed) {
  return has(array) ? holds(array, type, needed) : !array.data;
}

// Whether rows lie within their numbers.
inline bool lie_within(const KvRows& r) {
  if (!is_size(r.lanes) || !is_size(r.rows) || !is_size(r.width)) return false;
  if (!is_size(r.lane_stride) || !is_size(r.row_stride) || !size_of(r.numbers.type)) return false;
  const bool none = !r.lanes || !r.rows || !r.width;
  const Wide end = Wide(r.lanes - 1) * r.lane_stride + Wide(r.rows - 1) * r.row_stride + r.width;
  return holds(r.numbers, r.numbers.type, none ? 0 : end);
}
inline bool lie_within(const KvRows& r, int64_t type, int64_t width) {
  return r.numbers.type == type && r.width == width && lie_within(r);
}

// Whether there are rows of so many bfloat16 numbers.
inline bool is_rows_of(const KvArray& x, int64_t width) {
  return holds(x, KV_BFLOAT16, x.length) && x.length % width == 0;
}

}  // namespace
