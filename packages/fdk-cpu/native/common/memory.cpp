#include "common/memory.h"

#include <atomic>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "common/thread_pool.h"

namespace fdk {
namespace {

constexpr std::size_t kChunk = std::size_t(1) << 18;
constexpr std::size_t kAhead = 4096;  // the prefetch distance of the kernels

// A vector register of any x86-64 and ARM: GCC does not vectorise a loop over words at -O2 (Zen 5,
// one thread: 19 GB/s instead of 33).
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

constexpr std::uintptr_t kPage = WeightMemory::kHugePage;
[[maybe_unused]] constexpr std::align_val_t kLineAligned{64};

std::uintptr_t next_page(const void* data) {
  return (reinterpret_cast<std::uintptr_t>(data) + kPage - 1) & -kPage;
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

void advise_huge(void* to, std::size_t bytes) {
  const std::uintptr_t begin = next_page(to);
  const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(to) + bytes) & -kPage;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)begin, (void)end;
#endif
}

void advise_huge_result(void* to, std::size_t bytes) {
  constexpr std::size_t kFresh = std::size_t(32)
                                 << 20;  // malloc always maps new memory for this size
  if (bytes >= kFresh) advise_huge(to, bytes);
}

WeightMemory::WeightMemory(std::size_t bytes) : bytes_(bytes) {
#if defined(__linux__)
  // Mapped, not from malloc, whose pages may be in use already and stay small. The whole mapping is
  // advised, so that adjacent weights share one: Linux allows a process 65530 mappings by default.
  const std::size_t mapped = bytes + kPage;
  mapped_ = mapped < bytes
                ? MAP_FAILED
                : mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped_ == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(mapped_, mapped, MADV_HUGEPAGE);
#endif
  data_ = reinterpret_cast<std::uint8_t*>(next_page(mapped_));
#else
  mapped_ = ::operator new(bytes, kLineAligned);
  data_ = static_cast<std::uint8_t*>(mapped_);
  std::memset(data_, 0, bytes);
#endif
}

WeightMemory::~WeightMemory() {
#if defined(__linux__)
  munmap(mapped_, bytes_ + kPage);
#else
  ::operator delete(mapped_, kLineAligned);
#endif
}

}  // namespace fdk
