// AVX-512 with BF16 and VBMI: bf16 activations, products of pairs summed in float32.
//
// The values before their scale are bf16 exactly (a codebook rounded to bf16, or codes below 256),
// so the dot products of a group are exact in their products; the scale is applied to the sums.
// Zero points are subtracted from the sums too: sum x (code - zero) = sum x code - zero sum x,
// lane by lane, so that a single nonzero x still gives exactly (code - zero) scale.
#include <immintrin.h>

#include "avx512_codes.h"
#include "kernels.h"
#include "simd_float.h"
#include "x86_scales.h"

namespace fdk {
namespace {

constexpr int kSteps = 4;  // of 32 positions, a tile
constexpr std::size_t kStep = kTileK / kSteps;

FDK_INLINE __m512bh as_bf16(__m512i v) { return (__m512bh)v; }

FDK_INLINE std::uint16_t bf16_bits(float value) {
  return std::uint16_t(_mm_cvtsi128_si32(_mm_castps_si128(_mm_set_ss(value))) >> 16 & 0xFFFF);
}

// The table in 16-bit entries; for 8 bits as its low and its high bytes, which `vpermi2b` looks up
// 128 at a time.
template <int kBits>
struct Table16 {
  static constexpr int kRegisters = kBits <= 5 ? 1 : kBits == 6 ? 2 : kBits == 7 ? 4 : 8;
  __m512i t[kRegisters];

  FDK_INLINE explicit Table16(const float* table) {
    constexpr unsigned kEntries = kBits <= 5 ? 32 : 1u << kBits, kMask = (1u << kBits) - 1;
    if constexpr (kBits < 8) {
      alignas(64) std::uint16_t entries[kEntries];
      for (unsigned i = 0; i < kEntries; i++) entries[i] = bf16_bits(table[i & kMask]);
      for (int i = 0; i < kRegisters; i++) t[i] = _mm512_load_si512(entries + 32 * i);
    } else {
      alignas(64) std::uint8_t bytes[2][256];
      for (unsigned i = 0; i < 256; i++) {
        bytes[0][i] = std::uint8_t(bf16_bits(table[i]));
        bytes[1][i] = std::uint8_t(bf16_bits(table[i]) >> 8);
      }
      for (int i = 0; i < kRegisters; i++) t[i] = _mm512_load_si512(bytes[0] + 64 * i);
    }
  }

  // index: 16-bit lanes, the code in the low bits and junk above; up to 7 bits.
  FDK_INLINE __m512i at(__m512i index) const {
    if constexpr (kBits <= 5) {
      return _mm512_permutexvar_epi16(index, t[0]);
    } else if constexpr (kBits == 6) {
      return _mm512_permutex2var_epi16(t[0], index, t[1]);
    } else {
      const __mmask32 bit6 = _mm512_test_epi16_mask(index, _mm512_set1_epi16(64));
      return _mm512_mask_blend_epi16(bit6, _mm512_permutex2var_epi16(t[0], index, t[1]),
                                     _mm512_permutex2var_epi16(t[2], index, t[3]));
    }
  }

  // One byte of the values of 64 codes; `half` 0 is the low one.
  FDK_INLINE __m512i bytes_at(__m512i codes, __mmask64 bit7, int half) const {
    const __m512i* u = t + 4 * half;
    return _mm512_mask_blend_epi8(bit7, _mm512_permutex2var_epi8(u[0], codes, u[1]),
                                  _mm512_permutex2var_epi8(u[2], codes, u[3]));
  }
};

// The values of a row of a tile: v[s] holds positions 32 s to 32 s + 31, in order.
template <int kBits>
struct Values {
  __m512i v[kSteps];

  FDK_INLINE Values(const std::uint8_t* tile, std::size_t r, const Table16<kBits>& table) {
    const Avx512Codes<kBits> codes(tile, r);
    if constexpr (kBits == 8) {
      // The low bytes of the 16-bit lanes are steps 0 and 1, the high ones steps 2 and 3.
      for (int i = 0; i < 2; i++) {
        const __m512i q = i == 0 ? codes.low : codes.high;
        const __mmask64 bit7 = _mm512_movepi8_mask(q);
        const __m512i lo = table.bytes_at(q, bit7, 0), hi = table.bytes_at(q, bit7, 1);
        // Each byte's neighbour; a masked shuffle is one instruction where shift and select are two
        // (4096 x 4096, 8 bits, warm: 0.85 -> 0.69 ms).
        const __m512i neighbour = _mm512_broadcast_i32x4(
            _mm_set_epi8(14, 15, 12, 13, 10, 11, 8, 9, 6, 7, 4, 5, 2, 3, 0, 1));
        v[i] = _mm512_mask_shuffle_epi8(lo, 0xAAAAAAAAAAAAAAAA, hi, neighbour);
        v[i + 2] = _mm512_mask_shuffle_epi8(hi, 0x5555555555555555, lo, neighbour);
      }
    } else {
      unroll<kSteps>([&](auto step) FDK_LAMBDA {
        constexpr int s = step.value, up = 4 * s - 4;
        __m512i index = _mm512_srli_epi16(codes.low, 4 * s);
        if constexpr (kBits > 4) {
          const __m512i high = up >= 0 ? _mm512_srli_epi16(codes.high, up >= 0 ? unsigned(up) : 0)
                                       : _mm512_slli_epi16(codes.high, 4);
          index = select_bits(0x000F, index, high);
        }
        v[s] = table.at(index);
      });
    }
  }
};

// Scales or zero points of a tile, [kGroups][kTileRows]; fewer stored groups are repeated.
template <int kGroups, bool kZeros>
FDK_INLINE void load_groups(const Weight& w, std::size_t slot, float* out) {
  const std::size_t repeats = kGroups / w.groups_per_tile;
  const ScaleType type = kZeros ? ScaleType(int(w.zero_type) - 1) : w.scale_type;
  if (kGroups > 1 && repeats == 1 && type == ScaleType::bf16) {  // the usual case, at once
    const void* stored = kZeros ? w.zeros : w.scales;
    const std::uint16_t* from = static_cast<const std::uint16_t*>(stored) + slot;
    for (int i = 0; i < kGroups * int(kTileRows); i += 8) {
      const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16);
      _mm256_storeu_ps(out + i, _mm256_castsi256_ps(wide));
    }
    return;
  }
  for (std::size_t g = 0; g < std::size_t(kGroups); g++) {
    const std::size_t from = slot + (repeats == 1 ? g : g / repeats) * kTileRows;
    __m128 four;
    if constexpr (!kZeros) {
      four = load4_scales(w.scales, from, w.scale_type);
    } else if (w.zero_type == ZeroType::u8) {
      four = load4_bytes(w.zeros, from);
    } else {
      four = load4_scales(w.zeros, from, ScaleType(int(w.zero_type) - 1));
    }
    _mm_storeu_ps(out + g * kTileRows, four);
  }
}

// The scale or zero point of step s of row r, for sums of pairs: 16 positions are half a register.
template <int kGroups, int s>
FDK_INLINE __m512 group_at(const float* groups, std::size_t r) {
  if constexpr (kGroups == 8) {
    return _mm512_mask_blend_ps(0xFF00, _mm512_set1_ps(groups[2 * s * kTileRows + r]),
                                _mm512_set1_ps(groups[(2 * s + 1) * kTileRows + r]));
  } else {
    return _mm512_set1_ps(groups[std::size_t(s * kGroups / kSteps) * kTileRows + r]);
  }
}

template <int kBits, int kGroups, bool kAffine, int kM>
void gemv_stripes(const GemvTask& task, std::size_t begin, std::size_t end) {
  constexpr std::size_t kBytes = tile_bytes(kBits);
  constexpr int kRun = kGroups >= kSteps ? 1 : kSteps / kGroups;  // steps that share a scale
  const Weight& w = *task.weight;
  const Table16<kBits> table(w.table);
  const std::uint16_t* x[kM];  // past the last row it is repeated, and the result dropped
  const float* x_sums[kM];
  FDK_UNROLL
  for (int m = 0; m < kM; m++) {
    const std::size_t row = std::size_t(m) < task.m ? std::size_t(m) : task.m - 1;
    x[m] = static_cast<const std::uint16_t*>(task.x) + row * w.tiles * kTileK;
    if constexpr (kAffine) x_sums[m] = task.x_sums + row * w.tiles * kTileK / 2;
  }
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    __m512 sums[kTileRows][kM];
    for (std::size_t r = 0; r < kTileRows; r++) {
      FDK_UNROLL
      for (int m = 0; m < kM; m++) sums[r][m] = _mm512_setzero_ps();
    }
    for_tiles(w, stripe, 0, w.tiles, kBytes, [&](std::size_t tile, const std::uint8_t* codes,
                                                 std::size_t slot) FDK_LAMBDA {
      alignas(64) float scales[kGroups * kTileRows], zeros[kGroups * kTileRows];
      load_groups<kGroups, false>(w, slot, scales);
      if constexpr (kAffine) load_groups<kGroups, true>(w, slot, zeros);
      for (std::size_t i = 0; i < kBytes; i += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(codes + kPrefetch + i), _MM_HINT_T0);
      }
      const auto row = [&](std::size_t r) FDK_LAMBDA {
        const Values<kBits> values(codes, r, table);
        unroll<kSteps / kRun>([&](auto run) FDK_LAMBDA {
          __m512 part[kM];
          FDK_UNROLL
          for (int m = 0; m < kM; m++) part[m] = _mm512_setzero_ps();
          unroll<kRun>([&](auto i) FDK_LAMBDA {
            constexpr int s = run.value * kRun + i.value;
            FDK_UNROLL
            for (int m = 0; m < kM; m++) {
              const __m512i activations = _mm512_loadu_si512(x[m] + tile * kTileK + s * kStep);
              part[m] = _mm512_dpbf16_ps(part[m], as_bf16(activations), as_bf16(values.v[s]));
              if constexpr (kAffine && i.value == 0) {
                const __m512 sum = _mm512_loadu_ps(x_sums[m] + (tile * kTileK + s * kStep) / 2);
                part[m] = _mm512_fnmadd_ps(group_at<kGroups, s>(zeros, r), sum, part[m]);
              }
            }
          });
          const __m512 scale = group_at<kGroups, run.value * kRun>(scales, r);
          FDK_UNROLL
          for (int m = 0; m < kM; m++) sums[r][m] = _mm512_fmadd_ps(part[m], scale, sums[r][m]);
        });
      };
      if constexpr (kM == 1) {
        unroll<int(kTileRows)>([&](auto r) FDK_LAMBDA { row(std::size_t(r.value)); });
      } else {
        for (std::size_t r = 0; r < kTileRows; r++) row(r);
      }
    });
    for (std::size_t m = 0; m < task.m; m++) {
      for (std::size_t r = 0; r < kTileRows; r++) {
        task.y[m * task.y_stride + stripe * kTileRows + r] = _mm512_reduce_add_ps(sums[r][m]);
      }
    }
  }
}

template <int kBits, int kGroups, int kM>
FDK_INLINE void gemv_groups(const GemvTask& task, std::size_t begin, std::size_t end) {
  if (task.weight->zeros != nullptr) {
    gemv_stripes<kBits, kGroups, true, kM>(task, begin, end);
  } else {
    gemv_stripes<kBits, kGroups, false, kM>(task, begin, end);
  }
}

void gemv_bf16(const GemvTask& task, std::size_t begin, std::size_t end) {
  const std::size_t groups = task.weight->groups_per_tile;
  with_bits(task.weight->bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    if (task.m > 1 && groups == 8) return gemv_groups<b, 8, 4>(task, begin, end);
    if (task.m > 1) return gemv_groups<b, 4, 4>(task, begin, end);
    switch (groups) {
      case 1: return gemv_groups<b, 1, 1>(task, begin, end);
      case 2: return gemv_groups<b, 2, 1>(task, begin, end);
      case 4: return gemv_groups<b, 4, 1>(task, begin, end);
      default: return gemv_groups<b, 8, 1>(task, begin, end);
    }
  });
}

// Up to 4 bits and from 32 positions a group on, a row's table is scaled and rounded itself, and
// the lookup gives W_hat: 10 instructions for 64 codes where scaling each value takes 20.
template <int kBits, int kGroups>
inline constexpr bool kScaledTable = kBits <= 4 && kGroups < 8;

// `entries` less the zero point, times the scale, rounded to bf16; twice, for 5-bit indices.
FDK_INLINE __m512i scaled_table(__m512 entries, float scale, float zero) {
  const __m512 values =
      _mm512_mul_ps(_mm512_sub_ps(entries, _mm512_set1_ps(zero)), _mm512_set1_ps(scale));
  return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(values));
}

// A step's values, scaled and rounded, in order.
template <int kGroups, int s>
FDK_INLINE __m512i scaled_step(__m512i values, const float* scales, const float* zeros,
                               std::size_t r, __m512i natural) {
  const __m512i odd_mask = _mm512_set1_epi32(int(0xFFFF0000));
  const __m512 scale = group_at<kGroups, s>(scales, r), zero = group_at<kGroups, s>(zeros, r);
  const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(values, 16));
  const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(values, odd_mask));
  const __m512bh rounded = _mm512_cvtne2ps_pbh(_mm512_mul_ps(_mm512_sub_ps(odd, zero), scale),
                                               _mm512_mul_ps(_mm512_sub_ps(even, zero), scale));
  return _mm512_permutexvar_epi16(natural, (__m512i)rounded);
}

// W_hat rounded to bf16.
template <int kBits, int kGroups>
void decode_tiles(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                  std::uint16_t* out, std::size_t stride) {
  const Table16<kBits> table(w.table);
  alignas(64) float repeated[16];
  for (unsigned i = 0; i < 16; i++) repeated[i] = w.table[i & ((1u << kBits) - 1)];
  const __m512 entries = _mm512_load_ps(repeated);
  // 16-bit lane 2 i takes lane i, and 2 i + 1 takes 16 + i.
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i natural = _mm512_or_si512(
      lane, _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(16)), 16));
  const bool affine = w.zeros != nullptr;
  for_tiles(w, stripe, begin, end, tile_bytes(kBits), [&](std::size_t tile,
                                                          const std::uint8_t* codes,
                                                          std::size_t slot) FDK_LAMBDA {
    alignas(64) float scales[kGroups * kTileRows], zeros[kGroups * kTileRows] = {};
    load_groups<kGroups, false>(w, slot, scales);
    if (affine) load_groups<kGroups, true>(w, slot, zeros);
    // The block after this one, which other stripes' blocks come before.
    for (std::size_t i = 0; i < tile_bytes(kBits); i += 64) {
      const std::uint8_t* next = codes + (end - begin) * tile_bytes(kBits) + i;
      _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
    }
    for (std::size_t r = 0; r < kTileRows; r++) {
      std::uint16_t* to = out + r * stride + (tile - begin) * kTileK;
      if constexpr (kScaledTable<kBits, kGroups>) {
        constexpr int kRun = kSteps / kGroups;
        const Avx512Codes<kBits> of_row(codes, r);
        __m512i scaled;
        unroll<kSteps>([&](auto step) FDK_LAMBDA {
          constexpr int s = step.value;
          if constexpr (s % kRun == 0) {
            const std::size_t at = std::size_t(s / kRun) * kTileRows + r;
            scaled = scaled_table(entries, scales[at], zeros[at]);
          }
          const __m512i index = _mm512_srli_epi16(of_row.low, 4 * s);
          _mm512_storeu_si512(to + s * kStep, _mm512_permutexvar_epi16(index, scaled));
        });
      } else {
        const Values<kBits> values(codes, r, table);
        unroll<kSteps>([&](auto step) FDK_LAMBDA {
          constexpr int s = step.value;
          _mm512_storeu_si512(to + s * kStep,
                              scaled_step<kGroups, s>(values.v[s], scales, zeros, r, natural));
        });
      }
    }
  });
}

void decode_bf16(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end, void* out,
                 std::size_t stride) {
  std::uint16_t* to = static_cast<std::uint16_t*>(out);
  const std::size_t groups = w.groups_per_tile;
  with_bits(w.bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    if constexpr (b <= 4) {
      if (groups == 1) return decode_tiles<b, 1>(w, stripe, begin, end, to, stride);
      if (groups == 2) return decode_tiles<b, 2>(w, stripe, begin, end, to, stride);
    }
    if (groups == 8) return decode_tiles<b, 8>(w, stripe, begin, end, to, stride);
    return decode_tiles<b, 4>(w, stripe, begin, end, to, stride);
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
  __m512 sums[kRows][kVectors];
  __m256 half_sums[kRows];
  FDK_UNROLL
  for (int r = 0; r < kRows; r++) {
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) sums[r][v] = _mm512_setzero_ps();
    half_sums[r] = _mm256_setzero_ps();
  }
  for (std::size_t i = 0; i < task.depth; i += 2, x += 2 * task.panel) {
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

constexpr int kPanelRows = 12;

void panel_product_bf16(const PanelTask& task) {
  switch (task.panel) {
    case 8: return panel_all<kPanelRows, 0, true>(task);
    case 16: return panel_all<kPanelRows, 1, false>(task);
    case 24: return panel_all<kPanelRows, 1, true>(task);
    default: return panel_all<kPanelRows, 2, false>(task);
  }
}

struct Orders {
  Order natural;
};

constexpr Orders make_orders() {
  Orders orders{};
  for (std::size_t i = 0; i < kTileK; i++) orders.natural[i] = std::uint8_t(i);
  return orders;
}

constexpr Orders kOrders = make_orders();

}  // namespace

extern const Kernels kAvx512Bf16 = {true,       &kOrders.natural, &kOrders.natural,
                                    kPanelRows, 32,               8,
                                    gemv_bf16,  decode_bf16,      panel_product_bf16,
                                    nullptr,    &kAvx512Tables};

}  // namespace fdk
