// Looks up codes in a bf16 codebook and loads the scales of a tile: AVX-512 BF16.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "x86/codes_avx512-inl.h"
#include "common/kernels.h"
#include "common/simd-inl.h"
#include "x86/scales_x86-inl.h"

namespace fdk {
namespace {

constexpr int kSteps = 4;  // steps of 32 positions per tile
constexpr std::size_t kStep = kTileK / kSteps;

FDK_INLINE __m512bh as_bf16(__m512i v) { return (__m512bh)v; }

FDK_INLINE std::uint16_t bf16_bits(float value) {
  return std::uint16_t(_mm_cvtsi128_si32(_mm_castps_si128(_mm_set_ss(value))) >> 16 & 0xFFFF);
}

// The codebook in 16-bit entries; for 8 bits its low and its high bytes, which `vpermi2b` looks up
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

  // index: 16-bit lanes with the code in the low bits and any bits above; up to 7 bits.
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

  // One byte of the values of 64 codes; `half` 0 is the low byte.
  FDK_INLINE __m512i bytes_at(__m512i codes, __mmask64 bit7, int half) const {
    const __m512i* u = t + 4 * half;
    return _mm512_mask_blend_epi8(bit7, _mm512_permutex2var_epi8(u[0], codes, u[1]),
                                  _mm512_permutex2var_epi8(u[2], codes, u[3]));
  }
};

// The code of each position of step s in the low bits of 16-bit lanes, any bits above; up to 7
// bits.
template <int kBits, int s>
FDK_INLINE __m512i index_of(const Avx512Codes<kBits>& codes) {
  const __m512i low = _mm512_srli_epi16(codes.low, 4 * s);
  if constexpr (kBits <= 4) {
    return low;
  } else {
    constexpr int up = 4 * s - 4;
    return select_bits(0x000F, low,
                       up >= 0 ? _mm512_srli_epi16(codes.high, up >= 0 ? unsigned(up) : 0)
                               : _mm512_slli_epi16(codes.high, 4));
  }
}

// The values of a row of a tile: v[s] has positions 32 s to 32 s + 31, in order.
template <int kBits>
struct Values {
  __m512i v[kSteps];

  Values() = default;
  FDK_INLINE Values(const std::uint8_t* tile, std::size_t r, const Table16<kBits>& table) {
    const Avx512Codes<kBits> codes(tile, r);
    if constexpr (kBits == 8) {
      // The low bytes of the 16-bit lanes are steps 0 and 1, the high bytes steps 2 and 3.
      for (int i = 0; i < 2; i++) {
        const __m512i q = i == 0 ? codes.low : codes.high;
        const __mmask64 bit7 = _mm512_movepi8_mask(q);
        const __m512i lo = table.bytes_at(q, bit7, 0), hi = table.bytes_at(q, bit7, 1);
        // The other byte of each lane; one masked shuffle instead of a shift and a select (4096 x
        // 4096, 8 bits, warm, Zen 4: 0.85 -> 0.69 ms).
        const __m512i neighbour = _mm512_broadcast_i32x4(
            _mm_set_epi8(14, 15, 12, 13, 10, 11, 8, 9, 6, 7, 4, 5, 2, 3, 0, 1));
        v[i] = _mm512_mask_shuffle_epi8(lo, 0xAAAAAAAAAAAAAAAA, hi, neighbour);
        v[i + 2] = _mm512_mask_shuffle_epi8(hi, 0x5555555555555555, lo, neighbour);
      }
    } else {
      unroll<kSteps>([&](auto step) FDK_LAMBDA {
        constexpr int s = step.value;
        v[s] = table.at(index_of<kBits, s>(codes));
      });
    }
  }
};

// Loads the scales or zero points of a tile, [kGroups][kTileRows]; fewer stored groups are
// repeated.
template <int kGroups, bool kZeros>
FDK_INLINE void load_groups(const Weight& w, std::size_t slot, float* out) {
  const ScaleType type = kZeros ? ScaleType(int(w.zero_type) - 1) : w.scale_type;
  const bool all = w.groups_per_tile == kGroups;
  if (kGroups > 1 && all && type == ScaleType::bf16) {  // the common case, all at once
    const void* stored = kZeros ? w.zeros : w.scales;
    const std::uint16_t* from = static_cast<const std::uint16_t*>(stored) + slot;
    for (int i = 0; i < kGroups * int(kTileRows); i += 8) {
      const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16);
      _mm256_storeu_ps(out + i, _mm256_castsi256_ps(wide));
    }
    return;
  }
  const std::size_t repeats = all ? 1 : kGroups / w.groups_per_tile;
  if (type == ScaleType::bf16) {
    // The dtype is tested once: a test per group took a quarter of the time to dequantise 8 bits.
    const void* stored = kZeros ? w.zeros : w.scales;
    const std::uint16_t* from = static_cast<const std::uint16_t*>(stored) + slot;
    FDK_UNROLL
    for (std::size_t g = 0; g < std::size_t(kGroups); g++) {
      const __m128i four =
          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + g / repeats * kTileRows));
      const __m128i wide = _mm_slli_epi32(_mm_cvtepu16_epi32(four), 16);
      _mm_storeu_ps(out + g * kTileRows, _mm_castsi128_ps(wide));
    }
    return;
  }
  for (std::size_t g = 0; g < std::size_t(kGroups); g++) {
    const std::size_t from = slot + (all ? g : g / repeats) * kTileRows;
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

// The scale or zero point of step s of row r for sums of pairs: 16 positions are half a register.
template <int kGroups, int s>
FDK_INLINE __m512 group_at(const float* groups, std::size_t r) {
  if constexpr (kGroups == 8) {
    return _mm512_mask_blend_ps(0xFF00, _mm512_set1_ps(groups[2 * s * kTileRows + r]),
                                _mm512_set1_ps(groups[(2 * s + 1) * kTileRows + r]));
  } else {
    return _mm512_set1_ps(groups[std::size_t(s * kGroups / kSteps) * kTileRows + r]);
  }
}

// Up to 5 bits and for groups of 32 or more, the codebook of each row and group is scaled and
// rounded, so that the lookup gives W_hat: 10 instructions for 64 codes instead of 20 to scale each
// value.
template <int kBits>
inline constexpr bool kScaledTable = kBits <= 5;

// Tiles whose scaled codebooks are built at once.
constexpr std::size_t kAhead = 8;

// The scaled codebook of a group: (value - zero point) * scale, rounded to bf16. Up to 4 bits it
// has 16 entries, stored once and loaded twice into a register; at 5 bits it has 32.
template <int kBits>
struct ScaledTable {
  static constexpr std::size_t kEntries = kBits == 5 ? 32 : 16;
  __m512 low, high;

  FDK_INLINE explicit ScaledTable(const float* table) {
    alignas(64) float entries[32];
    for (unsigned i = 0; i < 32; i++) entries[i] = table[i & ((1u << kBits) - 1)];
    low = _mm512_load_ps(entries);
    high = _mm512_load_ps(entries + 16);
  }
  FDK_INLINE __m512 times(__m512 values, const float* scale, const float* zero) const {
    return _mm512_mul_ps(_mm512_sub_ps(values, _mm512_set1_ps(*zero)), _mm512_set1_ps(*scale));
  }
  // Stores those of two groups, whose scales and zero points are kTileRows apart: rounding two
  // registers takes as long as one.
  FDK_INLINE void store(const float* scale, const float* zero, std::uint16_t* to) const {
    const float *next_scale = scale + kTileRows, *next_zero = zero + kTileRows;
    if constexpr (kBits == 5) {
      const __m512bh first = _mm512_cvtne2ps_pbh(times(high, scale, zero), times(low, scale, zero));
      const __m512bh second = _mm512_cvtne2ps_pbh(times(high, next_scale, next_zero),
                                                  times(low, next_scale, next_zero));
      _mm512_store_si512(to, (__m512i)first);
      _mm512_store_si512(to + kEntries, (__m512i)second);
    } else {
      const __m512bh both =
          _mm512_cvtne2ps_pbh(times(low, next_scale, next_zero), times(low, scale, zero));
      _mm512_store_si512(to, (__m512i)both);
    }
  }
  static FDK_INLINE __m512i load(const std::uint16_t* from) {
    if constexpr (kBits == 5) return _mm512_load_si512(from);
    return _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(from)));
  }
};

// Builds the scaled codebooks of tiles [begin, end) of a stripe,
// [tiles][kTileRows][kGroups][entries]. They are built several tiles ahead: it takes 50 cycles from
// a scale to its codebook, more than out-of-order execution hides.
template <int kBits, int kGroups>
FDK_INLINE void scale_tables(const Weight& w, const ScaledTable<kBits>& table, std::size_t stripe,
                             std::size_t begin, std::size_t end, std::uint16_t* to) {
  constexpr std::size_t kEntries = ScaledTable<kBits>::kEntries;
  const bool affine = w.zeros != nullptr;
  alignas(64) float scales[kGroups * kTileRows], zeros[kGroups * kTileRows] = {};
  for_tiles(w, stripe, begin, end, 0,
            [&](std::size_t, const std::uint8_t*, std::size_t slot) FDK_LAMBDA {
              load_groups<kGroups, false>(w, slot, scales);
              if (affine) load_groups<kGroups, true>(w, slot, zeros);
              // Keeps GCC 12 from holding the scales in registers and extracting them with 60
              // instructions per tile.
              asm volatile("" : : "r"(scales), "r"(zeros) : "memory");
              for (std::size_t r = 0; r < kTileRows; r++) {
                FDK_UNROLL
                for (std::size_t g = 0; g < std::size_t(kGroups); g += 2, to += 2 * kEntries) {
                  table.store(scales + g * kTileRows + r, zeros + g * kTileRows + r, to);
                }
              }
            });
}

}  // namespace
}  // namespace fdk
