// Large m on AVX-512 BF16: W_hat rounded to bf16, its products with panels of x, and y from them.
#include <immintrin.h>

#include "avx512bf16.h"
#include "avx512bf16_values.h"
#include "kernels.h"
#include "simd_float.h"

namespace fdk {
namespace {

// W_hat rounded to bf16, by tables of each group.
template <int kBits, int kGroups>
void decode_scaled(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                   std::uint16_t* out, std::size_t stride) {
  constexpr std::size_t kEntries = ScaledTable<kBits>::kEntries;
  const ScaledTable<kBits> table(w.table);
  alignas(64) std::uint16_t tables[kAhead * kTileRows * kGroups * kEntries];
  for_tiles(w, stripe, begin, end, tile_bytes(kBits),
            [&](std::size_t tile, const std::uint8_t* codes, std::size_t) FDK_LAMBDA {
              const std::size_t ahead = (tile - begin) % kAhead;
              if (ahead == 0) {
                const std::size_t last = tile + kAhead < end ? tile + kAhead : end;
                scale_tables<kBits, kGroups>(w, table, stripe, tile, last, tables);
              }
              const std::uint16_t* of_tile = tables + ahead * kTileRows * kGroups * kEntries;
              unroll<int(kTileRows)>([&](auto r) FDK_LAMBDA {
                std::uint16_t* to = out + r.value * stride + (tile - begin) * kTileK;
                const Avx512Codes<kBits> of_row(codes, r.value);
                unroll<kSteps>([&](auto step) FDK_LAMBDA {
                  constexpr int s = step.value, group = r.value * kGroups + s * kGroups / kSteps;
                  const __m512i entries = ScaledTable<kBits>::load(of_tile + group * kEntries);
                  const __m512i index = index_of<kBits, s>(of_row);
                  _mm512_storeu_si512(to + s * kStep, _mm512_permutexvar_epi16(index, entries));
                });
              });
            });
}

// Values in order as float32: the 16 that begin at `first`, by lanes (first + i) of 16 bits.
FDK_INLINE __m512 widened(__m512i values, __m512i lanes) {
  return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, lanes, values));
}

// The same by values, each scaled and rounded itself.
template <int kBits, int kGroups>
void decode_values(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                   std::uint16_t* out, std::size_t stride) {
  const Table16<kBits> table(w.table);
  const bool affine = w.zeros != nullptr;
  // Into the upper half of 32-bit lane i goes value i, or 16 + i.
  const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i low = _mm512_slli_epi32(count, 16);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(16 << 16));
  alignas(64) float scales[kGroups * kTileRows], zeros[kGroups * kTileRows] = {};
  for_tiles(w, stripe, begin, end, tile_bytes(kBits),
            [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
              load_groups<kGroups, false>(w, slot, scales);
              if (affine) load_groups<kGroups, true>(w, slot, zeros);
              asm volatile("" : : "r"(scales), "r"(zeros) : "memory");  // as scale_tables does
              for (std::size_t r = 0; r < kTileRows; r++) {
                std::uint16_t* to = out + r * stride + (tile - begin) * kTileK;
                const Values<kBits> values(codes, r, table);
                const auto scaled = [&](__m512i step, __m512i lanes, int group) FDK_LAMBDA {
                  const std::size_t at = std::size_t(group) * kTileRows + r;
                  return _mm512_mul_ps(
                      _mm512_sub_ps(widened(step, lanes), _mm512_set1_ps(zeros[at])),
                      _mm512_set1_ps(scales[at]));
                };
                unroll<kSteps>([&](auto step) FDK_LAMBDA {
                  constexpr int s = step.value, first = s * kGroups / kSteps;
                  constexpr int second = (2 * s + 1) * kGroups / (2 * kSteps);
                  const __m512 upper = scaled(values.v[s], high, second);
                  const __m512bh both = _mm512_cvtne2ps_pbh(upper, scaled(values.v[s], low, first));
                  _mm512_storeu_si512(to + s * kStep, (__m512i)both);
                });
              }
            });
}

// y[row][panel] += w[row][depth] * x[depth / 2][panel][2], for kVectors registers of 16 lanes of
// the panel and, if kHalf, 8 lanes more.
template <int kRows, int kVectors, bool kHalf>
void panel_rows(const PanelTask& task, std::size_t row) {
  const std::uint16_t* w = static_cast<const std::uint16_t*>(task.w) + row * task.stride;
  const std::uint16_t* x = static_cast<const std::uint16_t*>(task.x);
  float* y = task.y + row * task.panel;
  constexpr std::size_t kLast = 16 * std::size_t(kVectors);  // lane of the half
  // x comes from L2 and beyond (with blocks twice as deep: m = 512 90.4 -> 86.3 ms).
  constexpr std::size_t kAheadPositions = 32;
  __m512 sums[kRows][kVectors];
  __m256 half_sums[kRows];
  FDK_UNROLL
  for (int r = 0; r < kRows; r++) {
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) sums[r][v] = _mm512_setzero_ps();
    half_sums[r] = _mm256_setzero_ps();
  }
  for (std::size_t i = 0; i < task.depth; i += 2, x += 2 * task.panel) {
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) {
      _mm_prefetch(reinterpret_cast<const char*>(x + kAheadPositions * task.panel + v * 32),
                   _MM_HINT_T0);
    }
    __m512bh lane[kVectors];
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) lane[v] = as_bf16(_mm512_loadu_si512(x + v * 32));
    __m256bh half_lane{};
    if constexpr (kHalf) {
      half_lane = (__m256bh)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 2 * kLast));
    }
    FDK_UNROLL
    for (int r = 0; r < kRows; r++) {
      const __m512i pair = _mm512_broadcastd_epi32(_mm_loadu_si32(w + r * task.stride + i));
      FDK_UNROLL
      for (int v = 0; v < kVectors; v++) {
        sums[r][v] = _mm512_dpbf16_ps(sums[r][v], lane[v], as_bf16(pair));
      }
      if constexpr (kHalf) {
        half_sums[r] =
            _mm256_dpbf16_ps(half_sums[r], half_lane, (__m256bh)_mm512_castsi512_si256(pair));
      }
    }
  }
  FDK_UNROLL
  for (int r = 0; r < kRows; r++) {
    float* to = y + r * task.panel;
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) {
      _mm512_storeu_ps(to + v * 16, _mm512_add_ps(_mm512_loadu_ps(to + v * 16), sums[r][v]));
    }
    if constexpr (kHalf) {
      _mm256_storeu_ps(to + kLast, _mm256_add_ps(_mm256_loadu_ps(to + kLast), half_sums[r]));
    }
  }
}

template <int kRows, int kVectors, bool kHalf>
FDK_INLINE void panel_all(const PanelTask& task) {
  std::size_t row = 0;
  for (; row + kRows <= task.rows; row += kRows) panel_rows<kRows, kVectors, kHalf>(task, row);
  constexpr int kFew = int(kTileRows);
  for (; row < task.rows; row += kTileRows) panel_rows<kFew, kVectors, kHalf>(task, row);
}

// Sums of row r of a panel, with its bias, as bf16 in the upper halves: to nearest, ties to even,
// and NaN as NaN. `vcvtneps2bf16` would flush subnormals.
FDK_INLINE __m512i rounded_row(const PanelOut& out, std::size_t r, std::size_t lane,
                               __mmask16 lanes) {
  __m512 sums = _mm512_maskz_loadu_ps(lanes, out.products + r * out.panel + lane);
  if (out.bias != nullptr && r < out.outputs) {
    const std::uint16_t bias = static_cast<const std::uint16_t*>(out.bias)[r];
    sums = _mm512_add_ps(sums, _mm512_castsi512_ps(_mm512_set1_epi32(int(bias) << 16)));
  }
  const __m512i bits = _mm512_castps_si512(sums);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(sums, sums, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
}

// 8 outputs of 16 lanes of x, as pairs of outputs transposed within each four lanes.
FDK_INLINE void write_eight(const PanelOut& out, std::size_t lane, std::size_t lanes,
                            std::size_t row) {
  const __mmask16 loaded = out.panel - lane < 16 ? 0x00FF : 0xFFFF;
  __m512i pair[4];
  FDK_UNROLL
  for (int i = 0; i < 4; i++) {
    const std::size_t r = row + std::size_t(2 * i);
    const __m512i first = rounded_row(out, r, lane, loaded);
    const __m512i second = rounded_row(out, r + 1, lane, loaded);
    pair[i] = _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(first, 16), second);
  }
  const __m512i low01 = _mm512_unpacklo_epi32(pair[0], pair[1]);
  const __m512i low23 = _mm512_unpacklo_epi32(pair[2], pair[3]);
  const __m512i high01 = _mm512_unpackhi_epi32(pair[0], pair[1]);
  const __m512i high23 = _mm512_unpackhi_epi32(pair[2], pair[3]);
  // Lanes j, 4 + j, 8 + j and 12 + j of x are the quarters of fours[j].
  alignas(64) __m128i fours[4][4];
  _mm512_store_si512(fours[0], _mm512_unpacklo_epi64(low01, low23));
  _mm512_store_si512(fours[1], _mm512_unpackhi_epi64(low01, low23));
  _mm512_store_si512(fours[2], _mm512_unpacklo_epi64(high01, high23));
  _mm512_store_si512(fours[3], _mm512_unpackhi_epi64(high01, high23));
  const std::size_t outputs = out.outputs - row;
  const __mmask8 stored = outputs < 8 ? __mmask8((1u << outputs) - 1) : 0xFF;
  std::uint16_t* y = static_cast<std::uint16_t*>(out.y) + lane * out.stride + row;
  for (std::size_t i = 0; i < lanes; i++, y += out.stride) {
    _mm_mask_storeu_epi16(y, stored, fours[i % 4][i / 4]);
  }
}

}  // namespace

void decode_avx512bf16(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                       void* out, std::size_t stride) {
  std::uint16_t* to = static_cast<std::uint16_t*>(out);
  const std::size_t groups = w.groups_per_tile;
  with_bits(w.bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    if (groups == 8) return decode_values<b, 8>(w, stripe, begin, end, to, stride);
    if constexpr (!kScaledTable<b>) {
      return decode_values<b, 4>(w, stripe, begin, end, to, stride);
    } else {
      if (groups == 4) return decode_scaled<b, 4>(w, stripe, begin, end, to, stride);
      return decode_scaled<b, 2>(w, stripe, begin, end, to, stride);
    }
  });
}

void panel_avx512bf16(const PanelTask& task) {
  constexpr int kRows = int(kAvx512Bf16PanelRows);
  switch (task.panel) {
    case 8:
      return panel_all<kRows, 0, true>(task);
    case 16:
      return panel_all<kRows, 1, false>(task);
    case 24:
      return panel_all<kRows, 1, true>(task);
    default:
      return panel_all<kRows, 2, false>(task);
  }
}

void write_panel_avx512bf16(const PanelOut& out) {
  for (std::size_t lane = 0; lane < out.lanes; lane += 16) {
    const std::size_t lanes = out.lanes - lane < 16 ? out.lanes - lane : 16;
    for (std::size_t row = 0; row < out.outputs; row += 8) write_eight(out, lane, lanes, row);
  }
}

}  // namespace fdk
