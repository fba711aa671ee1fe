// What kernels need of the process: threads and scratch memory. Compiled once, for all instruction sets (threads.cpp).
#pragma once

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)
extern "C" {

typedef void (*KvTask)(const void* context, int64_t task);

// Runs tasks 0 .. count - 1, in any order and in any of the threads; returns when all are done.
void kv_parallel_for(int64_t count, KvTask task, const void* context);
// Runs call(context, 0) with a team of all threads for its loops: a loop of microseconds takes less time than it takes
// to start threads for it.
void kv_with_team(KvTask call, const void* context);
// Returns how many threads work on a loop.
int kv_threads(void);

// Scratch memory of a thread. Every thread that works on a call has the kinds before KV_SCRATCH_CALLER, the calling
// thread has all of them.
enum KvScratch {
  KV_SCRATCH_KEYS,    // a tile of keys
  KV_SCRATCH_VALUES,  // a tile of values
  KV_SCRATCH_SCORES,  // scores, mixes and queries of some rows
  KV_SCRATCH_MIXES,   // mixes of rows before they are combined
  KV_SCRATCH_ROWS,    // entries that are decoded on their way to a tile
  KV_SCRATCH_CALLER,
  KV_SCRATCH_INPUTS = KV_SCRATCH_CALLER,  // inputs of a product, rounded to 8 bits
  KV_SCRATCH_FLOATS,                      // inputs of a product with bfloat16 weights
  KV_SCRATCH_BLOCKS,                      // mixes of the blocks of rows before they are combined
  KV_SCRATCH_TASKS,                       // tasks of attention
  KV_SCRATCH_JOBS,                        // attentions of several sessions
  KV_SCRATCH_LAYER,                       // what lies between the products of a layer
  KV_SCRATCH_COUNT
};
struct KvNeeds {  // the most that a call needs of each kind, in bytes
  size_t bytes[KV_SCRATCH_COUNT];
};
// Takes scratch memory for a call of this thread; returns whether there is enough. A call asks before it writes
// anything, so one that fails has changed nothing. Threads that find no memory for their own do not help with it.
bool kv_reserve(const KvNeeds* needs);
// Returns scratch memory of this thread, aligned to 64 bytes; null where a kernel wants more than was reserved, which
// is an error in it.
void* kv_scratch(KvScratch kind, size_t bytes);
// Returns whether a kernel wanted more since the last call of this function.
bool kv_exceeded(void);

}  // extern "C"
#pragma GCC visibility pop

namespace {

constexpr int64_t MAX_DIRECT_ROWS = 16;  // of a call whose loops take microseconds: they need a team

// Collects what a call needs.
struct Needs : KvNeeds {
  Needs() : KvNeeds{} {}
  void add(KvScratch kind, int64_t wanted) {
    if (size_t(wanted) > bytes[kind]) bytes[kind] = size_t(wanted);
  }
  bool reserve() const { return kv_reserve(this); }
};

template <class F> inline void parallel_for(int64_t count, const F& body) {
  kv_parallel_for(count, [](const void* context, int64_t task) { (*(const F*)context)(task); }, &body);
}
template <class F> inline void with_team(bool wanted, const F& call) {
  if (wanted) kv_with_team([](const void* context, int64_t) { (*(const F*)context)(); }, &call);
  else call();
}
// Runs body(row) of all rows by all threads; a few rows of a call that has no team by one, which is faster.
template <class F> inline void for_each_row(int64_t rows, const F& body, bool has_team = true) {
  const int64_t task_rows = has_team && rows <= MAX_DIRECT_ROWS ? 1 : MAX_DIRECT_ROWS;
  parallel_for((rows + task_rows - 1) / task_rows, [&](int64_t task) {
    for (int64_t r = task * task_rows; r < rows && r < (task + 1) * task_rows; r++) body(r);
  });
}

}  // namespace
