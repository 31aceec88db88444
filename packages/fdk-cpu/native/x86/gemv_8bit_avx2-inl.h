// One row of x and codebooks of 8 bits: AVX2.
//
// A gather of 8 values takes longer than 8 loads of one. So values are loaded by themselves and put
// together in pairs, the second from a table that holds it in the upper half of 64 bits. Pairs are
// stored, and met by x a row later: what was just stored in parts cannot be loaded as a whole.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstring>

#include "common/kernels.h"
#include "common/gemv-inl.h"

namespace fdk {
namespace {

class PairTables {
 public:
  explicit PairTables(const float* table) {
    for (std::size_t c = 0; c < kMaxLevels; c++) {
      lower_[c] = std::bit_cast<std::uint32_t>(table[c]);
      upper_[c] = lower_[c] << 32;
    }
  }

  // The values of a row of a tile, of each 16 positions the even ones first, as x lies.
  FDK_INLINE void look_up(const std::uint8_t* codes, float* out) const {
    constexpr std::size_t kBlock = 16, kLanes = 4;  // lane j has positions j and 64 + j
    for (std::size_t block = 0; block < kTileK / 2; block += kBlock, out += kBlock) {
      FDK_UNROLL
      for (std::size_t j = 0; j < kBlock; j += kLanes, codes += 2 * kLanes) {
        std::uint32_t first, second;  // lanes j and j + 1, j + 2 and j + 3
        std::memcpy(&first, codes, sizeof first);
        std::memcpy(&second, codes + sizeof first, sizeof second);
        float* to = out + j / 2;
        store(to, lower_[first & 255] | upper_[second & 255]);
        store(to + kTileK / 2, lower_[first >> 8 & 255] | upper_[second >> 8 & 255]);
        store(to + kBlock / 2, lower_[first >> 16 & 255] | upper_[second >> 16 & 255]);
        store(to + kBlock / 2 + kTileK / 2, lower_[first >> 24] | upper_[second >> 24]);
      }
    }
  }

 private:
  static FDK_INLINE void store(float* to, std::uint64_t pair) {
    std::memcpy(to, &pair, sizeof pair);
  }

  std::uint64_t lower_[kMaxLevels], upper_[kMaxLevels];
};

// y = W_hat x for stripes [begin, end). kGroups: 2 or 8 runs of a tile that share a scale; a larger
// group repeats its own.
template <class V, int kGroups>
void byte_stripes(const GemvTask& task, const PairTables& tables, std::size_t begin,
                  std::size_t end) {
  constexpr std::size_t kBytes = tile_bytes(8), kRow = kTileK;
  constexpr int kVectors = int(kTileK) / V::kLanes / kGroups;  // of a run
  const Weight& w = *task.weight;
  const std::size_t shared = w.groups_per_tile < kGroups ? kGroups / w.groups_per_tile / 2 : 0;
  alignas(64) float values[2][kTileK];
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    __m256 y_sums[kTileRows];
    FDK_UNROLL
    for (std::size_t r = 0; r < kTileRows; r++) y_sums[r] = _mm256_setzero_ps();
    tables.look_up(w.codes + stripe * w.tiles * kBytes, values[0]);
    for_tiles(w, stripe, 0, w.tiles, kBytes,
              [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
                const float* x = static_cast<const float*>(task.x) + tile * kTileK;
                alignas(32) float scales[kGroups][kTileRows];
                for (std::size_t g = 0; g < kGroups; g++) {
                  V::load4(w.scales, slot + (g >> shared) * kTileRows, w.scale_type, scales[g]);
                }
                for (std::size_t i = 0; i < kBytes; i += 64) V::prefetch(codes + kPrefetch + i);
                unroll<int(kTileRows)>([&](auto row) FDK_LAMBDA {
                  constexpr std::size_t r = row.value;
                  // Rows of tiles that follow one another lie so too.
                  const bool last = r + 1 == kTileRows && tile + 1 == w.tiles;
                  if (!last) tables.look_up(codes + (r + 1) * kRow, values[(r + 1) % 2]);
                  const float* of_row = values[r % 2];
                  unroll<kGroups>([&](auto group) FDK_LAMBDA {
                    constexpr int g = group.value;
                    __m256 sums[2];
                    unroll<kVectors>([&](auto i) FDK_LAMBDA {
                      constexpr int at = (g * kVectors + i.value) * V::kLanes;
                      const __m256 value = _mm256_load_ps(of_row + at), of_x = V::load(x + at);
                      __m256& sum = sums[i.value % 2];
                      sum = i.value < 2 ? _mm256_mul_ps(value, of_x)
                                        : _mm256_fmadd_ps(value, of_x, sum);
                    });
                    const __m256 sum = _mm256_add_ps(sums[0], sums[1]);
                    y_sums[r] = _mm256_fmadd_ps(sum, _mm256_broadcast_ss(&scales[g][r]), y_sums[r]);
                  });
                });
              });
    for (std::size_t r = 0; r < kTileRows; r++) {
      task.y[stripe * kTileRows + r] = V::sum(y_sums[r]);
    }
  }
}

template <class V>
void byte_gemv(const GemvTask& task, std::size_t begin, std::size_t end) {
  const PairTables tables(task.weight->table);
  if (task.weight->groups_per_tile > 2) return byte_stripes<V, 8>(task, tables, begin, end);
  byte_stripes<V, 2>(task, tables, begin, end);
}

}  // namespace
}  // namespace fdk
