#include "pool.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sched.h>

namespace pool {
namespace {

constexpr int kSpinMicroseconds = 50;

// The gate of one task: seats left for workers (upper half), workers inside (lower half), and whether it is shut.
// A worker that wakes late finds it shut and is never waited for.
constexpr uint32_t kShut = 1u << 31, kSeat = 1u << 16, kInside = 1u;

thread_local bool inside = false;  // this thread runs a task: nested calls are serial

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Team {
 public:

  void run(int64_t count, int64_t chunk, int threads, bool ahead, Body body, void* context) {
    while (static_cast<int>(workers_.size()) < threads - 1) workers_.emplace_back([this] { work(); });
    body_ = body, context_ = context, count_ = count, chunk_ = chunk, ahead_ = ahead;
    next_.store(0, std::memory_order_relaxed);
    gate_.store(kSeat * static_cast<uint32_t>(threads - 1), std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst)) generation_.notify_all();
    claim();
    gate_.fetch_or(kShut, std::memory_order_acq_rel);
    for (int n = 0; gate_.load(std::memory_order_acquire) & (kSeat - 1); ++n) {
      if (n < 1000) relax(); else sched_yield();
    }
  }

 private:
  void claim() {
    auto take = [&] { return next_.fetch_add(chunk_, std::memory_order_relaxed); };
    auto bounded = [&](int64_t i) { return i < count_ ? i : count_; };
    for (int64_t begin = take(), next; begin < count_; begin = next) {
      if (ahead_) next = take();
      body_(context_, begin, bounded(begin + chunk_), ahead_ ? bounded(next) : count_);
      if (!ahead_) next = take();
    }
  }

  // Takes a seat of the current task, if it is open and has one left.
  bool enter() {
    uint32_t gate = gate_.load(std::memory_order_acquire);
    while (!(gate & kShut) && gate >= kSeat) {
      if (gate_.compare_exchange_weak(gate, gate - kSeat + kInside, std::memory_order_acq_rel)) return true;
    }
    return false;
  }

  // Looks for a newer task for a while, then sleeps until there is one.
  void await(uint32_t seen) {
    using clock = std::chrono::steady_clock;
    auto until = clock::now() + std::chrono::microseconds(kSpinMicroseconds);
    for (int n = 1; generation_.load(std::memory_order_acquire) == seen; ++n) {
      relax();
      if (n % 64) continue;
      sched_yield();
      if (clock::now() < until) continue;
      asleep_.fetch_add(1, std::memory_order_seq_cst);
      generation_.wait(seen, std::memory_order_seq_cst);
      asleep_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  void work() {
    inside = true;
    uint32_t seen = 0;
    for (;;) {
      await(seen);
      seen = generation_.load(std::memory_order_acquire);
      if (!enter()) continue;
      claim();
      gate_.fetch_sub(kInside, std::memory_order_release);
    }
  }

  std::vector<std::thread> workers_;
  Body body_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0, chunk_ = 1;
  bool ahead_ = false;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> gate_{kShut};
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<int> asleep_{0};
};

// Leaked on purpose: at exit the workers sleep, and joining them from a static destructor can hang a process that is being torn down.
std::mutex* busy = new std::mutex;
Team* team = nullptr;

// A forked child has none of the workers: it starts afresh.
void after_fork() {
  busy = new std::mutex;
  team = nullptr;
}

}  // namespace

void run(int64_t count, int64_t chunk, int threads, bool ahead, Body body, void* context) {
  if (count <= 0) return;
  if (threads <= 1 || count <= chunk || inside || !busy->try_lock()) {
    body(context, 0, count, count);
    return;
  }
  std::lock_guard<std::mutex> hold(*busy, std::adopt_lock);
  if (!team) {
    pthread_atfork(nullptr, nullptr, after_fork);
    team = new Team;
  }
  struct Inside {
    Inside() { inside = true; }
    ~Inside() { inside = false; }
  } while_it_runs;  // a thread that cannot be started throws
  team->run(count, chunk, threads, ahead, body, context);
}

}  // namespace pool
