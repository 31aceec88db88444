// Products with 8-bit x: AVX-512 with VBMI and VNNI.
//
// Levels come 64 at a time (int8_avx512bf16_levels.h); `vpdpbusd` adds up their products with four
// codes of x in one 32-bit lane. The sums of four rows then go through a 4 x 4 transposition to
// 128-bit lanes of four rows, as scales lie, and one product scales them all.
#include <immintrin.h>

#include "common/linear_int8.h"
#include "x86/int8_lut_avx512vnni-inl.h"
#include "common/gemv-inl.h"
#include "x86/scales_x86-inl.h"

namespace fdk {
namespace {

constexpr std::size_t kRows = 16;  // of x at once

// Scales or zero points of a tile as they lie, [kGroups][kTileRows], zeros after them.
template <int kGroups>
struct Groups {
  static constexpr int kRegisters = kGroups == 8 ? 2 : 1;
  __m512 raw[kRegisters];

  FDK_INLINE Groups(const void* p, std::size_t slot, bool bytes, ScaleType type) {
    if (!bytes && type == ScaleType::bf16) {  // the usual case, at once
      const auto* from = static_cast<const std::uint16_t*>(p) + slot;
      if constexpr (kGroups == 1) {
        const __m128i four = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
        raw[0] = widen(_mm256_zextsi128_si256(four));
      } else if constexpr (kGroups == 2) {
        const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        raw[0] = widen(_mm256_zextsi128_si256(eight));
      } else {
        for (int i = 0; i < kRegisters; i++) {
          raw[i] = widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 16 * i)));
        }
      }
      return;
    }
    alignas(64) float all[16 * kRegisters] = {};
    for (std::size_t g = 0; g < std::size_t(kGroups); g++) {
      const std::size_t at = slot + g * kTileRows;
      _mm_store_ps(all + g * kTileRows, bytes ? load4_bytes(p, at) : load4_scales(p, at, type));
    }
    for (int i = 0; i < kRegisters; i++) raw[i] = _mm512_load_ps(all + 16 * i);
  }

  static FDK_INLINE __m512 widen(__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }

  // For the sums of register i (of kSums): each group's in the 128-bit lanes that hold it.
  template <int i>
  FDK_INLINE __m512 lanes() const {
    if constexpr (kGroups == 1) return _mm512_shuffle_f32x4(raw[0], raw[0], 0x00);
    if constexpr (kGroups == 2) return _mm512_shuffle_f32x4(raw[0], raw[0], 0x50);
    if constexpr (kGroups == 4) return _mm512_shuffle_f32x4(raw[0], raw[0], i == 0 ? 0xA0 : 0xF5);
    return _mm512_shuffle_f32x4(raw[0], raw[kRegisters - 1], i == 0 ? 0x44 : 0xEE);
  }
};

// The sums of x of each group, as Groups has scales.
template <int kGroups, int i>
FDK_INLINE __m512 sums_of_x(const float* p) {
  const __m512i quarter = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  if constexpr (kGroups == 1) {
    return _mm512_set1_ps(*p);
  } else if constexpr (kGroups == 2) {
    const __m128i two = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm512_permutexvar_ps(quarter, _mm512_castsi512_ps(_mm512_zextsi128_si512(two)));
  } else {
    return _mm512_permutexvar_ps(quarter, _mm512_zextps128_ps512(_mm_loadu_ps(p + 4 * i)));
  }
}

// Four registers' 32-bit lanes, summed to one: lane r of each 128 bits is the sum of those of a[r].
FDK_INLINE __m512i sum_of_rows(const __m512i (&a)[kTileRows]) {
  const __m512i r01 =
      _mm512_add_epi32(_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]));
  const __m512i r23 =
      _mm512_add_epi32(_mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3]));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(r01, r23), _mm512_unpackhi_epi64(r01, r23));
}

FDK_INLINE __m128 sum_of_lanes(__m512 v) {
  const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  return _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
}

template <int kBits, int kGroups, bool kOne>
void gemv_stripes(const Int8Task& task, std::size_t begin, std::size_t end) {
  constexpr std::size_t kBytes = tile_bytes(kBits);
  // Registers 0 and 1 hold the same groups, or different ones.
  constexpr int kSums = kGroups <= 2 ? 1 : 2;
  const Weight& w = *task.weight;
  const ByteTable<kBits> table(task.levels);
  const __m512 centre = _mm512_set1_ps(task.centre);
  const std::size_t rows = kOne ? 1 : task.m;
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    __m512 y_sums[kOne ? 1 : kRows];
    for (std::size_t m = 0; m < rows; m++) y_sums[m] = _mm512_setzero_ps();
    for_tiles(w, stripe, 0, w.tiles, kBytes,
              [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
                for (std::size_t i = 0; i < kBytes; i += 64) {
                  _mm_prefetch(reinterpret_cast<const char*>(codes + kPrefetch + i), _MM_HINT_T0);
                }
                const Groups<kGroups> scales(w.scales, slot, false, w.scale_type);
                __m512 off[Groups<kGroups>::kRegisters];
                FDK_UNROLL
                for (int i = 0; i < Groups<kGroups>::kRegisters; i++) off[i] = centre;
                if (w.zeros != nullptr) {
                  const bool bytes = w.zero_type == ZeroType::u8;
                  const ScaleType type = bytes ? ScaleType::bf16 : ScaleType(int(w.zero_type) - 1);
                  const Groups<kGroups> zeros(w.zeros, slot, bytes, type);
                  FDK_UNROLL
                  for (int i = 0; i < Groups<kGroups>::kRegisters; i++) {
                    off[i] = _mm512_add_ps(off[i], zeros.raw[i]);
                  }
                }
                FDK_UNROLL
                for (int i = 0; i < Groups<kGroups>::kRegisters; i++) {
                  off[i] = _mm512_mul_ps(off[i], scales.raw[i]);
                }
                __m512i levels[kTileRows][2];
                unroll<int(kTileRows)>([&](auto r) FDK_LAMBDA {
                  __m512i of_row[2];
                  load_codes<kBits>(codes, std::size_t(r.value), of_row);
                  levels[r.value][0] = table.at(of_row[0]);
                  levels[r.value][1] = table.at(of_row[1]);
                });
                const auto one_row = [&](std::size_t m) FDK_LAMBDA {
                  const std::size_t at = m * w.tiles + tile;
                  const std::int8_t* x = task.x + at * kTileK;
                  const __m512i x0 = _mm512_loadu_si512(x), x1 = _mm512_loadu_si512(x + 64);
                  const __m512 x_scale = _mm512_set1_ps(task.x_scales[at]);
                  __m512 sum = y_sums[m];
                  unroll<kSums>([&](auto i) FDK_LAMBDA {
                    __m512i dots[kTileRows];
                    FDK_UNROLL
                    for (std::size_t r = 0; r < kTileRows; r++) {
                      const __m512i zero = _mm512_setzero_si512();
                      if constexpr (kSums == 1) {
                        dots[r] = _mm512_dpbusd_epi32(zero, levels[r][0], x0);
                        dots[r] = _mm512_dpbusd_epi32(dots[r], levels[r][1], x1);
                      } else {
                        dots[r] =
                            _mm512_dpbusd_epi32(zero, levels[r][i.value], i.value == 0 ? x0 : x1);
                      }
                    }
                    const __m512 scale = _mm512_mul_ps(scales.template lanes<i.value>(), x_scale);
                    sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum_of_rows(dots)), scale, sum);
                  });
                  unroll<Groups<kGroups>::kRegisters>([&](auto i) FDK_LAMBDA {
                    const float* x_sums = task.x_sums + at * std::size_t(kGroups);
                    sum = _mm512_fnmadd_ps(off[i.value], sums_of_x<kGroups, i.value>(x_sums), sum);
                  });
                  y_sums[m] = sum;
                };
                if constexpr (kOne) {
                  one_row(0);
                } else {
                  for (std::size_t m = 0; m < rows; m++) one_row(m);
                }
              });
    for (std::size_t m = 0; m < rows; m++) {
      _mm_storeu_ps(task.y + m * task.y_stride + (stripe - begin) * kTileRows,
                    sum_of_lanes(y_sums[m]));
    }
  }
}

void gemv(const Int8Task& task, std::size_t begin, std::size_t end) {
  with_bits(task.weight->bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    with_groups(task.weight->groups_per_tile, [&](auto groups) FDK_LAMBDA {
      constexpr int g = groups.value;
      if (task.m == 1) return gemv_stripes<b, g, true>(task, begin, end);
      return gemv_stripes<b, g, false>(task, begin, end);
    });
  });
}

void stage(const float* x, std::size_t groups, const Int8Tile& out) {
  constexpr int kParts = int(kTileK / 16);
  __m512 parts[kParts];
  __m512i most = _mm512_setzero_si512();
  FDK_UNROLL
  for (int i = 0; i < kParts; i++) {
    parts[i] = _mm512_loadu_ps(x + 16 * i);
    // As integers, magnitudes order as they should, and NaN is the largest.
    most = _mm512_max_epu32(most, _mm512_castps_si512(_mm512_abs_ps(parts[i])));
  }
  const float largest =
      _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(int(_mm512_reduce_max_epu32(most)))));
  const TileRounding rounding = rounding_of(largest);
  *out.scale = rounding.scale;
  const __m512 inverse = _mm512_set1_ps(rounding.inverse);
  std::int32_t sums[kParts];
  FDK_UNROLL
  for (int i = 0; i < kParts; i++) {
    // Where x is not finite, its product with zero is no number, and is masked.
    const __m512i codes = _mm512_maskz_cvtps_epi32(rounding.is_zero ? 0 : __mmask16(0xFFFF),
                                                   _mm512_mul_ps(parts[i], inverse));
    // Positions 32 to 63 and 64 to 95 change places.
    const int at = i >= 2 && i < 4 ? i + 2 : i >= 4 && i < 6 ? i - 2 : i;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out.codes + 16 * at), _mm512_cvtepi32_epi8(codes));
    sums[i] = _mm512_reduce_add_epi32(codes);
  }
  const int parts_of_group = kParts / int(groups);
  for (int g = 0; g < int(groups); g++) {
    out.sums[g] = 0;
    for (int i = 0; i < parts_of_group; i++) out.sums[g] += sums[g * parts_of_group + i];
  }
}

}  // namespace

extern const Int8Kernels kAvx512Bf16Int8 = {true, kRows, stage, gemv};

}  // namespace fdk
