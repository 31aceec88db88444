// Reading and copying memory as fast as it goes: what the kernels are measured against.
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

// Moves memory that is read again and again into huge pages, where the system has some: reading it
// then waits for fewer walks of page tables. Its bytes stay as they are.
void use_huge_pages(const void* data, std::size_t bytes);

}  // namespace fdk
