// A thread pool for loops: the caller works too, and a worker that never wakes costs nothing.
//
// No OpenMP: two OpenMP runtimes in one process fight, phones' compilers lack it, and it does not
// survive fork. Threads start at the first parallel loop. After fork the child starts afresh.
#pragma once

#include <cstddef>

namespace fdk {

using LoopBody = void (*)(void* context, std::size_t begin, std::size_t end);

// Runs body over [0, total) in pieces of at most `chunk`, on up to `threads` threads. Returns when
// all is done. A loop within a loop, or beside one of another thread, runs on its caller alone.
// The body must not throw.
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
