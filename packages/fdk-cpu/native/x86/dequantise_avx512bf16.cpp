// Dequantises tiles to bf16: AVX-512 BF16.
#include <immintrin.h>

#include "x86/linear_avx512bf16.h"
#include "x86/codebook_avx512bf16-inl.h"
#include "common/kernels.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

// Outputs: put<r, s>(tile, values) stores those of step s of row r, in order. `tile` counts from
// the first of the block.

// Rows of W_hat.
struct RowsOut {
  std::uint16_t* out;
  std::size_t stride;

  template <int r, int s>
  FDK_INLINE void put(std::size_t tile, __m512i values) {
    _mm512_storeu_si512(out + r * stride + tile * kTileK + s * kStep, values);
  }
  FDK_INLINE void next_stripe() { out += kTileRows * stride; }
};

// Panels of pairs of rows for DgradPanels: positions 8 q to 8 q + 3 of each 128 bits, then the
// other four, as the unpack instructions leave them.
struct PairsOut {
  std::uint16_t* panels;
  std::size_t step;
  __m512i even[kSteps] = {};

  template <int r, int s>
  FDK_INLINE void put(std::size_t tile, __m512i values) {
    if constexpr (r % 2 == 0) {
      even[s] = values;
    } else {
      std::uint16_t* const to = panels + (tile * kSteps + s) * step + (r - 1) * kStep;
      _mm512_storeu_si512(to, _mm512_unpacklo_epi16(even[s], values));
      _mm512_storeu_si512(to + kStep, _mm512_unpackhi_epi16(even[s], values));
    }
  }
  FDK_INLINE void next_stripe() { panels += kTileRows * kStep; }
};

// Tiles [begin, end) of stripes [first, last).
struct Block {
  std::size_t first, last, begin, end;
};

// Calls f(stripe, tile, its codes, slot of its first scale) for the tiles of a block.
template <class Out, class F>
FDK_INLINE void for_block(const Weight& w, const Block& block, Out& out, std::size_t bytes, F f) {
  for (std::size_t stripe = block.first; stripe < block.last; stripe++, out.next_stripe()) {
    for_tiles(w, stripe, block.begin, block.end, bytes,
              [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot)
                  FDK_LAMBDA { f(stripe, tile, codes, slot); });
  }
}

// With the scaled codebooks of each group.
template <int kBits, int kGroups, class Out>
void dequantise_scaled(const Weight& w, const Block& block, Out out, Prefetcher prefetcher) {
  constexpr std::size_t kEntries = ScaledTable<kBits>::kEntries;
  const ScaledTable<kBits> table(w.table);
  alignas(64) std::uint16_t tables[kAhead * kTileRows * kGroups * kEntries];
  for_block(
      w, block, out, tile_bytes(kBits),
      [&](std::size_t stripe, std::size_t tile, const std::uint8_t* codes, std::size_t) FDK_LAMBDA {
        prefetcher.step();
        const std::size_t ahead = (tile - block.begin) % kAhead;
        if (ahead == 0) {
          const std::size_t last = tile + kAhead < block.end ? tile + kAhead : block.end;
          scale_tables<kBits, kGroups>(w, table, stripe, tile, last, tables);
        }
        const std::uint16_t* of_tile = tables + ahead * kTileRows * kGroups * kEntries;
        unroll<int(kTileRows)>([&](auto r) FDK_LAMBDA {
          const Avx512Codes<kBits> of_row(codes, r.value);
          unroll<kSteps>([&](auto step) FDK_LAMBDA {
            constexpr int s = step.value, group = r.value * kGroups + s * kGroups / kSteps;
            const __m512i entries = ScaledTable<kBits>::load(of_tile + group * kEntries);
            const __m512i index = index_of<kBits, s>(of_row);
            out.template put<r.value, s>(tile - block.begin,
                                         _mm512_permutexvar_epi16(index, entries));
          });
        });
      });
}

// 16 values in order as float32: those that begin at `first`, for 16-bit lanes (first + i).
FDK_INLINE __m512 widened(__m512i values, __m512i lanes) {
  return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, lanes, values));
}

// For groups of 16: each value is scaled and rounded.
template <int kBits, class Out>
void dequantise_values(const Weight& w, const Block& block, Out out, Prefetcher prefetcher) {
  constexpr int kGroups = 8;
  const Table16<kBits> table(w.table);
  const bool affine = w.zeros != nullptr;
  // The upper half of 32-bit lane i gets value i, or 16 + i.
  const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i low = _mm512_slli_epi32(count, 16);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(16 << 16));
  alignas(64) float scales[kGroups * kTileRows], zeros[kGroups * kTileRows] = {};
  for_block(
      w, block, out, tile_bytes(kBits),
      [&](std::size_t, std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
        prefetcher.step();
        load_groups<kGroups, false>(w, slot, scales);
        if (affine) load_groups<kGroups, true>(w, slot, zeros);
        asm volatile("" : : "r"(scales), "r"(zeros) : "memory");  // as in scale_tables
        unroll<int(kTileRows)>([&](auto r) FDK_LAMBDA {
          const Values<kBits> values(codes, r.value, table);
          const auto scaled = [&](__m512i step, __m512i lanes, int group) FDK_LAMBDA {
            const std::size_t at = std::size_t(group) * kTileRows + r.value;
            return _mm512_mul_ps(_mm512_sub_ps(widened(step, lanes), _mm512_set1_ps(zeros[at])),
                                 _mm512_set1_ps(scales[at]));
          };
          unroll<kSteps>([&](auto step) FDK_LAMBDA {
            constexpr int s = step.value;
            const __m512 upper = scaled(values.v[s], high, 2 * s + 1);
            const __m512bh both = _mm512_cvtne2ps_pbh(upper, scaled(values.v[s], low, 2 * s));
            out.template put<r.value, s>(tile - block.begin, (__m512i)both);
          });
        });
      });
}

// The codebook of 6 to 8 bits as the low and the high bytes of its entries.
template <int kBits>
struct ByteTable {
  static constexpr int kRegisters = kBits == 6 ? 1 : kBits == 7 ? 2 : 4;
  __m512i bytes[2][kRegisters];

  FDK_INLINE explicit ByteTable(const float* table) {
    alignas(64) std::uint8_t entries[2][64 * kRegisters];
    // Sixteen at a time: one by one it took 0.4 us, half of a backward call of 8 bits.
    for (std::size_t i = 0; i < 64 * std::size_t(kRegisters); i += 16) {
      const __m512i bits = _mm512_castps_si512(_mm512_loadu_ps(table + i));
      _mm_store_si128(reinterpret_cast<__m128i*>(entries[0] + i),
                      _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 16)));
      _mm_store_si128(reinterpret_cast<__m128i*>(entries[1] + i),
                      _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 24)));
    }
    unroll<kRegisters>([&](auto i) FDK_LAMBDA {
      bytes[0][i.value] = _mm512_load_si512(entries[0] + 64 * i.value);
      bytes[1][i.value] = _mm512_load_si512(entries[1] + 64 * i.value);
    });
  }

  // 64 codes, one byte each, whose upper bits are undefined.
  FDK_INLINE __m512i at(__m512i codes, int half) const {
    const __m512i* t = bytes[half];
    if constexpr (kBits == 6) return _mm512_permutexvar_epi8(codes, t[0]);
    if constexpr (kBits == 7) return _mm512_permutex2var_epi8(t[0], codes, t[1]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(codes),
                                  _mm512_permutex2var_epi8(t[0], codes, t[1]),
                                  _mm512_permutex2var_epi8(t[2], codes, t[3]));
  }
};

// The codes of steps s (even bytes) and s + 2 (odd bytes).
template <int kBits, int s>
FDK_INLINE __m512i codes_of_steps(const Avx512Codes<kBits>& codes) {
  if constexpr (kBits == 8) return s == 0 ? codes.low : codes.high;
  // A variable: without optimisation the shift is a macro.
  const __m512i second = index_of<kBits, s + 2>(codes);
  return select_bits(0x00FF, index_of<kBits, s>(codes), _mm512_slli_epi16(second, 8));
}

// The bf16 values of a row of a tile: 32-bit lane i of a step has positions i and 16 + i.
struct Looked {
  __m512i steps[kSteps];
};

// For 6 to 8 bits. 64 codes are looked up byte by byte, in an order that puts the two halves of a
// step into the lower and upper halves of 32-bit lanes: a shift or a mask makes each a float32, and
// rounding both restores the order.
template <int kBits, int kGroups, bool kAffine, class Out>
void dequantise_bytes(const Weight& w, const Block& block, Out out, Prefetcher prefetcher) {
  constexpr int kHalves = 2;  // halves of 16 positions per step
  const ByteTable<kBits> table(w.table);
  alignas(64) std::uint8_t order[64];
  for (unsigned i = 0; i < 64; i++) order[i] = std::uint8_t(i / 4 * 2 + i / 2 % 2 * 32 + i % 2);
  const __m512i halves = _mm512_load_si512(order);
  alignas(64) float scales[kGroups * kTileRows], zeros[kGroups * kTileRows] = {};
  for_block(
      w, block, out, tile_bytes(kBits),
      [&](std::size_t, std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
        prefetcher.step();
        load_groups<kGroups, false>(w, slot, scales);
        if constexpr (kAffine) load_groups<kGroups, true>(w, slot, zeros);
        asm volatile("" : : "r"(scales), "r"(zeros) : "memory");  // as in scale_tables
        // A row is looked up while the row before is scaled.
        Looked rows[2];
        const auto look_up = [&](std::size_t r, Looked& to) FDK_LAMBDA {
          const Avx512Codes<kBits> of_row(codes, r);
          unroll<kSteps / 2>([&](auto pair) FDK_LAMBDA {
            const __m512i index =
                _mm512_permutexvar_epi8(halves, codes_of_steps<kBits, pair.value>(of_row));
            const __m512i low = table.at(index, 0), high = table.at(index, 1);
            to.steps[pair.value] = select_bits(0x00FF, low, _mm512_slli_epi16(high, 8));
            to.steps[pair.value + 2] = select_bits(0x00FF, _mm512_srli_epi16(low, 8), high);
          });
        };
        look_up(0, rows[0]);
        unroll<int(kTileRows)>([&](auto row) FDK_LAMBDA {
          constexpr std::size_t r = row.value;
          if constexpr (r + 1 < kTileRows) look_up(r + 1, rows[(r + 1) % 2]);
          unroll<kSteps>([&](auto step) FDK_LAMBDA {
            constexpr int s = step.value;
            const __m512i both = rows[r % 2].steps[s];
            __m512 values[kHalves] = {
                _mm512_castsi512_ps(_mm512_slli_epi32(both, 16)),
                _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(-0x10000)))};
            unroll<kHalves>([&](auto half) FDK_LAMBDA {
              constexpr int h = half.value, group = (kHalves * s + h) * kGroups / 8;
              constexpr std::size_t from = std::size_t(group) * kTileRows + r;
              if constexpr (kAffine) {
                values[h] = _mm512_sub_ps(values[h], _mm512_set1_ps(zeros[from]));
              }
              values[h] = _mm512_mul_ps(values[h], _mm512_set1_ps(scales[from]));
            });
            out.template put<r, s>(tile - block.begin,
                                   (__m512i)_mm512_cvtne2ps_pbh(values[1], values[0]));
          });
        });
      });
}

template <class Out>
void dequantise_block(const Weight& w, const Block& block, const Out& out,
                      const Prefetcher& prefetcher) {
  const std::size_t groups = w.groups_per_tile;
  with_bits(w.bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    if constexpr (!kScaledTable<b>) {
      if (w.zeros != nullptr) {
        if (groups == 8) return dequantise_bytes<b, 8, true>(w, block, out, prefetcher);
        return dequantise_bytes<b, 4, true>(w, block, out, prefetcher);
      }
      if (groups == 8) return dequantise_bytes<b, 8, false>(w, block, out, prefetcher);
      return dequantise_bytes<b, 4, false>(w, block, out, prefetcher);
    } else {
      if (groups == 8) return dequantise_values<b>(w, block, out, prefetcher);
      if (groups == 4) return dequantise_scaled<b, 4>(w, block, out, prefetcher);
      return dequantise_scaled<b, 2>(w, block, out, prefetcher);
    }
  });
}

}  // namespace

void dequantise_prefetching_avx512bf16(const Weight& w, std::size_t stripe, std::size_t begin,
                                       std::size_t end, void* out, std::size_t stride,
                                       const Prefetcher& prefetcher) {
  dequantise_block(w, {stripe, stripe + 1, begin, end},
                   RowsOut{static_cast<std::uint16_t*>(out), stride}, prefetcher);
}

void dequantise_avx512bf16(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                           void* out, std::size_t stride) {
  dequantise_prefetching_avx512bf16(w, stripe, begin, end, out, stride, {});
}

void dequantise_pairs_avx512bf16(const Weight& w, std::size_t first, std::size_t last,
                                 std::size_t begin, std::size_t end, std::uint16_t* panels,
                                 std::size_t step) {
  dequantise_block(w, {first, last, begin, end}, PairsOut{panels, step}, {});
}

}  // namespace fdk
