#include "blockwise/blockwise.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "blockwise/block_scale.h"
#include "common/float_convert.h"
#include "common/dispatch.h"
#include "common/memory.h"
#include "common/thread_pool.h"

namespace fdk {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::uint32_t kKeys = 1 << 16;
// The least values per piece: 64 KiB of float32.
constexpr std::size_t kPiece = std::size_t(1) << 14;
// Pieces per thread of a long row: few, so that each page of the result is first touched by one
// thread.
constexpr std::size_t kPieces = 8;
// The threads share a block longer than this.
constexpr std::size_t kLongBlock = std::size_t(1) << 17;

// Values per piece, a multiple of `unit`.
std::size_t piece_of(std::size_t n, std::size_t unit, std::size_t threads) {
  const std::size_t wanted = std::max(kPiece, n / (usable_threads(threads) * kPieces));
  return ceil_div(wanted, unit) * unit;
}

const BlockKernels& block_kernels() {
  [[maybe_unused]] const Isa isa = current_isa();
#if defined(__aarch64__)
  if (isa >= Isa::neon && isa < Isa::avx2) return kBlocksNeon;
#endif
#if defined(__x86_64__)
  if (isa >= Isa::avx512) return kBlocksAvx512;
  if (isa == Isa::avx2) return kBlocksAvx2;
#endif
  return kBlocksScalar;
}

// Computes the entry of NearestCode::keys for values whose upper half is `key`. Returns false if
// they include two midpoints.
bool key_entry(const NearestCode& nearest, std::uint32_t key, std::uint32_t* entry) {
  const bool negative = (key & 0x8000) != 0;
  const float nearest_zero = float_of_bits(key << 16), furthest = float_of_bits(key << 16 | 0xFFFF);
  const float least = negative ? furthest : nearest_zero, most = negative ? nearest_zero : furthest;
  const std::size_t low = rank_of(nearest, least);
  const std::uint32_t lower = nearest.codes[low];
  *entry = lower << 24 | lower << 16;
  if (std::isnan(furthest)) return true;  // its block is refused
  const std::size_t high = rank_of(nearest, most);
  if (low == high) return true;
  const float midpoint = nearest.midpoints[low];
  const std::uint32_t upper = nearest.codes[high], half = bits_of_float(midpoint) & 0xFFFF;
  // The bits of negative values decrease as the values grow, so half - 1 or less is above the
  // midpoint; `most` is one of them, so half is not 0.
  *entry = negative ? lower << 24 | upper << 16 | (half - 1) : upper << 24 | lower << 16 | half;
  return midpoint == nearest.midpoints[high - 1];
}

void quantise_long_blocks(const BlockKernels& kernels, const QuantiseTask& task,
                          std::size_t threads) {
  for (std::size_t first = 0; first < task.n; first += task.block) {
    const std::size_t count = std::min(task.block, task.n - first);
    std::atomic<std::uint32_t> largest{0};  // as bits, which order NaN above infinity
    parallel_for(count, kPiece, threads, [&](std::size_t begin, std::size_t end) {
      const std::uint32_t found = bits_of_float(kernels.absmax(task, first + begin, first + end));
      std::uint32_t known = largest.load();
      while (known < found && !largest.compare_exchange_weak(known, found)) {
      }
    });
    task.absmax[first / task.block] = stored_absmax(task, first, float_of_bits(largest.load()));
    parallel_for(count, kPiece, threads, [&](std::size_t begin, std::size_t end) {
      kernels.encode(task, first + begin, first + end);
    });
  }
}

}  // namespace

NearestCode nearest_code_of(const float* code, const std::uint8_t* order, std::size_t entries) {
  NearestCode nearest{};
  nearest.entries = entries;
  std::copy_n(order, entries, nearest.codes);
  for (std::size_t i = 0; i + 1 < entries; i++) {
    const float middle = (code[order[i]] + code[order[i + 1]]) / 2;
    // A scaled value may be rounded to just beyond 1, and counts as 1 then: a midpoint of 1 or more
    // is never passed, and one below -1 always.
    nearest.midpoints[i] = middle >= 1 ? kInfinity : middle < -1 ? -kInfinity : middle;
  }
  nearest.keys.resize(kKeys);
  for (std::uint32_t key = 0; key < kKeys; key++) {
    if (key_entry(nearest, key, &nearest.keys[key])) continue;
    nearest.keys.clear();
    break;
  }
  return nearest;
}

void quantise_blocks(const NearestCode& nearest, Activation type, const void* values, std::size_t n,
                     std::size_t block, std::uint8_t* packed, float* absmax, std::size_t threads) {
  const QuantiseTask task{&nearest, type, values, n, block, packed, absmax};
  const BlockKernels& kernels = nearest.keys.empty() ? kBlocksScalar : block_kernels();
  advise_huge_result(packed, task.nearest->entries > 16 ? n : n / 2);
  if (block > kLongBlock) return quantise_long_blocks(kernels, task, threads);
  const std::size_t blocks = ceil_div(n, block), chunk = piece_of(n, block, threads) / block;
  parallel_for(blocks, chunk, threads,
               [&](std::size_t begin, std::size_t end) { kernels.quantise(task, begin, end); });
}

void dequantise_blocks(int bits, const float* code, Activation type, const std::uint8_t* packed,
                       const float* absmax, std::size_t n, std::size_t block, void* values,
                       std::size_t threads) {
  const DequantiseTask task{code, type, packed, absmax, n, block, values};
  const BlockKernels& kernels = block_kernels();
  const auto dequantise = bits == 4 ? kernels.dequantise_4bit : kernels.dequantise_8bit;
  advise_huge_result(values, n * bytes_of(type));
  // Whole cache lines of codes and of values.
  parallel_for(n, piece_of(n, 128, threads), threads,
               [&](std::size_t begin, std::size_t end) { dequantise(task, begin, end); });
}

}  // namespace fdk
