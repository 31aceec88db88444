// Blockwise quantisation: n values in blocks that share an absmax, with codes of 8 or 4 bits. The
// bytes are those of the torch kernels of fdk_formats.
//
//   values :: [n]                   float32, float16 or bfloat16
//   packed :: [n] at 8 bits, [ceil(n / 2)] at 4: the first of two codes in the high bits
//   absmax :: [ceil(n / block)]     float32
//   code   :: [256] or [16]         float32, the value of each code
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/layout.h"

namespace fdk {

inline constexpr std::size_t kMaxEntries = 256;

// Finds the code of the entry nearest to a scaled value; ties go to the lower entry. The rank of a
// value is the number of midpoints below it.
struct NearestCode {
  std::size_t entries;              // 256 or 16
  float midpoints[kMaxEntries];     // entries - 1 of them, ascending
  std::uint8_t codes[kMaxEntries];  // by rank
  // One entry per upper half of a float's bits, if no two midpoints share one; otherwise empty. If
  // the lower half of a value is above bits 0 to 15 of the entry, its code is bits 24 to 31, else
  // 16 to 23.
  std::vector<std::uint32_t> keys;
};

// code  :: [entries], the value of each code
// order :: [entries], the codes from the lowest value to the highest
NearestCode nearest_code_of(const float* code, const std::uint8_t* order, std::size_t entries);

// A NaN or infinity shows in the absmax of its block, whose codes are undefined then. With 16
// entries `block` must be even.
void quantise_blocks(const NearestCode& nearest, Activation type, const void* values, std::size_t n,
                     std::size_t block, std::uint8_t* packed, float* absmax, std::size_t threads);

void dequantise_blocks(int bits, const float* code, Activation type, const std::uint8_t* packed,
                       const float* absmax, std::size_t n, std::size_t block, void* values,
                       std::size_t threads);

struct QuantiseTask {
  const NearestCode* nearest;
  Activation type;
  const void* values;
  std::size_t n, block;
  std::uint8_t* packed;
  float* absmax;
};

struct DequantiseTask {
  const float* code;
  Activation type;
  const std::uint8_t* packed;
  const float* absmax;
  std::size_t n, block;
  void* values;
};

// The kernels of an instruction set.
struct BlockKernels {
  // The absmax of values [begin, end).
  float (*absmax)(const QuantiseTask&, std::size_t begin, std::size_t end);
  // Encodes values [begin, end) of one block whose absmax is stored.
  void (*encode)(const QuantiseTask&, std::size_t begin, std::size_t end);
  // Both, for blocks [begin, end).
  void (*quantise)(const QuantiseTask&, std::size_t begin, std::size_t end);
  // For values [begin, end); begin is even at 4 bits.
  void (*dequantise_8bit)(const DequantiseTask&, std::size_t begin, std::size_t end);
  void (*dequantise_4bit)(const DequantiseTask&, std::size_t begin, std::size_t end);
};

extern const BlockKernels kBlocksScalar;
#if defined(__x86_64__)
extern const BlockKernels kBlocksAvx2;
extern const BlockKernels kBlocksAvx512;
#endif
#if defined(__aarch64__)
extern const BlockKernels kBlocksNeon;
#endif

}  // namespace fdk
