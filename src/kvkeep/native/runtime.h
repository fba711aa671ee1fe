// What kernels need of the process: threads and scratch memory. Compiled once, for every processor (threads.cpp).
#pragma once

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)
extern "C" {

typedef void (*KvTask)(const void* context, int64_t task);

// Runs all `count` tasks, in any order and by any thread at hand; returns when all are done.
void kv_loop(int64_t count, KvTask task, const void* context);
// Runs call(context, 0) with all threads at hand for its loops: of loops of microseconds, opening a region for each one
// would take longer than the loop.
void kv_with_team(KvTask call, const void* context);
// How many threads work on a loop.
int kv_threads(void);

// Scratch memory of a thread, kept between calls; whatever it held is lost when it grows. Aligned to 64 bytes.
enum KvScratch {
  KV_SCRATCH_INPUTS,    // inputs of a product in 8 bits
  KV_SCRATCH_FLOATS,    // inputs of a product with bfloat16 weights
  KV_SCRATCH_KEYS,      // keys of a block of entries, written out
  KV_SCRATCH_VALUES,    // its values
  KV_SCRATCH_SCORES,    // scores, weights and mix of a tile of queries
  KV_SCRATCH_MIXES,     // what is combined so far, of rows or of blocks
  KV_SCRATCH_ROWS,      // entries decoded on the way into a tile
  KV_SCRATCH_TASKS,     // tasks of an attention
  KV_SCRATCH_JOBS,      // attentions of many sessions
  KV_SCRATCH_LAYER,     // what lies between the products of a layer
  KV_SCRATCH_COUNT
};
void* kv_scratch(int which, size_t bytes);

}  // extern "C"
#pragma GCC visibility pop

namespace {

template <class F> inline void each(int64_t count, const F& body) {
  kv_loop(count, [](const void* context, int64_t task) { (*(const F*)context)(task); }, &body);
}
template <class F> inline void with_team(bool wanted, const F& call) {
  if (wanted) kv_with_team([](const void* context, int64_t) { (*(const F*)context)(); }, &call);
  else call();
}

}  // namespace
