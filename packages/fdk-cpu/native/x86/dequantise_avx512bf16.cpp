// W_hat rounded to bf16, tile by tile: AVX-512 BF16.
#include <immintrin.h>

#include "x86/linear_avx512bf16.h"
#include "x86/codebook_avx512bf16-inl.h"
#include "common/kernels.h"
#include "common/gemv-inl.h"

namespace fdk {
namespace {

// Where decoded tiles go: `values` are those of step s of row r, in order; `tile` counts from the
// first of the block.

// Rows of W_hat as they lie.
struct RowsOut {
  std::uint16_t* out;
  std::size_t stride;

  template <int r, int s>
  FDK_INLINE void put(std::size_t tile, __m512i values) {
    _mm512_storeu_si512(out + r * stride + tile * kTileK + s * kStep, values);
  }
  FDK_INLINE void next_stripe() { out += kTileRows * stride; }
};

// Panels of pairs of rows, as GradPanels has them: positions 8 q to 8 q + 3 of each 128 bits, then
// the other four, as `unpack` leaves them.
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

// Stripes [first, last), and of each the tiles [begin, end).
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

// W_hat rounded to bf16, by tables of each group.
template <int kBits, int kGroups, class Out>
void decode_scaled(const Weight& w, const Block& block, Out out, Fetch fetch) {
  constexpr std::size_t kEntries = ScaledTable<kBits>::kEntries;
  const ScaledTable<kBits> table(w.table);
  alignas(64) std::uint16_t tables[kAhead * kTileRows * kGroups * kEntries];
  for_block(
      w, block, out, tile_bytes(kBits),
      [&](std::size_t stripe, std::size_t tile, const std::uint8_t* codes, std::size_t) FDK_LAMBDA {
        fetch.step();
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

// Values in order as float32: the 16 that begin at `first`, by lanes (first + i) of 16 bits.
FDK_INLINE __m512 widened(__m512i values, __m512i lanes) {
  return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, lanes, values));
}

// The same for groups of 16, by values, each scaled and rounded itself.
template <int kBits, class Out>
void decode_values(const Weight& w, const Block& block, Out out, Fetch fetch) {
  constexpr int kGroups = 8;
  const Table16<kBits> table(w.table);
  const bool affine = w.zeros != nullptr;
  // Into the upper half of 32-bit lane i goes value i, or 16 + i.
  const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i low = _mm512_slli_epi32(count, 16);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(16 << 16));
  alignas(64) float scales[kGroups * kTileRows], zeros[kGroups * kTileRows] = {};
  for_block(
      w, block, out, tile_bytes(kBits),
      [&](std::size_t, std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
        fetch.step();
        load_groups<kGroups, false>(w, slot, scales);
        if (affine) load_groups<kGroups, true>(w, slot, zeros);
        asm volatile("" : : "r"(scales), "r"(zeros) : "memory");  // as scale_tables does
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

// The table of 6 to 8 bits as the low and the high bytes of its entries.
template <int kBits>
struct ByteTable {
  static constexpr int kRegisters = kBits == 6 ? 1 : kBits == 7 ? 2 : 4;
  __m512i bytes[2][kRegisters];

  FDK_INLINE explicit ByteTable(const float* table) {
    alignas(64) std::uint8_t entries[2][64 * kRegisters];
    // Sixteen at a time: byte by byte, 0.4 us a call, it took half of a backward call of 8 bits.
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

  // Of 64 codes, a byte each, whose upper bits mean nothing.
  FDK_INLINE __m512i at(__m512i codes, int half) const {
    const __m512i* t = bytes[half];
    if constexpr (kBits == 6) return _mm512_permutexvar_epi8(codes, t[0]);
    if constexpr (kBits == 7) return _mm512_permutex2var_epi8(t[0], codes, t[1]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(codes),
                                  _mm512_permutex2var_epi8(t[0], codes, t[1]),
                                  _mm512_permutex2var_epi8(t[2], codes, t[3]));
  }
};

// The codes of steps s (even bytes) and s + 2 (odd ones).
template <int kBits, int s>
FDK_INLINE __m512i codes_of_steps(const Avx512Codes<kBits>& codes) {
  if constexpr (kBits == 8) return s == 0 ? codes.low : codes.high;
  // By name: the shift is a macro in builds without optimisation.
  const __m512i second = index_of<kBits, s + 2>(codes);
  return select_bits(0x00FF, index_of<kBits, s>(codes), _mm512_slli_epi16(second, 8));
}

// Values of a row of a tile in bf16: 32-bit lane i of a step holds those of positions i and 16 + i.
struct Looked {
  __m512i steps[kSteps];
};

// W_hat rounded to bf16 of 6 to 8 bits. 64 codes are looked up byte by byte, in an order in which
// the two halves of a step are the lower and the upper halves of 32-bit lanes: each is a float32 by
// a shift or a mask, and rounding both puts them in order. (By bytes brought into float32 16 at a
// time 8 bits took 223 cycles a tile for 201, Emerald Rapids; 20 cycles for 32 codes by 16-bit
// values, Zen 4.)
template <int kBits, int kGroups, bool kAffine, class Out>
void decode_bytes(const Weight& w, const Block& block, Out out, Fetch fetch) {
  constexpr int kHalves = 2;  // 16 positions of a step
  const ByteTable<kBits> table(w.table);
  alignas(64) std::uint8_t order[64];
  for (unsigned i = 0; i < 64; i++) order[i] = std::uint8_t(i / 4 * 2 + i / 2 % 2 * 32 + i % 2);
  const __m512i halves = _mm512_load_si512(order);
  alignas(64) float scales[kGroups * kTileRows], zeros[kGroups * kTileRows] = {};
  for_block(
      w, block, out, tile_bytes(kBits),
      [&](std::size_t, std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
        fetch.step();
        load_groups<kGroups, false>(w, slot, scales);
        if constexpr (kAffine) load_groups<kGroups, true>(w, slot, zeros);
        asm volatile("" : : "r"(scales), "r"(zeros) : "memory");  // as scale_tables does
        // A row is looked up before the one ahead of it is scaled, so that neither waits.
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
void decode_block(const Weight& w, const Block& block, const Out& out, const Fetch& fetch) {
  const std::size_t groups = w.groups_per_tile;
  with_bits(w.bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    if constexpr (!kScaledTable<b>) {
      if (w.zeros != nullptr) {
        if (groups == 8) return decode_bytes<b, 8, true>(w, block, out, fetch);
        return decode_bytes<b, 4, true>(w, block, out, fetch);
      }
      if (groups == 8) return decode_bytes<b, 8, false>(w, block, out, fetch);
      return decode_bytes<b, 4, false>(w, block, out, fetch);
    } else {
      if (groups == 8) return decode_values<b>(w, block, out, fetch);
      if (groups == 4) return decode_scaled<b, 4>(w, block, out, fetch);
      return decode_scaled<b, 2>(w, block, out, fetch);
    }
  });
}

}  // namespace

void decode_fetching_avx512bf16(const Weight& w, std::size_t stripe, std::size_t begin,
                                std::size_t end, void* out, std::size_t stride,
                                const Fetch& fetch) {
  decode_block(w, {stripe, stripe + 1, begin, end},
               RowsOut{static_cast<std::uint16_t*>(out), stride}, fetch);
}

void decode_avx512bf16(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                       void* out, std::size_t stride) {
  decode_fetching_avx512bf16(w, stripe, begin, end, out, stride, {});
}

void decode_pairs_avx512bf16(const Weight& w, std::size_t first, std::size_t last,
                             std::size_t begin, std::size_t end, std::uint16_t* panels,
                             std::size_t step) {
  decode_block(w, {first, last, begin, end}, PairsOut{panels, step}, {});
}

}  // namespace fdk
