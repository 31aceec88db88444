// Memory to keep weights in, and reading and copying as fast as it goes: what the kernels are
// measured against.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fdk {

// The sum of all bytes taken as 64-bit words, and of the bytes left over.
std::uint64_t read_sum(const std::uint8_t* data, std::size_t bytes, std::size_t threads);

void copy_memory(const std::uint8_t* from, std::uint8_t* to, std::size_t bytes,
                 std::size_t threads);

// Asks for huge pages under a large result that is about to be written: most of the time of writing
// fresh memory goes into its page faults. Does nothing for results that malloc may have recycled.
void expect_writes(void* to, std::size_t bytes);

// Memory of its own, all 0, to be read again and again: aligned to huge pages, and as far as whole
// ones fit in such, where the system gives some on advice, so that reading it waits for fewer walks
// of page tables. Where there is no Linux, as malloc gives it, aligned to 64 bytes.
class HugePages {
 public:
  static constexpr std::size_t kPage = std::size_t(2) << 20;

  explicit HugePages(std::size_t bytes);
  ~HugePages();
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;

  std::uint8_t* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  std::size_t bytes_;
  std::uint8_t* data_;
  void* mapped_;
};

}  // namespace fdk
