// Threads and scratch memory of the kernels.
//
// A decoded token is some two hundred loops of a few microseconds each. To begin and end a parallel region for every
// one costs as much as the loop itself, and far more where the runtime puts its threads to sleep in between, as it does
// once a process has more of them than processors. So a call opens one region for all of its loops (a Team): the thread
// that called runs the program, and the others help with the tasks of whatever loop it is in. Whoever is free takes the
// next task: a helper that the system has put aside delays nobody unless it has begun one.
//
// Regions run in the OpenMP threads that torch has (two OpenMP runtimes would fight for the same cores), else in
// threads of the library. What a task computes depends on its number alone, so the number of threads changes no bit.

#include <atomic>
#include <condition_variable>
#include <mutex>

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "kvkeep.h"
#include "rounding.h"
#include "runtime.h"

namespace {

typedef void (*Region)(void* data);

// ---- threads of the library -----------------------------------------------------------------------------------------

class Pool {  // never destroyed: its threads end with the process
  std::mutex mutex, busy;
  std::condition_variable begun, ended;
  Region region = nullptr;
  void* data = nullptr;
  int started = 0, wanted = 0, working = 0;
  uint64_t number = 0;

  void serve(int me) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      begun.wait(lock, [&] { return number != seen; });
      seen = number;
      if (me >= wanted) continue;
      lock.unlock();
      region(data);
      lock.lock();
      if (!--working) ended.notify_one();
    }
  }
  void start() {  // under the mutex
    for (; started < wanted; started++) {
      Helper* helper = (Helper*)malloc(sizeof(Helper));
      pthread_t thread;
      if (!helper) break;
      *helper = {this, started};
      if (pthread_create(&thread, nullptr, help, helper)) {  // no more threads are allowed: work with those that exist
        free(helper);
        break;
      }
      pthread_detach(thread);
    }
    wanted = working = started < wanted ? started : wanted;
  }
  struct Helper { Pool* pool; int number; };
  static void* help(void* data) {
    const Helper helper = *(Helper*)data;
    free(data);
    helper.pool->serve(helper.number);
    return nullptr;
  }

 public:
  // Runs region(data) in the calling thread and in `helpers` others; in the calling thread only where they are taken.
  void run(Region call, void* with, int helpers) {
    std::unique_lock<std::mutex> taken(busy, std::try_to_lock);
    if (!taken.owns_lock()) { call(with); return; }
    std::unique_lock<std::mutex> lock(mutex);
    region = call; data = with; wanted = working = helpers; number++;
    start();
    lock.unlock();
    begun.notify_all();
    call(with);
    lock.lock();
    ended.wait(lock, [&] { return !working; });
  }
};

// ---- where regions run ----------------------------------------------------------------------------------------------

typedef void (*GompParallel)(Region region, void* data, unsigned threads, unsigned flags);
typedef int (*GompThreads)();

GompParallel gomp_parallel = nullptr;
GompThreads gomp_threads = nullptr;
std::atomic<int> pool_threads{1};
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
  Pool* found = pool.load(std::memory_order_acquire);
  if (found) return *found;
  Pool* made = new Pool;
  if (pool.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return *made;
  delete made;
  return *found;
}

// A child of fork has one thread. OpenMP's runtime and the pool believe that they have theirs still, and would wait for
// them: the child gets a pool of its own, and leaves the old one as it was.
void forget_threads() {
  gomp_parallel = nullptr;
  pool.store(nullptr, std::memory_order_release);
}

void open_region(Region region, void* data, int threads) {
  if (gomp_parallel) gomp_parallel(region, data, unsigned(threads), 0);
  else the_pool().run(region, data, threads - 1);
}

// ---- loops ----------------------------------------------------------------------------------------------------------

class Team {
  static constexpr uint64_t LOW = 0xffffffff, END = ~uint64_t(0);
  std::atomic<uint64_t> state{0};  // how many tasks the loop has (high), and how many were taken (low)
  std::atomic<int64_t> undone{0};
  KvTask task = nullptr;
  const void* context = nullptr;

  bool take() {  // a task of the loop under way, if one is left; until it is done, no other loop begins
    uint64_t now = state.load(std::memory_order_acquire);
    if (now == END || (now & LOW) >= now >> 32) return false;
    if (state.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) {
      task(context, int64_t(now & LOW));
      undone.fetch_sub(1, std::memory_order_release);
    }
    return true;
  }
  static void wait(int& turns) {  // some 20 microseconds, then whoever else wants the processor goes first
    if (++turns > 500) { sched_yield(); return; }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
  }

 public:
  void loop(int64_t count, KvTask run, const void* with) {
    task = run;
    context = with;
    undone.store(count, std::memory_order_relaxed);
    state.store(uint64_t(count) << 32, std::memory_order_release);
    while (take()) {}
    for (int turns = 0; undone.load(std::memory_order_acquire);) wait(turns);
  }
  void help() {
    for (int turns = 0; state.load(std::memory_order_acquire) != END;) if (take()) turns = 0; else wait(turns);
  }
  void end() { state.store(END, std::memory_order_release); }
};

thread_local Team* team = nullptr;  // of the call that this thread runs
thread_local bool in_task = false;  // loops within a task are this thread's alone

struct Tasks {  // of a loop with a region of its own
  int64_t count;
  KvTask task;
  const void* context;
  std::atomic<int64_t> taken{0};
};

void run_tasks(void* data) {
  Rounding nearest;
  Tasks& tasks = *(Tasks*)data;
  const bool nested = in_task;
  in_task = true;
  for (int64_t task; (task = tasks.taken.fetch_add(1, std::memory_order_relaxed)) < tasks.count;)
    tasks.task(tasks.context, task);
  in_task = nested;
}

struct TeamCall {
  KvTask call;
  const void* context;
  const void* caller;  // an address that is this thread's alone
  Team team;
};

void run_team(void* data) {
  Rounding nearest;
  TeamCall& all = *(TeamCall*)data;
  if (&team == all.caller) {
    team = &all.team;
    all.call(all.context, 0);
    team = nullptr;
    all.team.end();
    return;
  }
  in_task = true;
  all.team.help();
  in_task = false;
}

// ---- scratch --------------------------------------------------------------------------------------------------------

struct Scratch {
  void* data[KV_SCRATCH_COUNT] = {};
  size_t size[KV_SCRATCH_COUNT] = {};
  ~Scratch() { for (void* one : data) free(one); }
};
thread_local Scratch scratch;

}  // namespace

extern "C" {

void kv_loop(int64_t count, KvTask task, const void* context) {
  int threads;
  if (count > 1 && !in_task && (team || (threads = kv_threads()) > 1)) {
    if (team) {
      Team* mine = team;
      in_task = true;  // while this thread takes part
      mine->loop(count, task, context);
      in_task = false;
      return;
    }
    Tasks tasks{count, task, context};
    open_region(run_tasks, &tasks, count < threads ? int(count) : threads);
    return;
  }
  for (int64_t number = 0; number < count; number++) task(context, number);
}

void kv_with_team(KvTask call, const void* context) {
  const int threads = kv_threads();
  if (team || in_task || threads < 2) { call(context, 0); return; }
  TeamCall all{call, context, &team};
  open_region(run_team, &all, threads);
}

int kv_threads(void) { return gomp_threads ? gomp_threads() : pool_threads.load(std::memory_order_relaxed); }

void* kv_scratch(int which, size_t bytes) {
  if (scratch.size[which] >= bytes) return scratch.data[which];
  free(scratch.data[which]);
  const size_t wanted = (bytes + bytes / 8 + 4095) / 4096 * 4096;  // some more: attention grows with every token
  scratch.size[which] = 0;
  if (posix_memalign(&scratch.data[which], 64, wanted)) {
    fprintf(stderr, "kvkeep: there is no memory for %zu bytes that a kernel needs.\n", wanted);
    abort();
  }
  scratch.size[which] = wanted;
  return scratch.data[which];
}

void kvkeep_use_openmp(void* parallel, void* max_threads) {
  gomp_parallel = (GompParallel)parallel;
  gomp_threads = (GompThreads)max_threads;
}

void kvkeep_set_threads(int count) {
  pool_threads.store(count < 1 ? 1 : count, std::memory_order_relaxed);
}

}  // extern "C"

__attribute__((constructor)) static void watch_forks() { pthread_atfork(nullptr, nullptr, forget_threads); }
