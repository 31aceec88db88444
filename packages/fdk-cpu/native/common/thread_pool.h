// A thread pool for parallel loops, in which the caller works too.
//
// It is not OpenMP: two OpenMP runtimes in one process fight for cores, phones' compilers lack it,
// and it does not survive fork. Threads start with the first parallel loop, in the child of a fork
// again.
#pragma once

#include <cstddef>

namespace fdk {

using LoopBody = void (*)(void* context, std::size_t begin, std::size_t end);

// Clamps a number of threads to 1 and kMaxThreads.
inline constexpr std::size_t kMaxThreads = 256;
constexpr std::size_t usable_threads(std::size_t threads) {
  return threads == 0 ? 1 : threads < kMaxThreads ? threads : kMaxThreads;
}

// Runs body over [0, total) in pieces of at most `chunk` on up to `threads` threads, and returns
// when all are done. A nested loop, a loop started while another thread's loop runs, and a loop
// for a single thread run on the caller alone, in one piece. The first exception of a piece is
// rethrown to the caller after all running pieces; pieces that have not started are dropped.
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

using TeamBody = void (*)(void* context, std::size_t member, std::size_t members);

// Runs body(member, members) for members 0 to members - 1, each on a thread of its own and all at
// the same time, so that they may wait for each other. `members` is `threads`, or less if so many
// threads do not start; it is 1 in a loop and while another thread's loop runs. The body must not
// throw.
void run_team(std::size_t threads, TeamBody body, void* context);

}  // namespace fdk
