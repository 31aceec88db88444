#include "memory.h"

#include <atomic>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "pool.h"

namespace fdk {
namespace {

constexpr std::size_t kChunk = std::size_t(1) << 18;
constexpr std::size_t kAhead = 4096;  // as far ahead as the kernels fetch

// A vector register of any x86-64 and ARM. A loop over words says the same, but GCC does not make
// vectors of it at -O2, and read 19 GB/s where this reads 33 (one thread of a Zen 5).
using Words = std::uint64_t __attribute__((vector_size(16)));
constexpr std::size_t kLine = 4 * sizeof(Words);

Words words_at(const std::uint8_t* data) {
  Words words;
  std::memcpy(&words, data, sizeof words);
  return words;
}

std::uint64_t sum_of(const std::uint8_t* data, std::size_t bytes) {
  Words a = {}, b = {}, c = {}, d = {};
  std::size_t i = 0;
  for (; i + kLine <= bytes; i += kLine) {
    __builtin_prefetch(data + i + kAhead);
    a += words_at(data + i);
    b += words_at(data + i + sizeof(Words));
    c += words_at(data + i + 2 * sizeof(Words));
    d += words_at(data + i + 3 * sizeof(Words));
  }
  a += b + c + d;
  std::uint64_t total = a[0] + a[1];
  for (; i < bytes; i++) total += data[i];
  return total;
}

#if defined(__linux__) && defined(MADV_HUGEPAGE)
constexpr int kBeHuge = MADV_HUGEPAGE, kCollapse = 25;  // MADV_COLLAPSE, from Linux 6.1 on
#else
constexpr int kBeHuge = 0, kCollapse = 0;
#endif

// Of the whole huge pages within; advice may be refused.
void advise([[maybe_unused]] const void* data, [[maybe_unused]] std::size_t bytes,
            [[maybe_unused]] int advice) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kHugePage = std::uintptr_t(2) << 20;
  const std::uintptr_t from = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t begin = (from + kHugePage - 1) & -kHugePage;
  const std::uintptr_t end = (from + bytes) & -kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, advice);
#endif
}

}  // namespace

std::uint64_t read_sum(const std::uint8_t* data, std::size_t bytes, std::size_t threads) {
  std::atomic<std::uint64_t> total{0};
  parallel_for(bytes, kChunk, threads, [&](std::size_t begin, std::size_t end) {
    total.fetch_add(sum_of(data + begin, end - begin), std::memory_order_relaxed);
  });
  return total.load();
}

void copy_memory(const std::uint8_t* from, std::uint8_t* to, std::size_t bytes,
                 std::size_t threads) {
  parallel_for(bytes, kChunk, threads, [&](std::size_t begin, std::size_t end) {
    std::memcpy(to + begin, from + begin, end - begin);
  });
}

void expect_writes(void* to, std::size_t bytes) {
  constexpr std::size_t kFresh = std::size_t(32) << 20;  // from here on malloc always maps anew
  if (bytes >= kFresh) advise(to, bytes, kBeHuge);
}

void use_huge_pages(const void* data, std::size_t bytes) {
  advise(data, bytes, kBeHuge);
  advise(data, bytes, kCollapse);
}

}  // namespace fdk
