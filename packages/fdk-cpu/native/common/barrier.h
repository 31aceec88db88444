// A barrier at which the members of a team (run_team) spin, and the work that they share.
//
// A decode step has five barriers a block, a few microseconds apart: waking a sleeping thread at
// each would take longer than the work between them.
#pragma once

#include <atomic>
#include <cstddef>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fdk {

// Tells the core that a loop spins.
static inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Barrier {
 public:
  // Waits until all members of the team wait, and starts the count of `take` again. Returns false
  // if one has failed: the others must return too.
  bool wait(std::size_t members) {
    const unsigned seen = generation_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      generation_.store(seen + 1, std::memory_order_release);
    } else {
      for (int i = 0; generation_.load(std::memory_order_acquire) == seen; i++) {
        if (failed()) return false;
        if (i < kSpins) {
          relax();
        } else {  // more threads than cores
          std::this_thread::yield();
        }
      }
    }
    return !failed();
  }

  // Returns the first of the next `count` pieces of the work between two barriers.
  std::size_t take(std::size_t count) { return next_.fetch_add(count, std::memory_order_relaxed); }

  void fail() { failed_.store(true, std::memory_order_release); }
  bool failed() const { return failed_.load(std::memory_order_acquire); }

 private:
  static constexpr int kSpins = 2000;

  alignas(64) std::atomic<std::size_t> arrived_{0};
  alignas(64) std::atomic<unsigned> generation_{0};
  std::atomic<bool> failed_{false};
  alignas(64) std::atomic<std::size_t> next_{0};
};

}  // namespace fdk
