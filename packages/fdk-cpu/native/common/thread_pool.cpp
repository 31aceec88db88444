#include "common/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <strings.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

#include "common/barrier.h"

namespace fdk {
namespace {

// Undoes OpenMP's binding in a worker. A thread inherits the cores of the one that starts it; with
// OMP_PROC_BIND that is a single core, which all workers would share. The cores before the binding
// are unknown, so a worker takes all that the process may use.
void leave_openmp_core() {
#if defined(__linux__)
  const char* binding = std::getenv("OMP_PROC_BIND");
  if (binding == nullptr || strcasecmp(binding, "false") == 0) return;
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) != 0 || CPU_COUNT(&cores) != 1) return;
  std::memset(&cores, 0xFF, sizeof cores);
  sched_setaffinity(0, sizeof cores, &cores);  // ignored if not permitted
#endif
}

// A worker spins this often for the next loop before it sleeps: a decode step runs hundreds of
// loops a few microseconds apart, and waking a sleeper costs 5 to 50.
constexpr int kSpins = 4000;

struct Loop {
  LoopBody body;
  void* context;
  std::size_t total, chunk, workers;
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error{};  // error of the thread that set `failed`; read after all threads left

  void work() {
    try {
      std::size_t begin;
      while (!failed.load(std::memory_order_relaxed) &&
             (begin = next.fetch_add(chunk, std::memory_order_relaxed)) < total) {
        body(context, begin, total - begin < chunk ? total : begin + chunk);
      }
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  }
};

class Pool {
 public:
  // Returns false if another loop uses the pool.
  bool try_run(Loop& loop) {
    std::unique_lock<std::mutex> busy(running_, std::try_to_lock);
    if (!busy) return false;
    start(loop.workers);
    run_started(loop);
    return true;
  }

  // The same with a piece for each thread: the caller and each of the workers that have started
  // take exactly one, since none ends before all have begun.
  bool try_run_team(std::size_t threads, TeamBody body, void* context) {
    std::unique_lock<std::mutex> busy(running_, std::try_to_lock);
    if (!busy) return false;
    start(threads - 1);
    Team team{body, context, std::min(threads, started_ + 1)};
    Loop loop{Team::run, &team, team.members, 1, team.members - 1};
    run_started(loop);
    return true;
  }

 private:
  struct Team {
    TeamBody body;
    void* context;
    std::size_t members;

    static void run(void* team, std::size_t member, std::size_t) {
      const Team& of = *static_cast<const Team*>(team);
      of.body(of.context, member, of.members);
    }
  };

  void run_started(Loop& loop) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      loop_ = &loop;
      joined_ = 0;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    loop.work();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      loop_ = nullptr;  // no worker joins from here on; wait for those that did
    }
    for (int i = 0; active_.load(std::memory_order_acquire) != 0; i++) {
      if (i < kSpins) {
        relax();
      } else {
        std::this_thread::yield();
      }
    }
  }

  void start(std::size_t workers) {
    try {
      for (; started_ < workers; started_++) std::thread([this] { serve(); }).detach();
    } catch (const std::exception&) {
      // Out of threads or memory: the loop runs on those that started.
    }
  }

  void serve() {
    leave_openmp_core();
    unsigned seen = 0;
    for (;;) {
      for (int i = 0; i < kSpins && generation_.load(std::memory_order_acquire) == seen; i++) {
        relax();
      }
      Loop* loop = nullptr;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
        seen = generation_.load(std::memory_order_relaxed);
        if (loop_ != nullptr && joined_ < loop_->workers) {
          loop = loop_;
          joined_++;
          active_.fetch_add(1, std::memory_order_relaxed);
        }
      }
      if (loop == nullptr) continue;
      inside_ = true;
      loop->work();
      inside_ = false;
      active_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex running_, mutex_;
  std::condition_variable wake_;
  std::atomic<unsigned> generation_{0};
  std::atomic<std::size_t> active_{0};
  Loop* loop_ = nullptr;
  std::size_t joined_ = 0, started_ = 0;

 public:
  static thread_local bool inside_;
};

thread_local bool Pool::inside_ = false;

// Never destroyed: workers may outlive the destructors of static objects.
alignas(Pool) unsigned char storage[sizeof(Pool)];

Pool& pool() {
  static Pool* const made = [] {
    Pool* fresh = new (storage) Pool;
#if defined(__unix__) || defined(__APPLE__)
    // The child of a fork has none of the threads, and its mutexes may be locked.
    pthread_atfork(nullptr, nullptr, [] {
      new (storage) Pool;
      Pool::inside_ = false;
    });
#endif
    return fresh;
  }();
  return *made;
}

}  // namespace

void run_loop(std::size_t total, std::size_t chunk, std::size_t threads, LoopBody body,
              void* context) {
  if (total == 0) return;
  if (chunk == 0) chunk = 1;
  const std::size_t pieces = (total - 1) / chunk + 1;
  const std::size_t usable = usable_threads(threads), use = usable < pieces ? usable : pieces;
  if (use > 1 && !Pool::inside_) {
    Loop loop{body, context, total, chunk, use - 1};
    Pool::inside_ = true;
    const bool ran = pool().try_run(loop);
    Pool::inside_ = false;
    if (loop.error) std::rethrow_exception(loop.error);
    if (ran) return;
  }
  body(context, 0, total);
}

void run_team(std::size_t threads, TeamBody body, void* context) {
  threads = usable_threads(threads);
  if (threads > 1 && !Pool::inside_) {
    Pool::inside_ = true;
    const bool ran = pool().try_run_team(threads, body, context);
    Pool::inside_ = false;
    if (ran) return;
  }
  body(context, 0, 1);
}

}  // namespace fdk
