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

// The same for groups of 16, by values, each scaled and rounded itself.
template <int kBits>
void decode_values(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                   std::uint16_t* out, std::size_t stride) {
  constexpr int kGroups = 8;
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
                  constexpr int s = step.value;
                  const __m512 upper = scaled(values.v[s], high, 2 * s + 1);
                  const __m512bh both = _mm512_cvtne2ps_pbh(upper, scaled(values.v[s], low, 2 * s));
                  _mm512_storeu_si512(to + s * kStep, (__m512i)both);
                });
              }
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

// Bytes of the values of a row of a tile: of the codes of steps i (even bytes) and i + 2.
struct Looked {
  __m512i low[2], high[2];
};

// W_hat rounded to bf16 of 6 to 8 bits: 64 codes are looked up byte by byte, and each 16 of them
// brought into the upper halves of float32 at once (8 bits: 20 cycles for 32 codes by 16-bit
// values).
template <int kBits, int kGroups, bool kAffine>
void decode_bytes(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                  std::uint16_t* out, std::size_t stride) {
  constexpr int kHalves = 2;  // 16 positions of a step
  constexpr __mmask64 kUpper = 0xCCCCCCCCCCCCCCCC;
  const ByteTable<kBits> table(w.table);
  // Bytes 2 and 3 of lane i are those of code 2 i + odd of the 64, low and high; 32 more for the
  // second half of a step.
  const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i first = _mm512_add_epi32(_mm512_mullo_epi32(count, _mm512_set1_epi32(0x02020000)),
                                         _mm512_set1_epi32(0x40000000));
  __m512i at[2][kHalves];
  unroll<2>([&](auto odd) FDK_LAMBDA {
    unroll<kHalves>([&](auto half) FDK_LAMBDA {
      at[odd.value][half.value] =
          _mm512_add_epi8(first, _mm512_set1_epi8(char(odd.value + 32 * half.value)));
    });
  });
  alignas(64) float scales[kGroups * kTileRows], zeros[kGroups * kTileRows] = {};
  for_tiles(w, stripe, begin, end, tile_bytes(kBits),
            [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
              load_groups<kGroups, false>(w, slot, scales);
              if constexpr (kAffine) load_groups<kGroups, true>(w, slot, zeros);
              asm volatile("" : : "r"(scales), "r"(zeros) : "memory");  // as scale_tables does
              // A row is looked up before the one ahead of it is scaled, so that neither waits.
              Looked rows[2];
              const auto look_up = [&](std::size_t r, Looked& to) FDK_LAMBDA {
                const Avx512Codes<kBits> of_row(codes, r);
                unroll<kSteps / 2>([&](auto pair) FDK_LAMBDA {
                  const __m512i index = codes_of_steps<kBits, pair.value>(of_row);
                  to.low[pair.value] = table.at(index, 0);
                  to.high[pair.value] = table.at(index, 1);
                });
              };
              look_up(0, rows[0]);
              unroll<int(kTileRows)>([&](auto row) FDK_LAMBDA {
                constexpr std::size_t r = row.value;
                if constexpr (r + 1 < kTileRows) look_up(r + 1, rows[(r + 1) % 2]);
                std::uint16_t* to = out + r * stride + (tile - begin) * kTileK;
                unroll<kSteps>([&](auto step) FDK_LAMBDA {
                  constexpr int s = step.value, pair = s % 2, odd = s / 2;
                  __m512 values[kHalves];
                  unroll<kHalves>([&](auto half) FDK_LAMBDA {
                    constexpr int h = half.value, group = (kHalves * s + h) * kGroups / 8;
                    constexpr std::size_t from = std::size_t(group) * kTileRows + r;
                    __m512 value = _mm512_castsi512_ps(_mm512_maskz_permutex2var_epi8(
                        kUpper, rows[r % 2].low[pair], at[odd][h], rows[r % 2].high[pair]));
                    if constexpr (kAffine)
                      value = _mm512_sub_ps(value, _mm512_set1_ps(zeros[from]));
                    values[h] = _mm512_mul_ps(value, _mm512_set1_ps(scales[from]));
                  });
                  _mm512_storeu_si512(to + s * kStep,
                                      (__m512i)_mm512_cvtne2ps_pbh(values[1], values[0]));
                });
              });
            });
}

// Lines that a row step of a panel fetches into L2, one of x and one of codes a turn: bursts of
// them between the products cost as much as the time they take to arrive (m = 64, 8 bits: 3.4 ms of
// decoding where warm codes take 1.8).
template <int kRows>
struct Fetch {
  static constexpr std::ptrdiff_t kLine = 64;
  const char *x, *codes, *last;
  std::size_t stride, x_step;

  FDK_INLINE Fetch(const PanelTask& task, std::size_t row, std::size_t turns)
      : x(static_cast<const char*>(task.x)), codes(x), last(x), stride(0), x_step(0) {
    const std::size_t x_bytes = turns * kLine, x_from = row / kRows * x_bytes;
    if (x_from + x_bytes <= task.next_x_bytes) {
      x_step = kLine;
      x = static_cast<const char*>(task.next_x) + x_from;
    }
    const std::size_t stripe = row / kTileRows;
    if (stripe < task.next_stripes) {
      if (stripe + 1 < task.next_stripes) stride = task.codes_stride;
      codes = reinterpret_cast<const char*>(task.next_codes) + stripe * task.codes_stride;
      last = codes + task.codes_bytes - 1;
    }
  }
  FDK_INLINE void line() {
    _mm_prefetch(x, _MM_HINT_T1);
    _mm_prefetch(codes, _MM_HINT_T1);
    x += x_step;
    codes = last - codes > kLine ? codes + kLine : last;
  }
  // From the codes of the first four rows to the others', where there are any.
  FDK_INLINE void next_stripe(const PanelTask& task) {
    if (stride == 0) return;
    codes = last + stride - task.codes_bytes + 1;
    last += stride;
  }
};

// y[row][panel] += w[row][depth] * x[depth / 2][panel][2], for kVectors registers of 16 lanes of
// the panel and, if kHalf, 8 lanes more.
//
// Eight rows and four pairs a turn reach 235.7 GFLOP/s of the 236 that vdpbf16ps alone does (one
// thread, Zen 4); twelve rows 223 to 225, and so do eight with two pairs a turn or a prefetch for
// each line of x.
template <int kRows, int kVectors, bool kHalf, bool kFetch>
void panel_rows(const PanelTask& task, std::size_t row) {
  constexpr std::size_t kTurn = 8;  // positions
  static_assert(kPanelDepth % kTurn == 0);
  constexpr std::size_t kLast = 16 * std::size_t(kVectors);  // lane of the half
  const std::uint16_t* w = static_cast<const std::uint16_t*>(task.w) + row * task.stride;
  const std::uint16_t* x = static_cast<const std::uint16_t*>(task.x);
  Fetch<kRows> fetch(task, row, task.depth / kTurn);
  float* y = task.y + row * task.panel;
  __m512 sums[kRows][kVectors];
  __m256 half_sums[kRows];
  FDK_UNROLL
  for (int r = 0; r < kRows; r++) {
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) sums[r][v] = _mm512_setzero_ps();
    half_sums[r] = _mm256_setzero_ps();
  }
  for (std::size_t turn = 0; turn < task.depth; turn += kTurn) {
    if constexpr (kFetch) {
      if (turn == task.depth / (2 * kTurn) * kTurn) fetch.next_stripe(task);
      fetch.line();
    }
    FDK_UNROLL
    for (std::size_t i = turn; i < turn + kTurn; i += 2, x += 2 * task.panel) {
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

template <int kVectors, bool kHalf>
FDK_INLINE void panel_all(const PanelTask& task) {
  constexpr int kRows = int(kAvx512Bf16PanelRows), kFew = int(kTileRows);
  static_assert(kRows == 2 * kFew);  // as Fetch has it
  const bool fetch = task.next_x != nullptr || task.next_codes != nullptr;
  std::size_t row = 0;
  for (; row + kRows <= task.rows; row += kRows) {
    if (fetch) {
      panel_rows<kRows, kVectors, kHalf, true>(task, row);
    } else {
      panel_rows<kRows, kVectors, kHalf, false>(task, row);
    }
  }
  if (row < task.rows) panel_rows<kFew, kVectors, kHalf, false>(task, row);
}

// Transposed in place: lane j of v[i] becomes lane i of v[j].
FDK_INLINE void transpose(__m512i (&v)[16]) {
  __m512i t[16];
  FDK_UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  // v[4 i + j]: lanes j, 4 + j, 8 + j and 12 + j of rows 4 i to 4 i + 3.
  FDK_UNROLL
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  FDK_UNROLL
  for (int j = 0; j < 4; j++) {
    t[j] = _mm512_shuffle_i32x4(v[j], v[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(v[j], v[4 + j], 0xDD);
    t[8 + j] = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0xDD);
  }
  FDK_UNROLL
  for (int j = 0; j < 4; j++) {
    v[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    v[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xDD);
    v[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
    v[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xDD);
  }
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

// 32 outputs of 16 lanes of x: pairs of outputs, transposed.
FDK_INLINE void write_block(const PanelOut& out, std::size_t lane, std::size_t lanes,
                            std::size_t row) {
  const __mmask16 loaded = out.panel - lane < 16 ? 0x00FF : 0xFFFF;
  const std::size_t outputs = out.outputs - row;
  __m512i pair[16];
  FDK_UNROLL
  for (int i = 0; i < 16; i++) {
    const std::size_t r = std::size_t(2 * i);
    pair[i] = _mm512_setzero_si512();
    if (r >= outputs) continue;
    const __m512i first = rounded_row(out, row + r, lane, loaded);
    const __m512i second = rounded_row(out, row + r + 1, lane, loaded);
    pair[i] = _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(first, 16), second);
  }
  transpose(pair);
  const __mmask32 stored = outputs < 32 ? (__mmask32(1) << outputs) - 1 : ~__mmask32(0);
  std::uint16_t* y = static_cast<std::uint16_t*>(out.y) + lane * out.stride + row;
  FDK_UNROLL
  for (std::size_t i = 0; i < 16; i++) {
    if (i < lanes) _mm512_mask_storeu_epi16(y + i * out.stride, stored, pair[i]);
  }
}

}  // namespace

void decode_avx512bf16(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                       void* out, std::size_t stride) {
  std::uint16_t* to = static_cast<std::uint16_t*>(out);
  const std::size_t groups = w.groups_per_tile;
  with_bits(w.bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    if constexpr (!kScaledTable<b>) {
      const bool affine = w.zeros != nullptr;
      if (groups == 8 && affine) return decode_bytes<b, 8, true>(w, stripe, begin, end, to, stride);
      if (groups == 8) return decode_bytes<b, 8, false>(w, stripe, begin, end, to, stride);
      if (affine) return decode_bytes<b, 4, true>(w, stripe, begin, end, to, stride);
      return decode_bytes<b, 4, false>(w, stripe, begin, end, to, stride);
    } else {
      if (groups == 8) return decode_values<b>(w, stripe, begin, end, to, stride);
      if (groups == 4) return decode_scaled<b, 4>(w, stripe, begin, end, to, stride);
      return decode_scaled<b, 2>(w, stripe, begin, end, to, stride);
    }
  });
}

void panel_avx512bf16(const PanelTask& task) {
  switch (task.panel) {
    case 8:
      return panel_all<0, true>(task);
    case 16:
      return panel_all<1, false>(task);
    case 24:
      return panel_all<1, true>(task);
    default:
      return panel_all<2, false>(task);
  }
}

void write_panel_avx512bf16(const PanelOut& out) {
  for (std::size_t lane = 0; lane < out.lanes; lane += 16) {
    const std::size_t lanes = out.lanes - lane < 16 ? out.lanes - lane : 16;
    for (std::size_t row = 0; row < out.outputs; row += 32) write_block(out, lane, lanes, row);
  }
}

void stage_panel_avx512bf16(const void* x, std::size_t x_stride, std::size_t rows,
                            std::size_t positions, std::size_t width, void* out) {
  constexpr std::size_t kUnits = 16;  // pairs of a register
  const std::uint16_t* from = static_cast<const std::uint16_t*>(x);
  for (std::size_t p = 0; p < positions; p += 2 * kUnits) {
    for (std::size_t lane = 0; lane < width; lane += kUnits) {
      __m512i v[kUnits];
      FDK_UNROLL
      for (std::size_t i = 0; i < kUnits; i++) {
        v[i] = lane + i < rows ? _mm512_loadu_si512(from + (lane + i) * x_stride + p)
                               : _mm512_setzero_si512();
      }
      transpose(v);
      std::uint32_t* to = static_cast<std::uint32_t*>(out) + p / 2 * width + lane;
      const __mmask16 stored = width - lane < kUnits ? 0x00FF : 0xFFFF;
      FDK_UNROLL
      for (std::size_t i = 0; i < kUnits; i++) {
        _mm512_mask_storeu_epi32(to + i * width, stored, v[i]);
      }
    }
  }
}

}  // namespace fdk
