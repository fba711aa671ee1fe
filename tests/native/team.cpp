// Runs loops and teams of the library's threads (threads.cpp) from several threads at once, and prints what is wrong:
// every task must run exactly once, with scratch memory of its own. `make sanitize` builds it with ThreadSanitizer.

#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "kvkeep.h"
#include "runtime.h"

namespace {

std::atomic<int> wrong{0};

void expect(bool holds, const char* rule) {
  if (!holds && !wrong.fetch_add(1)) printf("%s\n", rule);
}

// A loop, each of whose tasks fills the thread's scratch, and runs a loop of its own in between. Other threads may help
// with the inner loop where the outer one has a single task.
void loop(int64_t count) {
  std::vector<int> ran(size_t(count), 0);
  std::vector<std::atomic<int>> inner(static_cast<size_t>(count));
  parallel_for(count, [&](int64_t task) {
    int* scratch = (int*)kv_scratch(KV_SCRATCH_KEYS, 4096);
    expect(scratch, "a thread has no scratch");
    for (int i = 0; i < 1024; i++) scratch[i] = int(task);
    parallel_for(3, [&](int64_t) { inner[size_t(task)]++; });
    for (int i = 0; i < 1024; i++) expect(scratch[i] == int(task), "two tasks share scratch");
    ran[size_t(task)]++;
  });
  for (int64_t task = 0; task < count; task++)
    expect(ran[size_t(task)] == 1 && inner[size_t(task)] == 3, "a task did not run once");
}

void call(int turns) {
  Needs needs;
  needs.add(KV_SCRATCH_KEYS, 4096);
  expect(needs.reserve(), "there is no memory");
  for (int turn = 0; turn < turns; turn++) {
    loop(1 + turn % 70);
    with_team(true, [&] {
      for (int64_t count : {5, 1, 64, 2, 33}) loop(count);
    });
  }
}

}  // namespace

int main() {
  for (int threads : {1, 2, 4, 3}) {
    kvkeep_set_threads(threads);
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; i++) callers.emplace_back(call, 100);
    for (std::thread& one : callers) one.join();
  }
  expect(!kv_exceeded(), "a thread wanted more than was reserved");
  char* beyond = (char*)kv_scratch(KV_SCRATCH_KEYS, size_t(1) << 40);
  expect(!beyond && kv_exceeded() && !kv_exceeded(), "more than was reserved is not refused");
  return wrong.load() != 0;
}
