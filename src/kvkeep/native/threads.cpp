// Threads and scratch memory of the kernels.
//
// A decoded token takes about two hundred loops of a few microseconds each. To begin and end a parallel region for each
// of them costs as much as the loop, and far more if the runtime puts its threads to sleep in between, which it does
// once a process has more of them than processors. So a call opens one region for all of its loops (a Team): the
// calling thread runs the program, and the others help with the tasks of its current loop. Each thread takes the next
// task when it has finished one: a helper that the system has suspended delays the loop only if it has begun a task.
//
// Regions run in torch's OpenMP threads, because two OpenMP runtimes would compete for the same cores; without them, in
// the library's threads. What a task computes depends only on its number, so the number of threads changes no bit.

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include "kvkeep.h"
#include "float_mode.h"
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

  void serve(int helper) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      begun.wait(lock, [&] { return number != seen; });
      seen = number;
      if (helper >= wanted) continue;
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
      if (pthread_create(&thread, nullptr, help, helper)) {  // no more threads are allowed: use those that exist
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
  // Runs call(with) in the calling thread and in `helpers` others; only in the calling thread while they are busy.
  void run(Region call, void* with, int helpers) {
    std::unique_lock<std::mutex> turn(busy, std::try_to_lock);
    if (!turn.owns_lock()) { call(with); return; }
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

struct Regions {
  GompParallel gomp_parallel = nullptr;  // of torch's OpenMP runtime; null: the pool
  GompThreads gomp_threads = nullptr;
  std::atomic<int> pool_threads{1};
  std::atomic<Pool*> pool{nullptr};  // made when it is first needed

  int threads() const { return gomp_threads ? gomp_threads() : pool_threads.load(std::memory_order_relaxed); }

  // Runs region(data) in `threads` threads, the calling one among them.
  void open(Region region, void* data, int threads) {
    if (gomp_parallel) gomp_parallel(region, data, unsigned(threads), 0);
    else if (Pool* shared = shared_pool()) shared->run(region, data, threads - 1);
    else region(data);  // there is no memory for other threads
  }

  // A child of fork has one thread. OpenMP's runtime and the pool would wait forever for threads that only the parent
  // has: the child gets a new pool, and does not touch the old one.
  void forget_threads() {
    gomp_parallel = nullptr;
    pool.store(nullptr, std::memory_order_release);
  }

 private:
  Pool* shared_pool() {
    Pool* found = pool.load(std::memory_order_acquire);
    if (found) return found;
    Pool* made = new (std::nothrow) Pool;
    if (!made || pool.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return made;
    delete made;
    return found;
  }
};
Regions regions;

// ---- loops ----------------------------------------------------------------------------------------------------------

class Team {
  static constexpr uint64_t LOW = 0xffffffff, END = ~uint64_t(0);
  std::atomic<uint64_t> state{0};  // high half: the tasks of the loop; low half: how many have begun
  std::atomic<int64_t> pending{0};
  KvTask task = nullptr;
  const void* context = nullptr;

  // Runs a task of the current loop, if any remains; no other loop begins until it is done.
  bool take() {
    uint64_t now = state.load(std::memory_order_acquire);
    if (now == END || (now & LOW) >= now >> 32) return false;
    if (state.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) {
      task(context, int64_t(now & LOW));
      pending.fetch_sub(1, std::memory_order_release);
    }
    return true;
  }
  // Spins for about 20 microseconds, then yields the processor.
  static void wait(int& turns) {
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
    pending.store(count, std::memory_order_relaxed);
    state.store(uint64_t(count) << 32, std::memory_order_release);
    while (take()) {}
    for (int turns = 0; pending.load(std::memory_order_acquire);) wait(turns);
  }
  void help() {
    for (int turns = 0; state.load(std::memory_order_acquire) != END;) if (take()) turns = 0; else wait(turns);
  }
  void end() { state.store(END, std::memory_order_release); }
};

thread_local Team* team = nullptr;  // of the call that this thread runs
thread_local bool in_task = false;  // a loop within a task runs in this thread

// ---- scratch --------------------------------------------------------------------------------------------------------

struct Scratch {
  void* data[KV_SCRATCH_COUNT] = {};
  size_t size[KV_SCRATCH_COUNT] = {};
  KvNeeds needs{};  // of the call that this thread runs
  std::atomic<bool> exceeded{false};         // a kernel of that call wanted more than it had reserved
  std::atomic<bool>* of_caller = &exceeded;  // while this thread helps another one: that of its call

  // Has `kinds` kinds of scratch that a call needs; returns false where there is no memory for one.
  bool reserve(const KvNeeds& wanted, int kinds) {
    for (int kind = 0; kind < kinds; kind++)
      if (size[kind] < wanted.bytes[kind] && !grow(kind, wanted.bytes[kind])) return false;
    return true;
  }
  ~Scratch() { for (void* one : data) free(one); }

 private:
  bool grow(int kind, size_t wanted) {
    free(data[kind]);
    data[kind] = nullptr;
    size[kind] = 0;
    wanted = (wanted + wanted / 8 + 4095) / 4096 * 4096;  // an eighth more: attention grows with every token
    if (posix_memalign(&data[kind], 64, wanted)) {
      data[kind] = nullptr;
      return false;
    }
    size[kind] = wanted;
    return true;
  }
};
thread_local Scratch scratch;

// ---- regions --------------------------------------------------------------------------------------------------------

struct Tasks {  // of a loop that has a region
  int64_t count;
  KvTask task;
  const void* context;
  Scratch& caller;  // that of the calling thread
  std::atomic<int64_t> begun{0};
};

void run_tasks(void* data) {
  FloatMode mode;
  Tasks& tasks = *(Tasks*)data;
  if (&scratch != &tasks.caller && !scratch.reserve(tasks.caller.needs, KV_SCRATCH_CALLER)) return;
  std::atomic<bool>* const before = scratch.of_caller;
  scratch.of_caller = &tasks.caller.exceeded;
  const bool nested = in_task;
  in_task = true;
  for (int64_t task; (task = tasks.begun.fetch_add(1, std::memory_order_relaxed)) < tasks.count;)
    tasks.task(tasks.context, task);
  in_task = nested;
  scratch.of_caller = before;
}

struct TeamCall {
  KvTask call;
  const void* context;
  const void* caller;  // the address of `team` in the calling thread
  Scratch& scratch;    // that of the calling thread
  Team team{};
};

void run_team(void* data) {
  FloatMode mode;
  TeamCall& shared = *(TeamCall*)data;
  if (&team == shared.caller) {
    team = &shared.team;
    shared.call(shared.context, 0);
    team = nullptr;
    shared.team.end();
    return;
  }
  if (!scratch.reserve(shared.scratch.needs, KV_SCRATCH_CALLER)) return;
  scratch.of_caller = &shared.scratch.exceeded;
  in_task = true;
  shared.team.help();
  in_task = false;
  scratch.of_caller = &scratch.exceeded;
}

}  // namespace

extern "C" {

void kv_parallel_for(int64_t count, KvTask task, const void* context) {
  int threads;
  if (count > 1 && !in_task && (team || (threads = kv_threads()) > 1)) {
    if (team) {
      Team* current = team;
      in_task = true;  // while this thread takes part
      current->loop(count, task, context);
      in_task = false;
      return;
    }
    Tasks tasks{count, task, context, scratch};
    regions.open(run_tasks, &tasks, threads);  // all of them: OpenMP ends those that a region does not have
    return;
  }
  for (int64_t number = 0; number < count; number++) task(context, number);
}

void kv_with_team(KvTask call, const void* context) {
  const int threads = kv_threads();
  if (team || in_task || threads < 2) { call(context, 0); return; }
  TeamCall shared{call, context, &team, scratch};
  regions.open(run_team, &shared, threads);
}

int kv_threads(void) { return regions.threads(); }

bool kv_reserve(const KvNeeds* needs) {
  scratch.needs = *needs;
  return scratch.reserve(*needs, KV_SCRATCH_COUNT);
}

void* kv_scratch(KvScratch kind, size_t bytes) {
  if (scratch.size[kind] >= bytes) return scratch.data[kind];
  scratch.of_caller->store(true, std::memory_order_relaxed);
  return nullptr;
}

bool kv_exceeded(void) {
  return scratch.exceeded.load(std::memory_order_relaxed) && scratch.exceeded.exchange(false);
}

void kvkeep_use_openmp(void* parallel, void* max_threads) {
  regions.gomp_parallel = (GompParallel)parallel;
  regions.gomp_threads = (GompThreads)max_threads;
}

void kvkeep_set_threads(int count) { regions.pool_threads.store(count < 1 ? 1 : count, std::memory_order_relaxed); }

}  // extern "C"

__attribute__((constructor)) static void watch_forks() {
  pthread_atfork(nullptr, nullptr, [] { regions.forget_threads(); });
}
