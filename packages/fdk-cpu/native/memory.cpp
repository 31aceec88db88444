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
constexpr std::size_t kWords = 8;     // sums at once: one cache line
constexpr std::size_t kAhead = 4096;  // as far ahead as the kernels fetch

std::uint64_t sum_of(const std::uint8_t* data, std::size_t bytes) {
  std::uint64_t sums[kWords] = {}, words[kWords];
  std::size_t i = 0;
  for (; i + sizeof words <= bytes; i += sizeof words) {
    __builtin_prefetch(data + i + kAhead);
    std::memcpy(words, data + i, sizeof words);
    for (std::size_t j = 0; j < kWords; j++) sums[j] += words[j];
  }
  std::uint64_t total = 0;
  for (std::uint64_t sum : sums) total += sum;
  for (; i < bytes; i++) total += data[i];
  return total;
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

void expect_writes([[maybe_unused]] void* to, [[maybe_unused]] std::size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::size_t kFresh = std::size_t(32) << 20;  // from here on malloc always maps anew
  constexpr std::uintptr_t kHugePage = std::uintptr_t(2) << 20;
  if (bytes < kFresh) return;
  const std::uintptr_t begin = (reinterpret_cast<std::uintptr_t>(to) + kHugePage - 1) & -kHugePage;
  const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(to) + bytes) & -kHugePage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice may be refused
#endif
}

}  // namespace fdk
