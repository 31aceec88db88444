// Blockwise quantisation in plain C++ for any machine: the reference for the other instruction
// sets.
#include <cmath>

#include "blockwise/block_scale.h"
#include "common/float_convert.h"

namespace fdk {
namespace {

std::uint8_t code_of(const NearestCode& nearest, float value) {
  if (nearest.keys.empty()) return nearest.codes[rank_of(nearest, value)];
  const std::uint32_t bits = bits_of_float(value), entry = nearest.keys[bits >> 16];
  return std::uint8_t((bits & 0xFFFF) > (entry & 0xFFFF) ? entry >> 24 : entry >> 16);
}

float absmax(const QuantiseTask& task, std::size_t begin, std::size_t end) {
  std::uint32_t largest = 0;  // as bits, which order NaN above infinity
  for (std::size_t i = begin; i < end; i++) {
    largest = std::max(largest, bits_of_float(std::fabs(read(task.values, i, task.type))));
  }
  return float_of_bits(largest);
}

void encode(const QuantiseTask& task, std::size_t begin, std::size_t end) {
  const BlockScale scale = scale_of(task, begin);
  const auto code_at = [&](std::size_t i) {
    const float value = i < end ? read(task.values, i, task.type) : 0.0f;
    return code_of(*task.nearest, scale.divides ? value / scale.factor : value * scale.factor);
  };
  if (task.nearest->entries > 16) {
    for (std::size_t i = begin; i < end; i++) task.packed[i] = code_at(i);
  } else {
    for (std::size_t i = begin; i < end; i += 2) {
      task.packed[i / 2] = std::uint8_t(code_at(i) << 4 | code_at(i + 1));
    }
  }
}

void quantise(const QuantiseTask& task, std::size_t begin, std::size_t end) {
  quantise_each(task, begin, end, absmax, encode);
}

void dequantise_8bit(const DequantiseTask& task, std::size_t begin, std::size_t end) {
  each_block(task.block, begin, end, [&](std::size_t block, std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; i++) {
      write(task.values, i, task.type, task.code[task.packed[i]] * task.absmax[block]);
    }
  });
}

void dequantise_4bit(const DequantiseTask& task, std::size_t begin, std::size_t end) {
  each_block(task.block, begin, end, [&](std::size_t block, std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; i++) {
      const unsigned pair = task.packed[i / 2], code = i % 2 == 0 ? pair >> 4 : pair & 15;
      write(task.values, i, task.type, task.code[code] * task.absmax[block]);
    }
  });
}

}  // namespace

extern const BlockKernels kBlocksScalar = {absmax, encode, quantise, dequantise_8bit,
                                           dequantise_4bit};

}  // namespace fdk
