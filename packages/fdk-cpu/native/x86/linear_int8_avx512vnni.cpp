// Products with 8-bit x: AVX-512 with VBMI and VNNI.
//
// Levels are looked up 64 at a time, and `vpdpbusd` adds their products with four codes of x to one
// 32-bit lane. A 4 x 4 transposition of the sums of four rows gives 128-bit lanes of four rows, the
// order of the scales, so that one product scales them all.
#include <immintrin.h>

#include <array>

#include "common/layout.h"
#include "common/linear_int8.h"
#include "common/simd-inl.h"
#include "x86/codes_avx512-inl.h"
#include "x86/scales_x86-inl.h"

namespace fdk {
namespace {

// Lookup of levels. The level of a code is one byte, level + 128, looked up 64 codes at a time
// (`vpermb`). The bytes of the layout's 16-bit lanes are 64 positions apart, so the codes are split
// first: the lower half of a register gets the low bytes, the upper half the high ones, and no
// 32-bit lane mixes two groups. This is the order of x:
//
//   register 0: positions 0 to 31, 64 to 95      register 1: positions 32 to 63, 96 to 127

using Index = std::array<std::uint8_t, 64>;

// The source of byte p of a split register in the 16 kWidth bytes of a plane's row.
template <int kWidth>
constexpr Index split_index() {
  Index index{};
  for (unsigned p = 0; p < 64; p++) {
    index[p] = std::uint8_t(2 * (p % 32 % (8 * unsigned(kWidth))) + p / 32);
  }
  return index;
}
template <int kWidth>
alignas(64) inline constexpr Index kSplit = split_index<kWidth>();

// A 16-bit shift for each 8 bytes of a half register: 0, 1, 2, 3 or twice that.
FDK_INLINE __m512i shifts_of(long long a, long long b, long long c, long long d) {
  constexpr long long kOne = 0x0001000100010001;
  return _mm512_set_epi64(d * kOne, c * kOne, b * kOne, a * kOne, d * kOne, c * kOne, b * kOne,
                          a * kOne);
}

// A split plane, with the fields of a byte 4 bits apart as in codes_avx512-inl.h.
template <int kWidth>
FDK_INLINE __m512i load_split(const std::uint8_t* p) {
  const __m512i index = _mm512_load_si512(kSplit<kWidth>.data());
  if constexpr (kWidth == 4) {
    return _mm512_permutexvar_epi8(index, _mm512_loadu_si512(p));
  } else if constexpr (kWidth == 2) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m512i both = _mm512_permutexvar_epi8(index, _mm512_castsi256_si512(half));
    return _mm512_srlv_epi16(both, shifts_of(0, 0, 2, 2));
  } else {
    static_assert(kWidth == 1);
    const __m128i quarter = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m512i both = _mm512_permutexvar_epi8(index, _mm512_castsi128_si512(quarter));
    return _mm512_srlv_epi16(both, shifts_of(0, 1, 2, 3));
  }
}

// A plane of 1 bit above one of 2 bits, at place 2 of the fields.
FDK_INLINE __m512i load_split_top(const std::uint8_t* p) {
  const __m512i index = _mm512_load_si512(kSplit<1>.data());
  const __m128i quarter = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m512i both = _mm512_permutexvar_epi8(index, _mm512_castsi128_si512(quarter));
  // Rotating 32 bits by 2, 1, 0 and -1 carries nothing into the places that are used.
  const __m512i left = _mm512_set_epi32(31, 31, 0, 0, 1, 1, 2, 2, 31, 31, 0, 0, 1, 1, 2, 2);
  return _mm512_rolv_epi32(both, left);
}

// The codes of row r of a tile in the bytes of two registers; bits above a code are undefined.
template <int kBits>
FDK_INLINE void load_codes(const std::uint8_t* tile, std::size_t r, __m512i (&out)[2]) {
  constexpr Planes planes = planes_of(kBits);
  const auto row_of = [&](const Plane& p)
                          FDK_LAMBDA { return tile + p.offset + r * p.row_bytes(); };
  if constexpr (kBits == 8) {
    const __m512i index = _mm512_load_si512(kSplit<4>.data());
    out[0] = _mm512_permutexvar_epi8(index, _mm512_loadu_si512(tile + r * 128));
    out[1] = _mm512_permutexvar_epi8(index, _mm512_loadu_si512(tile + r * 128 + 64));
    return;
  } else {
    __m512i low = load_split<planes.plane[0].width>(row_of(planes.plane[0]));
    if constexpr (kBits == 3)
      low = select_bits(0x3333, low, load_split_top(row_of(planes.plane[1])));
    out[0] = low;
    out[1] = _mm512_srli_epi16(low, 4);
    if constexpr (kBits > 4) {
      __m512i high = load_split<planes.plane[1].width>(row_of(planes.plane[1]));
      if constexpr (kBits == 7) {
        high = select_bits(0x3333, high, load_split_top(row_of(planes.plane[2])));
      }
      out[0] = select_bits(0x0F0F, out[0], _mm512_slli_epi16(high, 4));
      out[1] = select_bits(0x0F0F, out[1], high);
    }
  }
}

// The levels of 64 codes; the table repeats, so that bits above a code do not matter.
template <int kBits>
struct ByteTable {
  static constexpr int kRegisters = kBits <= 6 ? 1 : kBits == 7 ? 2 : 4;
  __m512i t[kRegisters];

  FDK_INLINE explicit ByteTable(const std::uint8_t* levels) {
    for (int i = 0; i < kRegisters; i++) t[i] = _mm512_loadu_si512(levels + 64 * i);
  }
  FDK_INLINE __m512i at(__m512i codes) const {
    if constexpr (kBits <= 6) {
      return _mm512_permutexvar_epi8(codes, t[0]);
    } else if constexpr (kBits == 7) {
      return _mm512_permutex2var_epi8(t[0], codes, t[1]);
    } else {
      return _mm512_mask_blend_epi8(_mm512_movepi8_mask(codes),
                                    _mm512_permutex2var_epi8(t[0], codes, t[1]),
                                    _mm512_permutex2var_epi8(t[2], codes, t[3]));
    }
  }
};

constexpr std::size_t kRows = 16;  // rows of x at once

// The scales or zero points of a tile, [kGroups][kTileRows], padded with zeros.
template <int kGroups>
struct Groups {
  static constexpr int kRegisters = kGroups == 8 ? 2 : 1;
  __m512 raw[kRegisters];

  FDK_INLINE Groups(const void* p, std::size_t slot, bool bytes, ScaleType type) {
    if (!bytes && type == ScaleType::bf16) {  // the common case, all at once
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

  // The scale of each group in the 128-bit lanes of its sums, for register i of kSums.
  template <int i>
  FDK_INLINE __m512 lanes() const {
    if constexpr (kGroups == 1) return _mm512_shuffle_f32x4(raw[0], raw[0], 0x00);
    if constexpr (kGroups == 2) return _mm512_shuffle_f32x4(raw[0], raw[0], 0x50);
    if constexpr (kGroups == 4) return _mm512_shuffle_f32x4(raw[0], raw[0], i == 0 ? 0xA0 : 0xF5);
    return _mm512_shuffle_f32x4(raw[0], raw[kRegisters - 1], i == 0 ? 0x44 : 0xEE);
  }
};

// The sums of x of each group, in the same lanes.
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

// Sums the 32-bit lanes of four registers: lane r of each 128 bits is the sum of those of a[r].
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
  // Registers 0 and 1 have the same groups, or different ones.
  constexpr int kSums = kGroups <= 2 ? 1 : 2;
  const Weight& w = *task.weight;
  const ByteTable<kBits> table(task.levels);
  const __m512 centre = _mm512_set1_ps(task.centre);
  const std::size_t rows = kOne ? 1 : task.m;
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    __m512 y_sums[kOne ? 1 : kRows];
    for (std::size_t m = 0; m < rows; m++) y_sums[m] = _mm512_setzero_ps();
    for_tiles(
        w, stripe, 0, w.tiles, kBytes,
        [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
          for (std::size_t i = 0; i < kBytes; i += 64) {
            _mm_prefetch(reinterpret_cast<const char*>(codes + kPrefetchBytes + i), _MM_HINT_T0);
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
                  dots[r] = _mm512_dpbusd_epi32(zero, levels[r][i.value], i.value == 0 ? x0 : x1);
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

void quantise_x(const float* x, std::size_t groups, const Int8Tile& out) {
  constexpr int kParts = int(kTileK / 16);
  __m512 parts[kParts];
  __m512i most = _mm512_setzero_si512();
  FDK_UNROLL
  for (int i = 0; i < kParts; i++) {
    parts[i] = _mm512_loadu_ps(x + 16 * i);
    // Compared as integers, magnitudes keep their order and NaN is the largest.
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
    // The codes of x that is not finite are masked to zero.
    const __m512i codes = _mm512_maskz_cvtps_epi32(rounding.is_zero ? 0 : __mmask16(0xFFFF),
                                                   _mm512_mul_ps(parts[i], inverse));
    // Positions 32 to 63 and 64 to 95 are swapped.
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

extern const Int8Kernels kInt8Avx512Vnni = {true, kRows, quantise_x, gemv};

}  // namespace fdk
