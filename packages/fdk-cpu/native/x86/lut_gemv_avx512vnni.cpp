// The lookup-table GEMV for codes of 1 and 2 bits: AVX-512 with VBMI and VNNI, 16 rows at a time.
//
// The integers of lut_gemv_x86-inl.h are looked up as two bytes, 255 high + low (`vpermb`, 4 tables
// per register), and `vpdpbusd` multiplies the bytes with 1 and 255 and adds them.
//
// Table j of a step of 32 positions covers positions j, j + 8, j + 16 and j + 24 at 1 bit, and j
// and j + 16 at 2 bits.
#include <immintrin.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "common/kernels.h"
#include "common/simd-inl.h"
#include "x86/linear_avx512bf16.h"
#include "x86/lut_gemv_x86-inl.h"
#include "x86/scales_x86-inl.h"

namespace fdk {
namespace {

constexpr int kSteps = 4;  // steps of 32 positions per tile
constexpr std::size_t kStep = kTileK / kSteps;
// Registers of tables per step.
template <int kBits>
inline constexpr int kRegisters = 2 * kBits;

// The place of table j of a step: table i of register t. At 2 bits it is where transposing dwords
// leaves the codes of positions j.
struct Place {
  std::size_t t, i;
};
template <int kBits>
constexpr Place place_of(std::size_t j) {
  return kBits == 1 ? Place{j / 4, j % 4} : Place{j % 8 / 2, j / 8 * 2 + j % 2};
}

// The tables of a tile of x.
template <int kBits>
struct alignas(64) TileTables {
  std::uint8_t sums[kSteps][kRegisters<kBits>][2][64];  // low bytes, then high bytes
  float x_sums[kSteps];                                 // sums of x per group, for zero points
  float unit;                                           // the value of 1 in the sums
};

// Builds the tables of a step from x[0] to x[31].
template <int kBits>
FDK_INLINE void build_step(const float* x, const __m512* values, std::uint8_t (*out)[2][64]) {
  constexpr std::size_t kTables = 8 * std::size_t(kBits);
  constexpr int kCodes = 4 / kBits;  // per index
  FDK_UNROLL
  for (std::size_t j = 0; j < kTables; j++) {
    __m512 sum = _mm512_mul_ps(_mm512_set1_ps(x[j]), values[0]);
    FDK_UNROLL
    for (int i = 1; i < kCodes; i++) {
      sum = _mm512_fmadd_ps(_mm512_set1_ps(x[j + std::size_t(i) * kTables]), values[i], sum);
    }
    // v = 255 high + low with unsigned low: 256 a + b is 255 a + (a + b), and if a + b does not fit
    // a byte, `high` is one more or less.
    const __m512i v = _mm512_cvtps_epi32(sum);
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_srai_epi32(v, 8)), 8);
    const __m512i low = _mm512_add_epi32(v, high);  // modulo 256
    constexpr auto place = place_of<kBits>;
    __m128i* to = reinterpret_cast<__m128i*>(out[place(j).t][0]) + place(j).i;
    _mm_store_si128(to, _mm512_cvtepi32_epi8(low));
    _mm_store_si128(to + 4, _mm512_cvtepi32_epi8(high));
  }
}

// True if at least half of the nonzero values of a tile are small compared with its largest. Zeros
// are exact in any unit: one-hot x has no outlier.
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

// Prefetches stripes [first, stop), each of `bytes`, in equal shares.
class Shares {
 public:
  Shares(const void* stripes, std::size_t bytes, std::size_t first, std::size_t stop,
         std::size_t shares)
      : from_(static_cast<const std::uint8_t*>(stripes) + first * bytes),
        left_((stop - first) * bytes),
        share_(ceil_div(left_, shares * kLine) * kLine) {}
  void prefetch_one() {
    const std::size_t now = left_ < share_ ? left_ : share_;
    prefetch(from_, now);
    from_ += now;
    left_ -= now;
  }

 private:
  const std::uint8_t* from_;
  std::size_t left_, share_;
};

// Builds the tables of x :: [tiles * kTileK] bf16 and prefetches stripes [first, stop). Returns
// false for x that these integers cannot hold: NaN, infinity, a tile of tiny values only, or
// outliers.
template <int kBits>
bool build_tiles(const Weight& w, const std::uint16_t* x, TileTables<kBits>* out, std::size_t first,
                 std::size_t stop) {
  constexpr int kCodes = 4 / kBits;
  const float largest_of_table = largest_value(w);
  __m512 values[kCodes];  // for index e: the value of its i-th code
  for (int i = 0; i < kCodes; i++) {
    alignas(64) float entries[16];
    for (int e = 0; e < 16; e++) {
      entries[e] = w.table[e >> (kBits * i) & ((1 << kBits) - 1)];
    }
    values[i] = _mm512_load_ps(entries);
  }
  const std::size_t scale_bytes = w.stored_groups * kTileRows * bytes_of(w.scale_type);
  Shares codes(w.codes, w.tiles * tile_bytes(kBits), first, stop, w.tiles * kSteps);
  Shares scales(w.scales, scale_bytes, first, stop, w.tiles * kSteps);
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
        // Compared as integers, magnitudes keep their order and NaN is the largest.
        largest = _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(largest),
                                                       _mm512_castps_si512(_mm512_abs_ps(floats))));
        sum = _mm512_add_ps(sum, floats);
      }
      sums[s] = w.zeros == nullptr ? 0.0f : _mm512_reduce_add_ps(sum);
    }
    const float largest_x =
        std::bit_cast<float>(_mm512_reduce_max_epu32(_mm512_castps_si512(largest)));
    if (!(largest_x < 0x1p90f) || (largest_x < 0x1p-80f && largest_x != 0)) return false;
    if (has_outlier(wide, largest_x)) return false;
    const float largest_product = largest_x * largest_of_table;
    const int exponent = largest_x == 0 ? 0 : exponent_of_product(largest_product);
    const __m512 factor = _mm512_set1_ps(power_of_two(largest_exponent(kBits) - exponent));
    for (std::size_t i = 0; i < kTileK; i += 16) {
      _mm512_store_ps(wide + i, _mm512_mul_ps(_mm512_load_ps(wide + i), factor));
    }
    for (std::size_t s = 0; s < std::size_t(kSteps); s++) {
      codes.prefetch_one();
      scales.prefetch_one();
      build_step<kBits>(wide + s * kStep, values, out->sums[s]);
    }
    out->unit = power_of_two(exponent - largest_exponent(kBits));
    const std::size_t run = std::size_t(kSteps) / w.groups_per_tile;
    for (std::size_t g = 0; g < w.groups_per_tile; g++) {
      out->x_sums[g] = 0;
      for (std::size_t s = 0; s < run; s++) out->x_sums[g] += sums[g * run + s];
    }
  }
  return true;
}

constexpr std::size_t kStripesAtOnce = 4;  // stripes of 4 rows: the 16 dwords of a register

// The codes and the scale slots of four stripes, which are `apart`; if fewer are left, of one
// stripe four times.
struct Stripes {
  const std::uint8_t* codes;
  std::size_t apart, slot, slots_apart;

  FDK_INLINE std::size_t slot_of(int stripe) const {
    return slot + std::size_t(stripe) * slots_apart;
  }
};

// The codes of 16 rows, [h][t]: byte 4 row + i of register t indexes table i of register t of step
// 2 h (low four bits) and of step 2 h + 1 (high four bits).
template <int kBits>
struct RowCodes {
  __m512i at[2][kRegisters<kBits>];
};

// The byte permutations that end (2 bits) or begin (1 bit) the transposition, for each h.
template <int kBits>
struct Indices {
  __m512i of[2];

  FDK_INLINE Indices() {
    alignas(64) std::uint8_t bytes[2][64];
    for (unsigned h = 0; h < 2; h++) {
      for (unsigned b = 0; b < 64; b++) {
        const unsigned i = b % 4;
        if constexpr (kBits == 1) {  // [stripe][row][i], of qwords of two stripes, [row][stripe]
          const unsigned stripe = b / 16, row = b / 4 % 4;
          bytes[h][b] = std::uint8_t(64 * (stripe / 2) + 16 * row + 8 * (stripe % 2) + 2 * i + h);
        } else {  // [stripe][row][i], of rows 0 and 1 and of rows 2 and 3, [row][i / 2][stripe]
          const unsigned stripe = b / 16, row = b / 4 % 4, lane = 2 * row + i / 2;
          bytes[h][b] = std::uint8_t(16 * lane + 4 * stripe + 2 * (i % 2) + h);
        }
      }
      of[h] = _mm512_load_si512(bytes[h]);
    }
  }
};

// Transposes the codes of the next 16 rows, in parts that are interleaved with the products of the
// current ones (2 bits, warm, cycles per tile of 16 rows on Zen 4: 93 -> 88).
template <int kBits>
class NextCodes {
 public:
  static constexpr int kParts = kSteps * kRegisters<kBits>;

  // For the tile `offset` bytes after the first of each stripe. kParts / 2 cache lines from `later`
  // on are prefetched.
  FDK_INLINE NextCodes(const Indices<kBits>& indices, const Stripes& stripes, std::size_t offset,
                       const std::uint8_t* later)
      : indices_(indices), from_(stripes.codes + offset), apart_(stripes.apart), later_(later) {}

  template <int k>
  FDK_INLINE void part() {
    // One line at a time, which is faster than all at once (4096 x 4096, 2 bits, cold: 263 -> 257
    // us).
    if constexpr (k % 2 == 1) prefetch(later_ + k / 2 * kLine, kLine);
    if constexpr (kBits == 2) part_of_two_bits<k>();
    if constexpr (kBits == 1) part_of_one_bit<k>();
  }
  const RowCodes<kBits>& codes() const { return codes_; }

 private:
  FDK_INLINE __m512i load(int stripe, int rows) const {
    return _mm512_loadu_si512(from_ + std::size_t(stripe) * apart_ + kLine * std::size_t(rows));
  }
  template <int k>
  FDK_INLINE void part_of_one_bit() {
    if constexpr (k < 4) {  // qwords of two stripes
      constexpr int i = k / 2;
      const __m512i first = load(2 * i, 0), second = load(2 * i + 1, 0);
      qwords_[i][k % 2] =
          k % 2 == 0 ? _mm512_unpacklo_epi64(first, second) : _mm512_unpackhi_epi64(first, second);
    } else if constexpr (k < 6) {
      unroll<2>([&](auto h) FDK_LAMBDA {
        codes_.at[h.value][k - 4] =
            _mm512_permutex2var_epi8(qwords_[0][k - 4], indices_.of[h.value], qwords_[1][k - 4]);
      });
    }
  }
  template <int k>
  FDK_INLINE void part_of_two_bits() {
    constexpr int rows = k / 4, i = k % 4;
    if constexpr (k < 8 && i < 2) {  // dwords of two stripes
      const __m512i first = load(2 * i, rows), second = load(2 * i + 1, rows);
      halves_[rows][2 * i] = _mm512_unpacklo_epi32(first, second);
      halves_[rows][2 * i + 1] = _mm512_unpackhi_epi32(first, second);
    } else if constexpr (k < 8) {  // dwords of four
      const __m512i first = halves_[rows][i - 2], second = halves_[rows][i];
      dwords_[rows][2 * i - 4] = _mm512_unpacklo_epi64(first, second);
      dwords_[rows][2 * i - 3] = _mm512_unpackhi_epi64(first, second);
    } else if constexpr (k < 12) {
      unroll<2>([&](auto h) FDK_LAMBDA {  // a loop would put codes_ in memory
        codes_.at[h.value][i] =
            _mm512_permutex2var_epi8(dwords_[0][i], indices_.of[h.value], dwords_[1][i]);
      });
    }
  }

  const Indices<kBits>& indices_;
  const std::uint8_t* from_;
  std::size_t apart_;
  const std::uint8_t* later_;
  __m512i halves_[2][4], dwords_[2][4];  // 2 bits
  __m512i qwords_[2][2];                 // 1 bit
  RowCodes<kBits> codes_;
};

// Loads the scales (or zero points) of 16 rows, of kGroups adjacent groups from `slot` on in each
// stripe.
template <int kGroups>
FDK_INLINE void load_groups(const void* p, const Stripes& stripes, std::size_t slot, bool bytes,
                            ScaleType type, __m512 (&out)[kGroups]) {
  if (kGroups > 1 && !bytes && type == ScaleType::bf16) {
    // To the high halves of 32-bit lanes: group g of row r is item 4 g + r of its stripe.
    const auto stripe = [&](int i) FDK_LAMBDA {
      return static_cast<const std::uint16_t*>(p) + stripes.slot_of(i) + slot;
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
      const std::size_t at = stripes.slot_of(i) + slot + std::size_t(g.value) * kTileRows;
      return bytes ? load4_bytes(p, at) : load4_scales(p, at, type);
    };
    const __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(four(0)), four(1), 1);
    const __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(four(2)), four(3), 1);
    out[g.value] = _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  });
}

// Adds the products of 16 rows with one tile of x to y_sums, and transposes the next codes.
template <int kBits, int kGroups, bool kAffine>
FDK_INLINE void add_tile(const Weight& w, const TileTables<kBits>& table, const Stripes& stripes,
                         std::size_t slot, const RowCodes<kBits>& codes, __m512& y_sums,
                         NextCodes<kBits>& next) {
  const __m512i nibble = _mm512_set1_epi8(15), table_of = _mm512_set1_epi32(0x30201000);
  const __m512i one = _mm512_set1_epi8(1), base = _mm512_set1_epi8(char(255));
  __m512 scales[kGroups], zeros[kGroups];
  load_groups<kGroups>(w.scales, stripes, slot, false, w.scale_type, scales);
  if constexpr (kAffine) {
    const bool bytes = w.zero_type == ZeroType::u8;
    const ScaleType type = bytes ? ScaleType::bf16 : ScaleType(int(w.zero_type) - 1);
    load_groups<kGroups>(w.zeros, stripes, slot, bytes, type, zeros);
  }
  const TileTables<kBits>* sums_of = &table;
  // Keeps GCC 12 from copying the tables to the stack for every tile (2 bits, 256 rows, warm: 14.8
  // -> 13.4 us).
  asm volatile("" : "+r"(sums_of));
  // Two chains of products per half of a tile, or per step if it is a group: one would wait for
  // itself.
  constexpr int kChains = kGroups == kSteps ? kSteps : 2;
  __m512i lows[kChains], highs[kChains];
  unroll<kChains>([&](auto chain) FDK_LAMBDA {
    lows[chain.value] = highs[chain.value] = _mm512_setzero_si512();
  });
  unroll<kSteps * kRegisters<kBits>>([&](auto number) FDK_LAMBDA {
    constexpr int t = number.value / kSteps, h = number.value % 2;
    constexpr int s = 2 * h + number.value % kSteps / 2;
    __m512i index = codes.at[h][t];
    if constexpr (s % 2 == 1) index = _mm512_srli_epi16(index, 4);
    index = _mm512_ternarylogic_epi32(index, nibble, table_of, 0xEA);  // (index & 15) | table
    const __m512i low = _mm512_load_si512(sums_of->sums[s][t][0]);
    const __m512i high = _mm512_load_si512(sums_of->sums[s][t][1]);
    __m512i &lo = lows[kChains == kSteps ? s : h], &hi = highs[kChains == kSteps ? s : h];
    lo = _mm512_dpbusd_epi32(lo, _mm512_permutexvar_epi8(index, low), one);
    hi = _mm512_dpbusd_epi32(hi, base, _mm512_permutexvar_epi8(index, high));
    next.template part<number.value>();
  });
  unroll<kGroups>([&](auto group) FDK_LAMBDA {
    constexpr int g = group.value;
    __m512i integers = _mm512_add_epi32(lows[g], highs[g]);
    if constexpr (kGroups == 1) {
      integers = _mm512_add_epi32(integers, _mm512_add_epi32(lows[1], highs[1]));
    }
    __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(integers), _mm512_set1_ps(table.unit));
    if constexpr (kAffine) sum = _mm512_fnmadd_ps(zeros[g], _mm512_set1_ps(table.x_sums[g]), sum);
    y_sums = _mm512_fmadd_ps(sum, scales[g], y_sums);
  });
}

// Blocks of 16 rows that are multiplied with the same tile in turn, so that its tables are read
// from L1, which the tables of a long x exceed.
constexpr std::size_t kBlocks = 8;
constexpr std::size_t kStripes = kBlocks * kStripesAtOnce;

// Prefetch distance of the codes of this task. They were prefetched by the task before, but some of
// its prefetches are dropped. At 2 bits into L1, one tile ahead, as the tables of the next tile. At
// 1 bit into L1 only if it holds codes and tables, as on wide machines (48 KiB: 95 -> 91 us; 32
// KiB: 149 -> 155), else into L2.
struct Near {
  std::size_t tiles;
  bool l1;
};
Near near_of(int bits) {
  if (bits == 2) return {1, true};
  return is_wide_avx512bf16() ? Near{2, true} : Near{4, false};
}

template <int kBits, int kGroups, bool kAffine>
void gemv_stripes(const TwoPassTask& task) {
  constexpr std::size_t kBytes = tile_bytes(kBits);
  constexpr std::size_t kPart = ceil_div(sizeof(TileTables<kBits>), kBlocks * kLine) * kLine;
  const Weight& w = *task.weight;
  const auto* tables = static_cast<const TileTables<kBits>*>(task.prepared);
  const Indices<kBits> indices;
  const std::size_t stripe_bytes = w.tiles * kBytes;
  const std::size_t scale_bytes = w.stored_groups * kTileRows * bytes_of(w.scale_type);
  const std::size_t scale_step = kStripesAtOnce * scale_bytes / w.tiles;
  const std::size_t stripe_slots = w.stored_groups * kTileRows;
  const Near near = near_of(kBits);
  // Blocks of 16 rows, then single stripes of 4 rows.
  const std::size_t count = task.end - task.begin, whole = count / kStripesAtOnce;
  const std::size_t blocks = whole + count % kStripesAtOnce;
  const auto first_of = [&](std::size_t b) {
    return task.begin + (b < whole ? b * kStripesAtOnce : b + whole * (kStripesAtOnce - 1));
  };
  constexpr std::size_t kMostBlocks = kBlocks - 1 + kStripesAtOnce - 1;
  Stripes stripes[kMostBlocks];
  __m512 y_sums[kMostBlocks];
  for (std::size_t b = 0; b < blocks; b++) {
    const std::size_t at = first_of(b), apart = b < whole ? 1 : 0;
    stripes[b] = {w.codes + at * stripe_bytes, apart * stripe_bytes, at * stripe_slots,
                  apart * stripe_slots};
  }
  for (std::size_t b = 0; b < blocks; b++) y_sums[b] = _mm512_setzero_ps();
  // The stripes of the next task: each block prefetches four of them, one tile at a time.
  const std::size_t first = task.next < w.stripes ? task.next : w.stripes;
  std::size_t to_prefetch = (w.stripes - first) / kStripesAtOnce * w.tiles;
  const std::uint8_t* next = w.codes + first * stripe_bytes;
  const auto* next_scales = static_cast<const std::uint8_t*>(w.scales) + first * scale_bytes;
  // Without a next task, the prefetches hit the cache.
  const auto* nothing = static_cast<const std::uint8_t*>(task.prepared);
  NextCodes<kBits> begin(indices, stripes[0], 0, nothing);
  unroll<NextCodes<kBits>::kParts>([&](auto k) FDK_LAMBDA { begin.template part<k.value>(); });
  RowCodes<kBits> ahead = begin.codes();
  std::size_t slot = 0, left = w.tiles_per_group;
  for (std::size_t tile = 0; tile < w.tiles; tile++) {
    for (std::size_t b = 0; b < blocks; b++) {
      if (tile + near.tiles < w.tiles) {
        const std::uint8_t* const codes = stripes[b].codes + (tile + near.tiles) * kBytes;
        if (kBits == 2 || near.l1) {
          unroll<kStripesAtOnce>([&](auto i) FDK_LAMBDA {
            prefetch<Cache::l1>(codes + std::size_t(i.value) * stripes[b].apart, kBytes);
          });
          // The last part may reach into the tables after it, which are read next.
          prefetch<Cache::l1>(reinterpret_cast<const char*>(tables + tile + 1) + b * kPart, kPart);
        } else {
          unroll<kStripesAtOnce>([&](auto i) FDK_LAMBDA {
            prefetch(codes + std::size_t(i.value) * stripes[b].apart, kBytes);
          });
        }
      }
      const std::uint8_t* later = to_prefetch != 0 ? next : nothing;
      // Keeps GCC 12 from choosing between both addresses for each line, and spilling (1 bit,
      // cycles per tile of 16 rows in L1: 26 -> 24.5; 2 bits 46.5 -> 43.5).
      asm volatile("" : "+r"(later));
      if (to_prefetch != 0) {
        prefetch(next_scales, scale_step);
        next += kBytes * kStripesAtOnce;
        next_scales += scale_step;
        to_prefetch--;
      }
      const bool last = b + 1 == blocks;
      const std::size_t of_tile = last && tile + 1 < w.tiles ? tile + 1 : tile;
      NextCodes<kBits> following(indices, stripes[last ? 0 : b + 1], of_tile * kBytes, later);
      add_tile<kBits, kGroups, kAffine>(w, tables[tile], stripes[b], slot, ahead, y_sums[b],
                                        following);
      ahead = following.codes();
    }
    if (kGroups > 1 || --left == 0) {
      slot += kGroups * kTileRows;
      left = w.tiles_per_group;
    }
  }
  for (std::size_t b = 0; b < blocks; b++) {
    const __mmask16 there = b < whole ? __mmask16(0xFFFF) : __mmask16((1u << kTileRows) - 1);
    _mm512_mask_storeu_ps(task.y + first_of(b) * kTileRows, there, y_sums[b]);
  }
}

void gemv(const TwoPassTask& task) {
  with_kind(*task.weight, [&](auto bits, auto groups, auto affine) FDK_LAMBDA {
    gemv_stripes<bits.value, groups.value, affine.value>(task);
  });
}

bool prepare(const Weight& w, const void* x, void* prepared, std::size_t begin, std::size_t end) {
  const std::uint16_t* from = static_cast<const std::uint16_t*>(x);
  if (w.bits == 1) return build_tiles(w, from, static_cast<TileTables<1>*>(prepared), begin, end);
  return build_tiles(w, from, static_cast<TileTables<2>*>(prepared), begin, end);
}

}  // namespace

extern const TwoPassGemv kLutGemvAvx512Vnni = {supports, sizeof(TileTables<2>), prepare, kStripes,
                                               gemv};

}  // namespace fdk
