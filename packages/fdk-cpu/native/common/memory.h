// Memory for packed weights, and reads and copies at full bandwidth, the reference for kernels.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fdk {

// Returns the sum of all bytes as 64-bit words, plus the remaining bytes one by one.
std::uint64_t read_sum(const std::uint8_t* data, std::size_t bytes, std::size_t threads);

void copy_memory(const std::uint8_t* from, std::uint8_t* to, std::size_t bytes,
                 std::size_t threads);

// Advises Linux to use huge pages for the whole ones within a range, which must not be written yet.
void advise_huge(void* to, std::size_t bytes);

// The same for a large result, whose time is mostly page faults. Does nothing for sizes that malloc
// may have recycled.
void advise_huge_result(void* to, std::size_t bytes);

// Zeroed memory for a packed weight, aligned to huge pages and in them if Linux provides them, so
// that reading needs fewer page table walks. On other systems from operator new, aligned to 64
// bytes.
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
