// The GEMV for one row of bf16 x in 16-bit integers: AVX2.
//
// The values of the codebook must be integer multiples of a power of two. x is rounded to integers
// of 13 to 15 bits with a power of two per tile, so that it loses 2^-13 of the largest value of its
// tile at most. `vpmaddwd` then does 16 products and 8 sums, where float32 takes two FMAs after
// four instructions that widen the values. Sums of 64 positions are exact, below 2^31; then float32
// is used.
//
// The largest x of a tile sets the unit of rounding, which is coarse for a row of the weight that
// is zero there and sums only the rest of x. So a tile most of whose values are rounded is refused
// (mostly_below), and the plain GEMV is used. One-hot x is exact: its value is a power of two times
// at most 8 bits.
//
// Sums are in a unit of y, a power of two, that is multiplied last: a small scale times the unit of
// a tile could be subnormal. linear_gemv.cpp checks for sums that overflow because of this.
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>

#include "x86/codes_avx2-inl.h"
#include "x86/outliers_avx2-inl.h"
#include "common/float_convert.h"
#include "common/kernels.h"
#include "common/simd-inl.h"
#include "x86/scales_x86-inl.h"

namespace fdk {
namespace {

constexpr int kBlocks = int(kTileK) / kBlockPositions;
// Bits of the sum of a lane, of its positions in half a tile, and the most of a level.
constexpr int kSumBits = 31, kPositionBits = 3, kLevelBits = 15;
constexpr int kMostXBits = 15;
// Most bits of a code whose level is looked up.
constexpr int kLookupBits = 4;
// Bounds of x and values, within which their units and the ratios of these are normal floats.
constexpr float kLeast = 0x1p-40f, kMost = 0x1p30f;

// A prepared tile of x.
struct alignas(64) Tile {
  std::int16_t x[kTileK];
  float unit;                    // unit of the products, relative to y_unit
  float y_unit;                  // the largest unit of the products of any tile
  float sums[kBlocks][kFloats];  // sums of x over the blocks of a group, lane by lane
};

// Values as integers: value = (level - zero) * unit. With 5 or more bits levels are the codes; with
// fewer, zero is 0.
struct Levels {
  float unit, zero;
  int x_bits;    // most bits of x with these levels
  unsigned top;  // larger codes have the value of this one
};

// Finds a unit that all values are integer multiples of, and returns the bits of these integers; 0
// if all values are zero or one is out of range.
int common_unit(const Weight& w, float& unit) {
  int least = 127;  // exponent of the lowest set bit
  float largest = 0;
  for (int c = 0; c < 1 << w.bits; c++) {
    const float value = std::fabs(w.table[c]);
    if (value == 0) continue;
    if (!(value >= kLeast && value <= kMost)) return 0;
    const std::uint32_t mantissa = std::bit_cast<std::uint32_t>(value) | 1u << 23;
    least = std::min(least, exponent_of(value) - 23 + std::countr_zero(mantissa));
    largest = std::max(largest, value);
  }
  if (largest == 0) return 0;
  unit = power_of_two(least);
  return exponent_of(largest) + 1 - least;
}

// Returns false if there are no such integers.
bool levels_of(const Weight& w, Levels& out) {
  int bits = common_unit(w, out.unit);
  if (bits == 0) return false;
  out.zero = 0;
  if (w.bits > kLookupBits) {  // values must be equidistant, with that unit as their distance
    out.zero = -w.table[0] / out.unit;
    out.top = top_of(w);
    for (unsigned c = 0; c <= out.top; c++) {
      if ((float(c) - out.zero) * out.unit != w.table[c]) return false;
    }
    bits = w.bits;
  }
  if (bits > kLevelBits) return false;
  out.x_bits = std::min(kMostXBits, kSumBits - kPositionBits - bits);
  return true;
}

bool supports(const Weight& w) {
  Levels levels;
  return levels_of(w, levels);
}

// x :: [tiles * kTileK] float32, the even ones of each 16 positions first. Returns false for x that
// these integers cannot hold: NaN, infinity, outliers, very large or small values.
bool prepare(const Weight& w, const void* x, void* prepared, std::size_t, std::size_t) {
  Levels levels;
  if (!levels_of(w, levels)) return false;
  const float* from = static_cast<const float*>(x);
  Tile* out = static_cast<Tile*>(prepared);
  const int parts = std::max(2, int(w.groups_per_tile)), blocks = kBlocks / parts;
  float y_unit = 0;
  for (std::size_t tile = 0; tile < w.tiles; tile++, from += kTileK, out++) {
    const float largest = largest_of(from);
    if (largest != 0 && !(largest >= kLeast && largest <= kMost)) return false;
    // No bf16 value is so close to the next power of two that it is rounded up to one bit more.
    const int up = levels.x_bits - 1 - exponent_of(std::max(largest, kLeast));
    if (mostly_below(from, power_of_two(7 - up))) return false;
    out->unit = power_of_two(-up) * levels.unit;
    y_unit = std::max(y_unit, out->unit);
    const __m256 factor = _mm256_set1_ps(power_of_two(up));
    __m256i sum = _mm256_setzero_si256();
    for (int b = 0; b < kBlocks; b++) {
      const float* at = from + b * kBlockPositions;
      const __m256i even = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(at), factor));
      const __m256i odd = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(at + kFloats), factor));
      const __m256i words = _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xAA);
      _mm256_store_si256(reinterpret_cast<__m256i*>(out->x) + b, words);
      const __m256i pairs = _mm256_add_epi32(even, odd);
      sum = b % blocks == 0 ? pairs : _mm256_add_epi32(sum, pairs);
      _mm256_storeu_ps(out->sums[b / blocks], _mm256_cvtepi32_ps(sum));
    }
  }
  for (Tile* made = static_cast<Tile*>(prepared); made != out; made++) {
    made->unit /= y_unit;
    made->y_unit = y_unit;
  }
  return true;
}

// Looks levels up as bytes.
template <int kBits>
class LevelLookup {
 public:
  using Row = RowIndices<kBits>;
  LevelLookup(const Weight& w, float unit)
      : tables_([&](unsigned code) {
          return std::uint16_t(std::int16_t(std::lrintf(w.table[code] / unit)));
        }) {}

  // The levels of blocks t and t + 4.
  template <int t>
  FDK_INLINE void at(const Row& row, __m256i& first, __m256i& second) const {
    tables_.at(row.template at<t>(), first, second);
  }

 private:
  ByteTables<kBits> tables_;
};

// Uses codes as levels, at 4 or more bits.
template <int kBits>
struct LevelCodes {
  using Row = RowIndices<kBits>;
  __m256i top;
  FDK_INLINE explicit LevelCodes(unsigned top) : top(_mm256_set1_epi8(char(top))) {}
  template <int t>
  FDK_INLINE void at(const Row& row, __m256i& first, __m256i& second) const {
    const __m256i codes = _mm256_min_epu8(row.template codes<t>(), top);
    const __m256i zero = _mm256_setzero_si256();
    first = _mm256_unpacklo_epi8(codes, zero);
    second = _mm256_unpackhi_epi8(codes, zero);
  }
};

template <>
struct LevelCodes<8> {
  struct Row {
    const __m256i* codes;
    FDK_INLINE Row(const std::uint8_t* tile, std::size_t r)
        : codes(reinterpret_cast<const __m256i*>(tile + r * kTileK)) {}
  };
  __m256i top;
  FDK_INLINE explicit LevelCodes(unsigned top) : top(_mm256_set1_epi8(char(top))) {}
  template <int t>
  FDK_INLINE void at(const Row& row, __m256i& first, __m256i& second) const {
    const __m256i lanes = _mm256_min_epu8(_mm256_loadu_si256(row.codes + t), top);
    first = _mm256_and_si256(lanes, _mm256_set1_epi16(255));
    second = _mm256_srli_epi16(lanes, 8);
  }
};

// The zero points of four rows, or `zero` if the format has none.
FDK_INLINE __m128 load4_zeros_or(const Weight& w, std::size_t slot, float zero) {
  return w.zeros == nullptr ? _mm_set1_ps(zero) : load4_zeros(w, slot);
}

// y = W_hat x for stripes [begin, end). A tile has kParts runs, 2, 4 or 8, that share a scale; a
// larger group repeats its own.
template <class Values, int kBits, int kParts, bool kAffine>
void stripes_of(const Weight& w, const Values values, float zero, const Tile* tiles, float* y,
                std::size_t begin, std::size_t end) {
  constexpr std::size_t kBytes = tile_bytes(kBits);
  constexpr int kHalfParts = kParts / 2, kPartBlocks = kBlocks / kParts;
  const std::size_t shared = w.groups_per_tile == 1 ? 1 : 0;  // both parts share a scale
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    __m256 y_sums[kTileRows];
    FDK_UNROLL
    for (std::size_t r = 0; r < kTileRows; r++) y_sums[r] = _mm256_setzero_ps();
    for_tiles(
        w, stripe, 0, w.tiles, kBytes,
        [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
          const Tile& of_x = tiles[tile];
          const __m256i* x = reinterpret_cast<const __m256i*>(of_x.x);
          alignas(16) float scales[kParts][kTileRows], zeros[kParts][kTileRows];
          FDK_UNROLL
          for (std::size_t p = 0; p < std::size_t(kParts); p++) {
            const std::size_t at = slot + (p >> shared) * kTileRows;
            const __m128 scale = load4_scales(w.scales, at, w.scale_type);
            _mm_store_ps(scales[p], _mm_mul_ps(scale, _mm_set1_ps(of_x.unit)));
            if constexpr (kAffine) _mm_store_ps(zeros[p], load4_zeros_or(w, at, zero));
          }
          for (std::size_t i = 0; i < kBytes; i += 64) {
            _mm_prefetch(reinterpret_cast<const char*>(codes + kPrefetchBytes + i), _MM_HINT_T0);
          }
          unroll<int(kTileRows)>([&](auto row) FDK_LAMBDA {
            constexpr std::size_t r = row.value;
            const typename Values::Row codes_of_row(codes, r);
            const auto add = [&](int part, __m256i integers) FDK_LAMBDA {
              __m256 sum = _mm256_cvtepi32_ps(integers);
              if constexpr (kAffine) {
                sum = _mm256_fnmadd_ps(_mm256_broadcast_ss(&zeros[part][r]),
                                       _mm256_loadu_ps(of_x.sums[part]), sum);
              }
              y_sums[r] = _mm256_fmadd_ps(sum, _mm256_broadcast_ss(&scales[part][r]), y_sums[r]);
            };
            __m256i sums[2];
            unroll<kIndexRegisters>([&](auto i) FDK_LAMBDA {
              constexpr int t = i.value;
              __m256i blocks[2];
              values.template at<t>(codes_of_row, blocks[0], blocks[1]);
              unroll<2>([&](auto half) FDK_LAMBDA {
                constexpr int h = half.value;
                const __m256i of_block =
                    _mm256_madd_epi16(blocks[h], _mm256_load_si256(x + t + 4 * h));
                if constexpr (t % kPartBlocks == 0) {
                  sums[h] = of_block;
                } else {
                  sums[h] = _mm256_add_epi32(sums[h], of_block);
                }
                if constexpr (t % kPartBlocks == kPartBlocks - 1) {
                  add(t / kPartBlocks + h * kHalfParts, sums[h]);
                }
              });
            });
          });
        });
    for (std::size_t r = 0; r < kTileRows; r++) {
      y[stripe * kTileRows + r] = sum_of(y_sums[r]) * tiles->y_unit;
    }
  }
}

template <class Values, int kBits>
FDK_INLINE void gemv_of(const Weight& w, const Values& values, float zero, const Tile* tiles,
                        float* y, std::size_t begin, std::size_t end) {
  const auto with_parts = [&](auto parts) FDK_LAMBDA {
    constexpr int kParts = parts.value;
    if (w.zeros != nullptr || zero != 0) {
      return stripes_of<Values, kBits, kParts, true>(w, values, zero, tiles, y, begin, end);
    }
    return stripes_of<Values, kBits, kParts, false>(w, values, zero, tiles, y, begin, end);
  };
  switch (w.groups_per_tile) {
    case 8:
      return with_parts(Int<8>{});
    case 4:
      return with_parts(Int<4>{});
    default:
      return with_parts(Int<2>{});
  }
}

// Stripes per task: enough to amortise the tables of values that each task builds.
constexpr std::size_t kStripes = 32;

void gemv(const TwoPassTask& task) {
  const Weight& w = *task.weight;
  Levels levels;
  [[maybe_unused]] const bool taken = levels_of(w, levels);
  assert(taken);
  const Tile* tiles = static_cast<const Tile*>(task.prepared);
  float* y = task.y;
  const std::size_t begin = task.begin, end = task.end;
  with_bits(w.bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    if constexpr (b == kLookupBits) {
      if (w.zeros != nullptr) {
        const LevelCodes<b> values((1 << b) - 1);
        return gemv_of<LevelCodes<b>, b>(w, values, levels.zero, tiles, y, begin, end);
      }
    }
    if constexpr (b <= kLookupBits) {
      const LevelLookup<b> values(w, levels.unit);
      gemv_of<LevelLookup<b>, b>(w, values, levels.zero, tiles, y, begin, end);
    } else {
      gemv_of<LevelCodes<b>, b>(w, LevelCodes<b>(levels.top), levels.zero, tiles, y, begin, end);
    }
  });
}

}  // namespace

extern const TwoPassGemv kGemvInt16Avx2 = {supports, sizeof(Tile), prepare, kStripes, gemv};

}  // namespace fdk
