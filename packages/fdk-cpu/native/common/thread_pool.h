// A thread pool for loops: the caller works too, and a worker that never wakes costs nothing.
//
// No OpenMP: two OpenMP runtimes in one process fight, phones' compilers lack it, and it does not
// survive fork. Threads start at the first parallel loop. After fork the child starts afresh.
#pragma once

#include <cstddef>

namespace fdk {

using LoopBody = void (*)(void* context, std::size_t begin, std::size_t end);

// More threads than this count as this many, none as one.
inline constexpr std::size_t kMaxThreads = 256;
constexpr std::size_t usable_threads(std::size_t threads) {
  return threads == 0 ? 1 : threads < kMaxThreads ? threads : kMaxThreads;
}

// Runs body over [0, total) in pieces of at most `chunk`, on up to `threads` threads. Returns when
// all is done. A loop within a loop, or beside one of another thread, or of one thread, runs on its
// caller alone and in one piece. What a piece throws (the first of several) is thrown to the caller
// when no piece runs any more; those not yet begun are left out.
void run_loop(std::size_t total, std::size_t chunk, std::size_t threads, LoopBody body,
              void* context);

template <class F>
void parallel_for(std::size_t total, std::size_t chunk, std::size_t threads, F body) {
  run_loop(
      total, chunk, threads,
      [](void* context, std::size_t begin, std::size_t end) {
        (*static_cast<F*>(context))(begin, end);
      },
      &body);
}

}  // namespace fdk
