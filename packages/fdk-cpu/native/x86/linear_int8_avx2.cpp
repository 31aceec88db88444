// Products with 8-bit x: AVX2.
//
// Levels are looked up 32 codes at a time (`vpshufb`, a tree of them above 4 bits). A product is
// |level| times x with the sign of the level, because one factor of `vpmaddubsw` is unsigned; two
// products of at most 128 * 127 do not saturate its 16 bits.
//
// The codes of a row fill registers [s][h] of 32 bytes: fields s of 16-bit lanes 16 h to 16 h + 15,
// split so that each 64 bits belong to one group. With p = 32 s + 16 h they have positions p to p +
// 7, p + 64 to p + 71, p + 8 to p + 15 and p + 72 to p + 79. This is the order of x.
#include <immintrin.h>

#include <cstring>

#include "common/linear_int8.h"
#include "common/simd-inl.h"
#include "x86/scales_x86-inl.h"

namespace fdk {
namespace {

constexpr std::size_t kRows = 16;      // rows of x at once
constexpr std::size_t kRegisters = 4;  // registers of codes per row

FDK_INLINE __m256i load(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

FDK_INLINE __m256i select(std::uint8_t mask, __m256i a, __m256i b) {
  const __m256i m = _mm256_set1_epi8(char(mask));
  return _mm256_or_si256(_mm256_and_si256(m, a), _mm256_andnot_si256(m, b));
}

// Lanes 0 to 15 and 16 to 31 of a plane with fields 4 bits apart; in each 128 bits the low bytes
// come first, then the high ones.
template <int kWidth>
FDK_INLINE void load_plane(const std::uint8_t* p, __m256i (&out)[2]) {
  const __m256i split = _mm256_broadcastsi128_si256(
      _mm_set_epi8(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0));
  if constexpr (kWidth == 4) {
    out[0] = _mm256_shuffle_epi8(load(p), split);
    out[1] = _mm256_shuffle_epi8(load(p + 32), split);
  } else if constexpr (kWidth == 2) {
    out[0] = _mm256_shuffle_epi8(load(p), split);
    out[1] = _mm256_srli_epi16(out[0], 2);
  } else {
    static_assert(kWidth == 1);
    const __m128i quarter = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m256i both = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(quarter), split);
    out[0] = _mm256_blend_epi32(both, _mm256_srli_epi16(both, 1), 0xF0);
    out[1] = _mm256_srli_epi16(out[0], 2);
  }
}

// The codes of row r of a tile, [s][h]; bits above a code are zero.
template <int kBits>
FDK_INLINE void load_codes(const std::uint8_t* tile, std::size_t r, __m256i (&out)[kRegisters]) {
  constexpr Planes planes = planes_of(kBits);
  const __m256i mask = _mm256_set1_epi8(char((1 << kBits) - 1));
  const auto row_of = [&](const Plane& p)
                          FDK_LAMBDA { return tile + p.offset + r * p.row_bytes(); };
  if constexpr (kBits == 8) {  // lanes 0 to 31 are field 0 of steps 0 and 2, the others of 1 and 3
    load_plane<4>(tile + r * 128, reinterpret_cast<__m256i(&)[2]>(out[0]));
    load_plane<4>(tile + r * 128 + 64, reinterpret_cast<__m256i(&)[2]>(out[2]));
  } else {
    __m256i low[2], high[2];
    load_plane<planes.plane[0].width>(row_of(planes.plane[0]), low);
    if constexpr (kBits == 3) load_plane<1>(row_of(planes.plane[1]), high);
    if constexpr (kBits > 4) load_plane<planes.plane[1].width>(row_of(planes.plane[1]), high);
    if constexpr (kBits == 7) {
      __m256i top[2];
      load_plane<1>(row_of(planes.plane[2]), top);
      FDK_UNROLL
      for (int h = 0; h < 2; h++) high[h] = select(0x33, high[h], _mm256_slli_epi16(top[h], 2));
    }
    FDK_UNROLL
    for (int h = 0; h < 2; h++) {
      if constexpr (kBits == 3) low[h] = select(0x33, low[h], _mm256_slli_epi16(high[h], 2));
      __m256i even = low[h], odd = _mm256_srli_epi16(low[h], 4);
      if constexpr (kBits > 4) {
        even = select(0x0F, even, _mm256_slli_epi16(high[h], 4));
        odd = select(0x0F, odd, high[h]);
      }
      out[h] = _mm256_and_si256(even, mask);
      out[2 + h] = _mm256_and_si256(odd, mask);
    }
  }
}

// The levels of 32 codes, by their low four bits and then the upper ones.
template <int kCount>
FDK_INLINE __m256i look_up(const std::uint8_t* levels, __m256i codes, __m256i nibbles) {
  if constexpr (kCount == 16) {
    const __m128i* table = reinterpret_cast<const __m128i*>(levels);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table)), nibbles);
  } else {
    constexpr int kUp = kCount == 32 ? 3 : kCount == 64 ? 2 : kCount == 128 ? 1 : 0;
    return _mm256_blendv_epi8(look_up<kCount / 2>(levels, codes, nibbles),
                              look_up<kCount / 2>(levels + kCount / 2, codes, nibbles),
                              _mm256_slli_epi16(codes, kUp));
  }
}

// The levels of a row of a tile.
struct RowLevels {
  __m256i level[kRegisters], magnitude[kRegisters];
};

template <int kBits>
FDK_INLINE RowLevels decode_row(const std::uint8_t* tile, std::size_t r, const std::uint8_t* levels,
                                bool affine) {
  constexpr int kCount = kBits <= 4 ? 16 : 1 << kBits;
  RowLevels out;
  __m256i codes[kRegisters];
  load_codes<kBits>(tile, r, codes);
  FDK_UNROLL
  for (std::size_t i = 0; i < kRegisters; i++) {
    __m256i level = codes[i];
    if (!affine) {
      const __m256i nibbles = _mm256_and_si256(codes[i], _mm256_set1_epi8(15));
      level = look_up<kCount>(levels, codes[i], kBits > 4 ? nibbles : codes[i]);
    } else if constexpr (kBits == 8) {
      level = _mm256_xor_si256(level, _mm256_set1_epi8(char(128)));
    }
    out.level[i] = level;
    out.magnitude[i] = _mm256_abs_epi8(level);
  }
  return out;
}

// Products of the levels of a row with x, in 32-bit lanes, for kSums sets of groups.
template <int kSums>
FDK_INLINE void dots_of(const RowLevels& levels, const std::int8_t* x, std::size_t r,
                        __m256i (&dots)[kSums][kTileRows]) {
  constexpr std::size_t kCount = kRegisters / std::size_t(kSums);
  const __m256i one = _mm256_set1_epi16(1);
  FDK_UNROLL
  for (std::size_t i = 0; i < kRegisters; i++) {
    const __m256i signed_x = _mm256_sign_epi8(load(x + 32 * i), levels.level[i]);
    const __m256i pairs = _mm256_maddubs_epi16(levels.magnitude[i], signed_x);
    const __m256i fours = _mm256_madd_epi16(pairs, one);
    __m256i& dot = dots[i / kCount][r];
    dot = i % kCount == 0 ? fours : _mm256_add_epi32(dot, fours);
  }
}

// Sums of the groups in the lower and in the upper 64 bits of each 128; row r is lane r of each.
struct Sums {
  __m256 lower, upper;
};

FDK_INLINE Sums sums_of(const __m256i (&dots)[kTileRows]) {
  const __m256 r01 = _mm256_castsi256_ps(_mm256_hadd_epi32(dots[0], dots[1]));
  const __m256 r23 = _mm256_castsi256_ps(_mm256_hadd_epi32(dots[2], dots[3]));
  return {_mm256_cvtepi32_ps(_mm256_castps_si256(_mm256_shuffle_ps(r01, r23, 0x88))),
          _mm256_cvtepi32_ps(_mm256_castps_si256(_mm256_shuffle_ps(r01, r23, 0xDD)))};
}

// The scales of a tile in both halves, and the factor of the sums of x in the lower half.
template <int kGroups>
struct Groups {
  __m256 scale[kGroups], off[kGroups];

  FDK_INLINE Groups(const Weight& w, std::size_t slot, float centre) {
    FDK_UNROLL
    for (std::size_t g = 0; g < std::size_t(kGroups); g++) {
      const std::size_t at = slot + g * kTileRows;
      const __m128 four = load4_scales(w.scales, at, w.scale_type);
      __m128 zero = _mm_set1_ps(centre);
      if (w.zero_type == ZeroType::u8) {
        zero = _mm_add_ps(zero, load4_bytes(w.zeros, at));
      } else if (w.zero_type != ZeroType::none) {
        zero = _mm_add_ps(zero, load4_scales(w.zeros, at, ScaleType(int(w.zero_type) - 1)));
      }
      scale[g] = _mm256_broadcast_ps(&four);
      off[g] = _mm256_zextps128_ps256(_mm_mul_ps(four, zero));
    }
  }
};

template <int kBits, int kGroups, bool kOne>
void gemv_stripes(const Int8Task& task, std::size_t begin, std::size_t end) {
  constexpr std::size_t kBytes = tile_bytes(kBits);
  // Registers with the same groups share a lower and an upper sum.
  constexpr int kSums = kGroups <= 2 ? 1 : kGroups / 2;
  const Weight& w = *task.weight;
  const std::size_t rows = kOne ? 1 : task.m;
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    __m256 y_sums[kRows];
    for (std::size_t m = 0; m < rows; m++) y_sums[m] = _mm256_setzero_ps();
    for_tiles(
        w, stripe, 0, w.tiles, kBytes,
        [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
          for (std::size_t i = 0; i < kBytes; i += 64) {
            _mm_prefetch(reinterpret_cast<const char*>(codes + kPrefetchBytes + i), _MM_HINT_T0);
          }
          const Groups<kGroups> groups(w, slot, task.centre);
          const bool affine = w.zeros != nullptr;
          RowLevels levels[kOne ? 1 : kTileRows];
          for (std::size_t r = 0; !kOne && r < kTileRows; r++) {
            levels[r] = decode_row<kBits>(codes, r, task.levels, affine);
          }
          for (std::size_t m = 0; m < rows; m++) {
            const std::size_t at = m * w.tiles + tile;
            __m256i dots[kSums][kTileRows];
            unroll<int(kTileRows)>([&](auto r) FDK_LAMBDA {
              // One row of x uses the levels in registers, more rows from memory.
              if constexpr (kOne)
                levels[0] = decode_row<kBits>(codes, r.value, task.levels, affine);
              dots_of<kSums>(levels[kOne ? 0 : r.value], task.x + at * kTileK, r.value, dots);
            });
            const __m256 x_scale = _mm256_set1_ps(task.x_scales[at]);
            __m256 sum = y_sums[m];
            unroll<kSums>([&](auto i) FDK_LAMBDA {
              const Sums sums = sums_of(dots[i.value]);
              constexpr int lower = kGroups <= 2 ? 0 : i.value;
              constexpr int upper = kGroups == 1 ? 0 : lower + kGroups / 2;
              sum = _mm256_fmadd_ps(sums.lower, _mm256_mul_ps(groups.scale[lower], x_scale), sum);
              sum = _mm256_fmadd_ps(sums.upper, _mm256_mul_ps(groups.scale[upper], x_scale), sum);
            });
            FDK_UNROLL
            for (std::size_t g = 0; g < std::size_t(kGroups); g++) {
              const __m256 x_sum = _mm256_set1_ps(task.x_sums[at * std::size_t(kGroups) + g]);
              sum = _mm256_fnmadd_ps(groups.off[g], x_sum, sum);
            }
            y_sums[m] = sum;
          }
        });
    for (std::size_t m = 0; m < rows; m++) {
      _mm_storeu_ps(
          task.y + m * task.y_stride + (stripe - begin) * kTileRows,
          _mm_add_ps(_mm256_castps256_ps128(y_sums[m]), _mm256_extractf128_ps(y_sums[m], 1)));
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
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i most = _mm256_setzero_si256();
  for (std::size_t i = 0; i < kTileK; i += 8) {
    // Compared as integers, magnitudes keep their order and NaN is the largest.
    most = _mm256_max_epi32(most, _mm256_and_si256(load(x + i), magnitude));
  }
  alignas(32) std::int32_t codes[kTileK];
  _mm256_store_si256(reinterpret_cast<__m256i*>(codes), most);
  std::int32_t bits = 0;
  for (int i = 0; i < 8; i++) bits = codes[i] > bits ? codes[i] : bits;
  float largest;
  std::memcpy(&largest, &bits, sizeof largest);
  const TileRounding rounding = rounding_of(largest);
  *out.scale = rounding.scale;
  // The codes of x that is not finite are masked to zero.
  const __m256i kept = _mm256_set1_epi32(rounding.is_zero ? 0 : -1);
  const __m256 inverse = _mm256_set1_ps(rounding.inverse);
  for (std::size_t i = 0; i < kTileK; i += 8) {
    const __m256i rounded = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse));
    _mm256_store_si256(reinterpret_cast<__m256i*>(codes + i), _mm256_and_si256(rounded, kept));
  }
  for (std::size_t g = 0; g < groups; g++) out.sums[g] = 0;
  const std::size_t size = kTileK / groups;
  for (std::size_t g = 0; g < groups; g++) {
    for (std::size_t i = g * size; i < (g + 1) * size; i++) out.sums[g] += codes[i];
  }
  for (std::size_t i = 0; i < kTileK; i++) {
    const std::size_t block = i / 32, of_block = i % 32;  // [s][h], 8 positions per quarter
    const std::size_t from = 16 * block + 8 * (of_block / 16) + 64 * (of_block / 8 % 2);
    out.codes[i] = std::int8_t(codes[from + i % 8]);
  }
}

}  // namespace

extern const Int8Kernels kInt8Avx2 = {false, kRows, quantise_x, gemv};

}  // namespace fdk
