// 1 and 2 bits by tables over the activations: AVX-512 with VBMI and VNNI.
//
// The idea is T-MAC's: four bits of a row hold the codes of 4 or 2 activations, and the 16 sums of
// activation times value that they may stand for are computed once, for all rows. A lookup then
// does 4 or 2 products. Here the sums are 16-bit integers, by a power of two for each tile of x, so
// that a sum errs by at most 2^-13 of the largest product. They are looked up in two bytes,
// 255 high + low (`vpermb`, 4 tables a register, 16 rows at a time), and `vpdpbusd` multiplies the
// bytes by 1 and 255 and adds them up.
//
// A row whose value is zero where x is largest errs by as much and has only the rest of x. So a
// tile whose values are mostly below its largest by more than kOutlier is refused: gemv takes x.
//
// Where x has one nonzero, the sum is value times x, rounded. With x = 1 nothing is rounded off if
// the values of the codebook lie within 2^5 (1 bit: 2^4) of each other; other codebooks are
// refused.
//
// Registers of the codes of 16 rows, [h][t]: byte 4 row + i of register t belongs to table 4 t + i
// of step 2 h of 32 positions (its low four bits) and of step 2 h + 1 (its high ones). Table j of a
// step is over positions j, j + 8, j + 16 and j + 24 at 1 bit, and j and j + 16 at 2.
#include <immintrin.h>

#include <array>
#include <bit>

#include "kernels.h"
#include "simd_float.h"
#include "x86_scales.h"

namespace fdk {
namespace {

constexpr int kSteps = 4;  // of 32 positions, a tile
constexpr std::size_t kStep = kTileK / kSteps;
constexpr std::size_t kStripesAtOnce = 4;  // of 4 rows: the 16 dwords of a register
// Registers of tables of a step.
template <int kBits>
inline constexpr int kRegisters = 2 * kBits;
// The exponent of the largest product, as an integer: the sum of 4 or 2 of them fits 16 bits.
template <int kBits>
inline constexpr int kLargest = 11 + kBits;

// How far half of the values of a tile may lie below its largest. The sums of a tile (32 of 4
// products) err by 4e-4 of its largest product (root mean square), and 128 values of 2^-6 of that
// make a sum of 0.18: 0.2 %, as one bf16 rounding. In a tile of normal values an outlier of 60
// deviations is always refused, one of 20 never. Of 3000 rows of 4096 normal or Laplace values none
// is refused, of silu(a) b with normal a and b 4 %.
constexpr float kOutlier = 0x1p-6f;

// What is kept of a tile of x.
template <int kBits>
struct alignas(64) TileTables {
  std::uint8_t sums[kSteps][kRegisters<kBits>][2][64];  // low bytes, then high ones
  float x_sums[kSteps];                                 // of x, by group: for zero points
  float unit;                                           // of the sums
};

int exponent_of(float value) { return int(std::bit_cast<std::uint32_t>(value) >> 23 & 0xFF) - 127; }
float power_of_two(int exponent) {  // a normal number
  return std::bit_cast<float>(std::uint32_t(exponent + 127) << 23);
}

// Four products of kLargest = 12 reach 2^15, two bytes as they are used here 255 * 127 + 255: this
// much less.
int exponent_of_product(float largest) { return exponent_of(largest * 1.004f); }

float largest_value(const Weight& w) {
  float largest = 0;
  for (int c = 0; c < 1 << w.bits; c++) {
    const float magnitude = w.table[c] < 0 ? -w.table[c] : w.table[c];
    if (!(magnitude <= largest)) largest = magnitude;
  }
  return largest;
}

bool takes(const Weight& w) {
  if (w.bits > 2 || w.groups_per_tile > 4) return false;  // groups of 16 share a table
  const float largest = largest_value(w);
  if (!(largest > 0x1p-30f && largest < 0x1p30f)) return false;
  const float to_integer = power_of_two(11 + w.bits - exponent_of_product(largest));
  for (int c = 0; c < 1 << w.bits; c++) {
    const float scaled = w.table[c] * to_integer;
    if (scaled != float(int(scaled))) return false;
  }
  return true;
}

// The tables of a step over x[0] to x[31].
template <int kBits>
FDK_INLINE void build_step(const float* x, const __m512* values, std::uint8_t (*out)[2][64]) {
  constexpr std::size_t kTables = 8 * std::size_t(kBits);
  constexpr int kCodes = 4 / kBits;  // of a table
  for (std::size_t j = 0; j < kTables; j++) {
    __m512 sum = _mm512_mul_ps(_mm512_set1_ps(x[j]), values[0]);
    FDK_UNROLL
    for (int i = 1; i < kCodes; i++) {
      sum = _mm512_fmadd_ps(_mm512_set1_ps(x[j + std::size_t(i) * kTables]), values[i], sum);
    }
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    const __m512 base = _mm512_set1_ps(255), half = _mm512_set1_ps(0.5f);
    const __m512 integers = _mm512_roundscale_ps(sum, kNearest);
    const __m512 high = _mm512_roundscale_ps(
        _mm512_mul_ps(_mm512_add_ps(integers, half), _mm512_set1_ps(1.0f / 255)), kDown);
    const __m512 low = _mm512_fnmadd_ps(high, base, integers);
    __m128i* to = reinterpret_cast<__m128i*>(out[j / 4][0]) + j % 4;
    _mm_store_si128(to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(low)));
    _mm_store_si128(to + 4, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(high)));
  }
}

// Whether half or more of the values of a tile that are not zero are small beside its largest.
// Zeros are exact in any unit: one-hot x has no outlier.
bool has_outlier(const float* tile, float largest) {
  const __m512 limit = _mm512_set1_ps(largest * kOutlier), zero = _mm512_setzero_ps();
  int small = 0, others = 0;
  for (std::size_t i = 0; i < kTileK; i += 16) {
    const __m512 magnitudes = _mm512_abs_ps(_mm512_load_ps(tile + i));
    const __mmask16 below = _mm512_cmp_ps_mask(magnitudes, limit, _CMP_LT_OQ);
    small += std::popcount(_mm512_mask_cmp_ps_mask(below, magnitudes, zero, _CMP_NEQ_OQ));
    others += std::popcount(std::uint16_t(~below));
  }
  return small != 0 && small >= others;
}

// x :: [tiles * kTileK] bf16. False where x has what these integers cannot hold: NaN and infinity,
// a tile of nothing but very small numbers, or outliers.
template <int kBits>
bool build_tiles(const Weight& w, const std::uint16_t* x, TileTables<kBits>* out) {
  constexpr int kCodes = 4 / kBits;
  const float largest_of_table = largest_value(w);
  __m512 values[kCodes];  // at index e, of the i-th code in e
  for (int i = 0; i < kCodes; i++) {
    alignas(64) float entries[16];
    for (int e = 0; e < 16; e++) {
      entries[e] = w.table[e >> (kBits * i) & ((1 << kBits) - 1)];
    }
    values[i] = _mm512_load_ps(entries);
  }
  for (std::size_t tile = 0; tile < w.tiles; tile++, x += kTileK, out++) {
    alignas(64) float wide[kTileK];
    __m512 largest = _mm512_setzero_ps();
    float sums[kSteps];
    for (std::size_t s = 0; s < std::size_t(kSteps); s++) {
      __m512 sum = _mm512_setzero_ps();
      for (std::size_t i = s * kStep; i < (s + 1) * kStep; i += 16) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
        const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
        const __m512 floats = _mm512_castsi512_ps(bits);
        _mm512_store_ps(wide + i, floats);
        // As integers, magnitudes order as they should, and NaN is the largest.
        largest = _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(largest),
                                                       _mm512_castps_si512(_mm512_abs_ps(floats))));
        sum = _mm512_add_ps(sum, floats);
      }
      sums[s] = _mm512_reduce_add_ps(sum);
    }
    const float largest_x =
        std::bit_cast<float>(_mm512_reduce_max_epu32(_mm512_castps_si512(largest)));
    if (!(largest_x < 0x1p90f) || (largest_x < 0x1p-80f && largest_x != 0)) return false;
    if (has_outlier(wide, largest_x)) return false;
    const float largest_product = largest_x * largest_of_table;
    const int exponent = largest_x == 0 ? 0 : exponent_of_product(largest_product);
    const __m512 factor = _mm512_set1_ps(power_of_two(kLargest<kBits> - exponent));
    for (std::size_t i = 0; i < kTileK; i += 16) {
      _mm512_store_ps(wide + i, _mm512_mul_ps(_mm512_load_ps(wide + i), factor));
    }
    for (std::size_t s = 0; s < std::size_t(kSteps); s++) {
      build_step<kBits>(wide + s * kStep, values, out->sums[s]);
    }
    out->unit = power_of_two(exponent - kLargest<kBits>);
    const std::size_t run = std::size_t(kSteps) / w.groups_per_tile;
    for (std::size_t g = 0; g < w.groups_per_tile; g++) {
      out->x_sums[g] = 0;
      for (std::size_t s = 0; s < run; s++) out->x_sums[g] += sums[g * run + s];
    }
  }
  return true;
}

// Where four stripes' codes and scales begin.
struct Stripes {
  const std::uint8_t* codes[kStripesAtOnce];
  std::size_t slots[kStripesAtOnce];
};

// The registers of codes described above.
template <int kBits>
struct RowCodes {
  __m512i at[2][kRegisters<kBits>];
};

// Codes of four stripes to those registers.
template <int kBits>
struct Transposer {
  __m512i index[2];  // of h, into two registers of codes that follow one another

  FDK_INLINE Transposer() {
    alignas(64) std::uint8_t bytes[2][64];
    for (unsigned h = 0; h < 2; h++) {
      for (unsigned i = 0; i < 64; i++) {
        // 1 bit: [t of 2][8 rows][4 bytes]; 2 bits: [t of 4][4 rows][4 bytes]
        const unsigned rows = 8 / kBits, t = i / (4 * rows), row = i / 4 % rows;
        bytes[h][i] = std::uint8_t(16 * kBits * row + 2 * (4 * t + i % 4) + h);
      }
      index[h] = _mm512_load_si512(bytes[h]);
    }
  }

  // Of the tile that lies `offset` after the first of each stripe.
  FDK_INLINE RowCodes<kBits> operator()(const Stripes& stripes, std::size_t offset) const {
    RowCodes<kBits> out;
    const std::uint8_t* codes[kStripesAtOnce];
    FDK_UNROLL
    for (std::size_t i = 0; i < kStripesAtOnce; i++) codes[i] = stripes.codes[i] + offset;
    if constexpr (kBits == 1) {
      __m512i in[4];
      FDK_UNROLL
      for (int i = 0; i < 4; i++) in[i] = _mm512_loadu_si512(codes[i]);
      FDK_UNROLL
      for (int h = 0; h < 2; h++) {
        const __m512i first = _mm512_permutex2var_epi8(in[0], index[h], in[1]);
        const __m512i last = _mm512_permutex2var_epi8(in[2], index[h], in[3]);
        out.at[h][0] = _mm512_shuffle_i64x2(first, last, 0x44);
        out.at[h][1] = _mm512_shuffle_i64x2(first, last, 0xEE);
      }
    } else {
      __m512i in[2][4];
      FDK_UNROLL
      for (int i = 0; i < 4; i++) {
        const __m512i rows01 = _mm512_loadu_si512(codes[i]);
        const __m512i rows23 = _mm512_loadu_si512(codes[i] + 64);
        in[0][i] = _mm512_permutex2var_epi8(rows01, index[0], rows23);
        in[1][i] = _mm512_permutex2var_epi8(rows01, index[1], rows23);
      }
      FDK_UNROLL
      for (int h = 0; h < 2; h++) {
        const __m512i low01 = _mm512_shuffle_i32x4(in[h][0], in[h][1], 0x44);
        const __m512i low23 = _mm512_shuffle_i32x4(in[h][2], in[h][3], 0x44);
        const __m512i high01 = _mm512_shuffle_i32x4(in[h][0], in[h][1], 0xEE);
        const __m512i high23 = _mm512_shuffle_i32x4(in[h][2], in[h][3], 0xEE);
        out.at[h][0] = _mm512_shuffle_i32x4(low01, low23, 0x88);
        out.at[h][1] = _mm512_shuffle_i32x4(low01, low23, 0xDD);
        out.at[h][2] = _mm512_shuffle_i32x4(high01, high23, 0x88);
        out.at[h][3] = _mm512_shuffle_i32x4(high01, high23, 0xDD);
      }
    }
    return out;
  }
};

// The scales (or zero points) of 16 rows, `slot` after the first of each stripe: of kGroups groups
// that follow one another.
template <int kGroups>
FDK_INLINE void load_groups(const void* p, const Stripes& stripes, std::size_t slot, bool bytes,
                            ScaleType type, __m512 (&out)[kGroups]) {
  if (kGroups > 1 && !bytes && type == ScaleType::bf16) {
    // To the high halves of 32-bit lanes: group g of row r is item 4 g + r of its stripe.
    const auto stripe = [&](int i) FDK_LAMBDA {
      return static_cast<const std::uint16_t*>(p) + stripes.slots[i] + slot;
    };
    alignas(64) constexpr static auto kIndex = [] {
      std::array<std::uint16_t, 32> index{};
      for (unsigned i = 0; i < 16; i++) {
        index[2 * i + 1] = std::uint16_t(i / 4 * 4 * kGroups + i % 4);
      }
      return index;
    }();
    const __m512i first = _mm512_load_si512(kIndex.data());
    if constexpr (kGroups == 2) {
      const auto load = [&](int i) FDK_LAMBDA {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(stripe(i)));
      };
      __m512i all = _mm512_castsi128_si512(load(0));
      all = _mm512_inserti32x4(all, load(1), 1);
      all = _mm512_inserti32x4(all, load(2), 2);
      all = _mm512_inserti32x4(all, load(3), 3);
      unroll<kGroups>([&](auto g) FDK_LAMBDA {
        const __m512i index = _mm512_add_epi16(first, _mm512_set1_epi16(short(4 * g.value)));
        out[g.value] = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, index, all));
      });
    } else {
      const auto load = [&](int i) FDK_LAMBDA {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(stripe(i)));
      };
      const __m512i low = _mm512_inserti64x4(_mm512_castsi256_si512(load(0)), load(1), 1);
      const __m512i high = _mm512_inserti64x4(_mm512_castsi256_si512(load(2)), load(3), 1);
      unroll<kGroups>([&](auto g) FDK_LAMBDA {
        const __m512i index = _mm512_add_epi16(first, _mm512_set1_epi16(short(4 * g.value)));
        out[g.value] =
            _mm512_castsi512_ps(_mm512_maskz_permutex2var_epi16(0xAAAAAAAA, low, index, high));
      });
    }
    return;
  }
  unroll<kGroups>([&](auto g) FDK_LAMBDA {
    const auto four = [&](int i) FDK_LAMBDA {
      const std::size_t at = stripes.slots[i] + slot + std::size_t(g.value) * kTileRows;
      return bytes ? load4_bytes(p, at) : load4_scales(p, at, type);
    };
    const __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(four(0)), four(1), 1);
    const __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(four(2)), four(3), 1);
    out[g.value] = _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  });
}

// y_sums += the products of 16 rows with one tile of x.
template <int kBits, int kGroups, bool kAffine>
FDK_INLINE void add_tile(const Weight& w, const TileTables<kBits>& table, const Stripes& stripes,
                         std::size_t slot, const RowCodes<kBits>& codes, __m512& y_sums) {
  constexpr int kRun = kSteps / kGroups;  // steps of a group
  const __m512i nibble = _mm512_set1_epi8(15), table_of = _mm512_set1_epi32(0x30201000);
  const __m512i one = _mm512_set1_epi8(1), base = _mm512_set1_epi8(char(255));
  __m512 scales[kGroups], zeros[kGroups];
  load_groups<kGroups>(w.scales, stripes, slot, false, w.scale_type, scales);
  if constexpr (kAffine) {
    const bool bytes = w.zero_type == ZeroType::u8;
    const ScaleType type = bytes ? ScaleType::bf16 : ScaleType(int(w.zero_type) - 1);
    load_groups<kGroups>(w.zeros, stripes, slot, bytes, type, zeros);
  }
  unroll<kGroups>([&](auto group) FDK_LAMBDA {
    constexpr int g = group.value;
    // Four chains of products: a single one is waited for (2 bits, 256 rows: 21.7 -> 20.4 us warm).
    __m512i lows[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    __m512i highs[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    unroll<kRun>([&](auto step) FDK_LAMBDA {
      constexpr int s = g * kRun + step.value;
      unroll<kRegisters<kBits>>([&](auto i) FDK_LAMBDA {
        constexpr int t = i.value;
        __m512i index = codes.at[s / 2][t];
        if constexpr (s % 2 == 1) index = _mm512_srli_epi16(index, 4);
        index = _mm512_ternarylogic_epi32(index, nibble, table_of, 0xEA);  // (index & 15) | table
        const __m512i low = _mm512_load_si512(table.sums[s][t][0]);
        const __m512i high = _mm512_load_si512(table.sums[s][t][1]);
        __m512i &lo = lows[t % 2], &hi = highs[t % 2];
        lo = _mm512_dpbusd_epi32(lo, _mm512_permutexvar_epi8(index, low), one);
        hi = _mm512_dpbusd_epi32(hi, base, _mm512_permutexvar_epi8(index, high));
      });
    });
    const __m512i integers =
        _mm512_add_epi32(_mm512_add_epi32(lows[0], lows[1]), _mm512_add_epi32(highs[0], highs[1]));
    __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(integers), _mm512_set1_ps(table.unit));
    if constexpr (kAffine) sum = _mm512_fnmadd_ps(zeros[g], _mm512_set1_ps(table.x_sums[g]), sum);
    y_sums = _mm512_fmadd_ps(sum, scales[g], y_sums);
  });
}

// Blocks of 16 rows that follow one another on the same tile, so that its tables come from L1:
// those of a long x do not fit it.
constexpr std::size_t kBlocks = 8;
constexpr std::size_t kStripes = kBlocks * kStripesAtOnce;

// How far ahead the first stripes of a loop are fetched.
constexpr std::size_t kTilesAhead = 4;

// Into L2: the tables need the L1.
FDK_INLINE void fetch(const std::uint8_t* from, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T1);
  }
}

template <int kBits, int kGroups, bool kAffine>
void gemv_stripes(const Weight& w, const TileTables<kBits>* tables, float* y, std::size_t begin,
                  std::size_t end) {
  constexpr std::size_t kBytes = tile_bytes(kBits);
  const Transposer<kBits> transpose;
  const std::size_t stripe_bytes = w.tiles * kBytes;
  const std::size_t scale_bytes = w.stored_groups * kTileRows * bytes_of(w.scale_type);
  const std::size_t scale_step = kStripesAtOnce * scale_bytes / w.tiles;
  for (std::size_t stripe = begin; stripe < end; stripe += kStripes) {
    const std::size_t count = end - stripe < kStripes ? end - stripe : kStripes;
    const std::size_t blocks = ceil_div(count, kStripesAtOnce);
    Stripes stripes[kBlocks];
    __m512 y_sums[kBlocks];
    for (std::size_t i = 0; i < blocks * kStripesAtOnce; i++) {
      const std::size_t at = stripe + (i < count ? i : count - 1);  // repeated, and then dropped
      Stripes& of = stripes[i / kStripesAtOnce];
      of.codes[i % kStripesAtOnce] = w.codes + at * stripe_bytes;
      of.slots[i % kStripesAtOnce] = at * w.stored_groups * kTileRows;
    }
    for (std::size_t b = 0; b < blocks; b++) y_sums[b] = _mm512_setzero_ps();
    const std::uint8_t* next = w.codes + (stripe + count) * stripe_bytes;
    const std::uint8_t* next_scales =
        static_cast<const std::uint8_t*>(w.scales) + (stripe + count) * scale_bytes;
    RowCodes<kBits> ahead = transpose(stripes[0], 0);
    std::size_t slot = 0, left = w.tiles_per_group;
    for (std::size_t tile = 0; tile < w.tiles; tile++) {
      for (std::size_t b = 0; b < blocks; b++) {
        if (stripe == begin && tile + kTilesAhead < w.tiles) {  // which nobody fetched ahead
          for (const std::uint8_t* codes : stripes[b].codes) {
            fetch(codes + (tile + kTilesAhead) * kBytes, kBytes);
          }
        }
        if (stripe + count < end) {
          fetch(next, kBytes * kStripesAtOnce);
          fetch(next_scales, scale_step);
          next += kBytes * kStripesAtOnce;
          next_scales += scale_step;
        }
        // Those of the next 16 rows before the sums of these: what depends on nothing yet would
        // wait behind them (1 bit, warm: 14.8 -> 14.2 us for 256 rows, 2 bits: 27.2 -> 25.8).
        const RowCodes<kBits> codes = ahead;
        const bool last = b + 1 == blocks;
        const std::size_t of_tile = last && tile + 1 < w.tiles ? tile + 1 : tile;
        ahead = transpose(stripes[last ? 0 : b + 1], of_tile * kBytes);
        add_tile<kBits, kGroups, kAffine>(w, tables[tile], stripes[b], slot, codes, y_sums[b]);
      }
      if (kGroups > 1 || --left == 0) {
        slot += kGroups * kTileRows;
        left = w.tiles_per_group;
      }
    }
    for (std::size_t b = 0; b < blocks; b++) {
      const std::size_t first = b * kStripesAtOnce * kTileRows, rows = count * kTileRows - first;
      const __mmask16 there = rows >= 16 ? __mmask16(0xFFFF) : __mmask16((1u << rows) - 1);
      _mm512_mask_storeu_ps(y + stripe * kTileRows + first, there, y_sums[b]);
    }
  }
}

template <int kBits, bool kAffine>
FDK_INLINE void gemv_groups(const Weight& w, const TileTables<kBits>* tables, float* y,
                            std::size_t begin, std::size_t end) {
  switch (w.groups_per_tile) {
    case 1:
      return gemv_stripes<kBits, 1, kAffine>(w, tables, y, begin, end);
    case 2:
      return gemv_stripes<kBits, 2, kAffine>(w, tables, y, begin, end);
    default:
      return gemv_stripes<kBits, 4, kAffine>(w, tables, y, begin, end);
  }
}

template <int kBits>
FDK_INLINE void gemv_bits(const Weight& w, const void* tables, float* y, std::size_t begin,
                          std::size_t end) {
  const auto* of_tiles = static_cast<const TileTables<kBits>*>(tables);
  if (w.zeros != nullptr) return gemv_groups<kBits, true>(w, of_tiles, y, begin, end);
  return gemv_groups<kBits, false>(w, of_tiles, y, begin, end);
}

void gemv(const Weight& w, const void* tables, float* y, std::size_t begin, std::size_t end) {
  if (w.bits == 1) return gemv_bits<1>(w, tables, y, begin, end);
  return gemv_bits<2>(w, tables, y, begin, end);
}

bool build(const Weight& w, const void* x, void* tables) {
  const std::uint16_t* from = static_cast<const std::uint16_t*>(x);
  if (w.bits == 1) return build_tiles(w, from, static_cast<TileTables<1>*>(tables));
  return build_tiles(w, from, static_cast<TileTables<2>*>(tables));
}

}  // namespace

extern const TableKernels kAvx512Tables = {takes, sizeof(TileTables<2>), build, gemv};

}  // namespace fdk
