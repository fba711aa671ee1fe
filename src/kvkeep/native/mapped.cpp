// Files that are mapped into memory, whose disk may fail: a read that the disk refuses, or a file that was cut short,
// is noted and does not end the process.
//
// The system reports such a read by SIGBUS in the thread that reads. The handler looks for the address among the
// mapped files. If it is there, the handler puts zeros in the place of the whole file, notes that its content is lost,
// and lets the thread read on; whoever attended to it asks afterwards. Any other SIGBUS goes to the handler before this
// one.

#include <atomic>
#include <mutex>

#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

#include "checks.h"
#include "numbers.h"
#include "runtime.h"

namespace {

constexpr int64_t FILES = 1 << 16;  // Linux maps at most 65,530 regions of a process

struct File {
  std::atomic<uintptr_t> start;  // 0: this place is free
  std::atomic<size_t> bytes;
  std::atomic<int> lost;
};

File files[FILES];  // read by the handler, which takes no lock
std::atomic<int64_t> used{0};  // places that were ever in use
std::atomic<int64_t> lost_files{0};
std::mutex changes;
struct sigaction before;
std::atomic<bool> passed_on{false};

File* file_of(uintptr_t address) {
  for (int64_t i = 0; i < used.load(); ++i) {
    const uintptr_t start = files[i].start.load();
    if (start && start <= address && address - start < files[i].bytes.load()) return &files[i];
  }
  return nullptr;
}

void on_bus_error(int number, siginfo_t* info, void* context) {
  File* file = info->si_code > 0 ? file_of((uintptr_t)info->si_addr) : nullptr;
  if (file) {
    void* start = (void*)file->start.load();
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (!file->lost.exchange(1)) lost_files.fetch_add(1);  // before another thread can read the zeros
    if (mmap(start, file->bytes.load(), PROT_READ | PROT_WRITE, flags, -1, 0) == start) return;
  }
  const bool again = passed_on.exchange(true);  // the other handler may lead back here
  if (!again && before.sa_flags & SA_SIGINFO) before.sa_sigaction(number, info, context);
  else if (!again && before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) before.sa_handler(number);
  else {
    signal(SIGBUS, SIG_DFL);
    if (info->si_code <= 0) raise(SIGBUS);  // sent by a process; a read is repeated, and ends this one
  }
  if (!again) passed_on.store(false);
}

// Installs the handler, also where another library has installed its own since.
bool handle() {
  struct sigaction action = {}, present = {};
  if (sigaction(SIGBUS, nullptr, &present)) return false;
  if (present.sa_flags & SA_SIGINFO && present.sa_sigaction == on_bus_error) return true;
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigemptyset(&action.sa_mask);
  before = present;
  return !sigaction(SIGBUS, &action, nullptr);
}

constexpr int64_t COLUMNS = 8;

uint64_t digest_of(const char* words, int64_t count) {
  uint64_t sums[COLUMNS] = {}, sums_of_sums[COLUMNS] = {};
  for (int64_t i = 0; i + COLUMNS <= count; i += COLUMNS) {
    uint64_t row[COLUMNS];  // rows of odd widths are not aligned
    memcpy(row, words + i * sizeof(uint64_t), sizeof(row));
    for (int64_t j = 0; j < COLUMNS; ++j) {
      sums[j] += row[j];
      sums_of_sums[j] += sums[j];
    }
  }
  for (int64_t i = count / COLUMNS * COLUMNS; i < count; ++i) {
    uint64_t word;
    memcpy(&word, words + i * sizeof(uint64_t), sizeof(word));
    sums[i % COLUMNS] += word;
    sums_of_sums[i % COLUMNS] += sums[i % COLUMNS];
  }
  uint64_t digest = 0;
  for (int64_t j = 0; j < COLUMNS; ++j) {
    digest = (digest ^ sums[j]) * 0x9e3779b97f4a7c15u;
    digest = (digest ^ digest >> 29 ^ sums_of_sums[j]) * 0xbf58476d1ce4e5b9u;
  }
  return digest;
}

// A child of fork has a mutex that another thread of the parent may have locked.
__attribute__((constructor)) void watch_forks() {
  pthread_atfork([] { changes.lock(); }, [] { changes.unlock(); }, [] { changes.unlock(); });
}

}  // namespace

void* kvkeep_map_file(int descriptor, int64_t bytes) {
  std::lock_guard<std::mutex> lock(changes);
  int64_t place = 0;
  while (place < used.load() && files[place].start.load()) ++place;
  if (place == FILES || !handle()) return nullptr;
  void* start = mmap(nullptr, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (start == MAP_FAILED) return nullptr;
  files[place].bytes.store((size_t)bytes);
  files[place].lost.store(0);
  files[place].start.store((uintptr_t)start);
  if (place == used.load()) used.store(place + 1);
  return start;
}

void kvkeep_unmap_file(void* start) {
  std::lock_guard<std::mutex> lock(changes);
  for (int64_t i = 0; i < used.load(); ++i) {
    if (files[i].start.load() == (uintptr_t)start) {
      files[i].start.store(0);  // first: another mapping may get this address at once
      munmap(start, files[i].bytes.load());
      return;
    }
  }
}

int64_t kvkeep_lost_files(void) { return lost_files.load(); }

int kvkeep_is_lost(const void* address) {
  const File* file = file_of((uintptr_t)address);
  return file && file->lost.load();
}

KvStatus kvkeep_digests(const KvRows* rows, int64_t first, int64_t blocks, int64_t block_rows, KvArray digests) {
  if (!blocks_fit(*rows, first, blocks, block_rows, digests)) return KV_BAD_CALL;
  const int64_t size = size_of(rows->numbers.type), block_bytes = block_rows * rows->row_stride * size;
  parallel_for(rows->lanes * blocks, [&](int64_t task) {
    const char* lane = numbers<char>(rows->numbers) + task / blocks * rows->lane_stride * size;
    numbers<uint64_t>(digests)[task] =
        digest_of(lane + (first + task % blocks) * block_bytes, block_bytes / int64_t(sizeof(uint64_t)));
  });
  return KV_DONE;
}
