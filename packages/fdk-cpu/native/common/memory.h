// Memory that weights are kept in. Reading and copying as fast as it goes: what the kernels are
// measured against.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fdk {

// The sum of all bytes taken as 64-bit words, and of the bytes left over.
std::uint64_t read_sum(const std::uint8_t* data, std::size_t bytes, std::size_t threads);

void copy_memory(const std::uint8_t* from, std::uint8_t* to, std::size_t bytes,
                 std::size_t threads);

// Asks for huge pages under memory that is about to be written, as far as whole ones fit. What was
// written before stays in small pages, and the system may not follow.
void advise_huge(void* to, std::size_t bytes);

// The same for a large result: most of the time of writing fresh memory goes into its page faults.
// Does nothing for results that malloc may have recycled.
void expect_writes(void* to, std::size_t bytes);

// Memory of its own, all 0, for a weight that is read again and again: aligned to huge pages and in
// such where the system gives some on advice, so that reading it waits for fewer walks of page
// tables. On other systems than Linux as malloc gives it, aligned to 64 bytes.
class WeightMemory {
 public:
  static constexpr std::size_t kHugePage = std::size_t(2) << 20;

  // Throws std::bad_alloc.
  explicit WeightMemory(std::size_t bytes);
  ~WeightMemory();
  WeightMemory(const WeightMemory&) = delete;
  WeightMemory& operator=(const WeightMemory&) = delete;

  std::uint8_t* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  std::size_t bytes_;
  std::uint8_t* data_;
  void* mapped_;
};

}  // namespace fdk
