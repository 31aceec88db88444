// The lookup-table GEMV for codes of 1 and 2 bits: AVX2.
//
// `vpshufb` looks up 16 rows in one table, the low and the high bytes of the sums separately, so
// codes are transposed first: byte b of 16 rows.
//
// Bytes are added in 16-bit lanes. Those of odd rows are extracted (`vpmaddubsw`) and added
// separately; the lanes modulo 2^16, minus 256 times that, are the sums of the even rows.
//
// The 128-bit halves of a register are different rows at 1 bit (of a pair of rows, whose bytes of a
// tile are adjacent), and different bytes of the same rows, b and b + 16, at 2 bits.
#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/kernels.h"
#include "common/simd-inl.h"
#include "x86/outliers_avx2-inl.h"
#include "x86/lut_gemv_x86-inl.h"
#include "x86/scales_x86-inl.h"

namespace fdk {
namespace {

// The tables hold the integers of lut_gemv_x86-inl.h as unsigned low and high bytes.

constexpr int kBytesOfHalf = 16;  // bytes of a row per register of 16 rows and half
constexpr int kNibbles = 2;
constexpr int kRunCount =
    4;  // runs of 32 positions per tile: byte b and nibble q belong to run 2 (b % 2) + q
constexpr int kBias = 1 << 15;  // added to the sums, so that their bytes are unsigned
// The tables of a tile of x.
template <int kBits>
struct alignas(64) TileTables {
  // For byte b and nibble q: low bytes, then high bytes.
  std::uint8_t sums[kBytesOfHalf][kNibbles][2][16 * kBits];
  float x_sums[kRunCount][kFloats];  // sums of x per group, for zero points
  float unit;                        // the value of 1 in the sums
};

// The place of position p of a tile in x: the even ones of each 16 positions first.
constexpr std::size_t place_of(std::size_t p) { return p / 16 * 16 + p % 2 * 8 + p % 16 / 2; }

// Builds one table: the low bytes of its 16 sums, and the high ones.
template <int kBits>
FDK_INLINE void build_table(const float* x, std::size_t first, const __m256 (*values)[2],
                            std::uint8_t* low, std::uint8_t* high) {
  constexpr int kCodes = 4 / kBits;                      // per index
  constexpr std::size_t kStep = 8 * std::size_t(kBits);  // positions between the codes of an index
  __m256 sums[2] = {_mm256_set1_ps(kBias), _mm256_set1_ps(kBias)};
  FDK_UNROLL
  for (int i = 0; i < kCodes; i++) {
    const __m256 of_x = _mm256_broadcast_ss(x + place_of(first + std::size_t(i) * kStep));
    sums[0] = _mm256_fmadd_ps(of_x, values[i][0], sums[0]);
    sums[1] = _mm256_fmadd_ps(of_x, values[i][1], sums[1]);
  }
  // Entries 0 to 3, 8 to 11, 4 to 7 and 12 to 15.
  const __m256i words =
      _mm256_packus_epi32(_mm256_cvtps_epi32(sums[0]), _mm256_cvtps_epi32(sums[1]));
  const __m256i bytes = _mm256_packus_epi16(_mm256_and_si256(words, _mm256_set1_epi16(255)),
                                            _mm256_srli_epi16(words, 8));
  const __m256i in_order =
      _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm_store_si128(reinterpret_cast<__m128i*>(low), _mm256_castsi256_si128(in_order));
  _mm_store_si128(reinterpret_cast<__m128i*>(high), _mm256_extracti128_si256(in_order, 1));
}

template <int kBits>
void build_tables(const float* x, const __m256 (*values)[2], TileTables<kBits>& out) {
  for (std::size_t b = 0; b < std::size_t(kBytesOfHalf); b++) {
    for (std::size_t q = 0; q < std::size_t(kNibbles); q++) {
      for (std::size_t half = 0; half < std::size_t(kBits); half++) {
        const std::size_t first = 64 * (b % 2) + 32 * q + b / 2 + 8 * half;
        std::uint8_t (*to)[16 * kBits] = out.sums[b][q];
        build_table<kBits>(x, first, values, to[0] + 16 * half, to[1] + 16 * half);
      }
    }
  }
}

// Sums x over each group, for each half of a register.
template <int kBits>
void sum_groups(const float* x, std::size_t groups, TileTables<kBits>& out) {
  const std::size_t width = kTileK / groups, step = 8 * std::size_t(kBits);
  for (std::size_t g = 0; g < groups; g++) {
    float sums[2] = {0, 0};
    for (std::size_t p = g * width; p < (g + 1) * width; p++) {
      sums[p % step / 8] += x[place_of(p)];
    }
    for (std::size_t i = 0; i < kFloats; i++) out.x_sums[g][i] = sums[kBits == 1 ? 0 : i / 4];
  }
}

// Builds the tables of x :: [tiles * kTileK] float32. Returns false for x that these integers
// cannot hold: NaN, infinity, a tile of tiny values only, or outliers.
template <int kBits>
bool build_tiles(const Weight& w, const float* x, TileTables<kBits>* out) {
  constexpr int kCodes = 4 / kBits;
  const float largest_of_table = largest_value(w);
  __m256 values[kCodes][2];  // for index e: the value of its i-th code
  for (int i = 0; i < kCodes; i++) {
    alignas(32) float entries[16];
    for (int e = 0; e < 16; e++) {
      entries[e] = w.table[e >> (kBits * i) & ((1 << kBits) - 1)];
    }
    values[i][0] = _mm256_load_ps(entries);
    values[i][1] = _mm256_load_ps(entries + 8);
  }
  for (std::size_t tile = 0; tile < w.tiles; tile++, x += kTileK, out++) {
    const float largest = largest_of(x);
    if (!(largest < 0x1p90f) || (largest < 0x1p-80f && largest != 0)) return false;
    if (mostly_below(x, largest * kOutlier)) return false;
    const int exponent = largest == 0 ? 0 : exponent_of_product(largest * largest_of_table);
    const __m256 factor = _mm256_set1_ps(power_of_two(largest_exponent(kBits) - exponent));
    alignas(32) float scaled[kTileK];
    for (std::size_t i = 0; i < kTileK; i += kFloats) {
      _mm256_store_ps(scaled + i, _mm256_mul_ps(_mm256_loadu_ps(x + i), factor));
    }
    build_tables<kBits>(scaled, values, *out);
    out->unit = power_of_two(exponent - largest_exponent(kBits));
    if (w.zeros != nullptr) sum_groups(x, w.groups_per_tile, *out);
  }
  return true;
}

// Stripes per register of codes.
template <int kBits>
inline constexpr std::size_t kStripesAtOnce = 8 / kBits;
// Registers of 8 sums per register of codes; at 2 bits both halves have sums of the same 4 rows.
constexpr int kSums = 4;

// The first codes and scales of the stripes of a register.
template <int kBits>
struct Stripes {
  const std::uint8_t* codes[kStripesAtOnce<kBits>];
  std::size_t slots[kStripesAtOnce<kBits>];
};

// Transposes the codes of one tile, `offset` bytes after the first of each stripe: out[b] has byte
// b of each row. Row j of a register is input j: first the even inputs, then the odd ones; each
// four (1 bit: pairs of rows of two stripes) make one register of sums.
template <int kBits>
FDK_INLINE void transpose(const Stripes<kBits>& stripes, std::size_t offset, __m256i* out) {
  __m256i from[kBytesOfHalf], to[kBytesOfHalf];
  unroll<kBytesOfHalf>([&](auto input) FDK_LAMBDA {
    constexpr std::size_t j = std::size_t(input.value), at = j % 2 * 8 + j / 2;
    constexpr std::size_t kInputs = 2 * std::size_t(kBits);  // per stripe
    const std::uint8_t* p = stripes.codes[at / kInputs] + offset + at % kInputs * 32;
    from[j] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  });
  const auto stage = [](const __m256i* a, __m256i* b) FDK_LAMBDA {
    unroll<kBytesOfHalf / 2>([&](auto i) FDK_LAMBDA {
      b[2 * i.value] = _mm256_unpacklo_epi8(a[i.value], a[i.value + 8]);
      b[2 * i.value + 1] = _mm256_unpackhi_epi8(a[i.value], a[i.value + 8]);
    });
  };
  stage(from, to);
  stage(to, from);
  stage(from, to);
  stage(to, out);
}

// Four scales of stripe `at`, twice, or those of `at` and the next one in the order of the sums.
template <int kBits, class Load>
FDK_INLINE __m256 both_halves(Load load, std::size_t at) {
  if constexpr (kBits == 2) {
    const __m128 four = load(at);
    return _mm256_insertf128_ps(_mm256_castps128_ps256(four), four, 1);
  } else {
    const __m256 rows =
        _mm256_insertf128_ps(_mm256_castps128_ps256(load(2 * at)), load(2 * at + 1), 1);
    return _mm256_permutevar8x32_ps(rows, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
  }
}

// Sums of bytes in 16-bit lanes: of all rows modulo 2^16, and of the odd rows.
struct ByteSums {
  __m256i all = _mm256_setzero_si256(), odd = _mm256_setzero_si256();

  FDK_INLINE void add(__m256i bytes) {
    all = _mm256_add_epi16(all, bytes);
    odd = _mm256_add_epi16(odd, _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x0100)));
  }
  FDK_INLINE __m256i even() const { return _mm256_sub_epi16(all, _mm256_slli_epi16(odd, 8)); }
};

// Adds the products of these rows with one tile of x to y_sums.
template <int kBits, int kGroups, bool kAffine>
FDK_INLINE void add_tile(const Weight& w, const TileTables<kBits>& table,
                         const Stripes<kBits>& stripes, std::size_t slot, const __m256i* codes,
                         __m256* y_sums) {
  const __m256i nibble = _mm256_set1_epi8(15), base = _mm256_set1_epi32(256 << 16 | 1);
  const __m256 unit = _mm256_set1_ps(table.unit);
  constexpr int kBytesOfGroup = kGroups == 1 ? 16 : 8, kNibblesOfGroup = kGroups == 4 ? 1 : 2;
  const __m256 bias = _mm256_set1_ps(-table.unit * float(kBias * kBytesOfGroup * kNibblesOfGroup));
  unroll<kGroups>([&](auto group) FDK_LAMBDA {
    constexpr int g = group.value;
    ByteSums low, high;
    // Not unrolled: GCC 12 would spill all lookups before it adds them.
    for (int i = 0; i < kBytesOfGroup; i++) {
      const int b = kGroups == 1 ? i : 2 * i + g * 2 / kGroups;
      unroll<kNibblesOfGroup>([&](auto j) FDK_LAMBDA {
        constexpr int q = kGroups == 4 ? g % 2 : j.value;
        __m256i index = codes[b];
        if constexpr (q == 1) index = _mm256_srli_epi16(index, 4);
        index = _mm256_and_si256(index, nibble);
        const auto look_up = [&](const std::uint8_t* of_table) FDK_LAMBDA {
          if constexpr (kBits == 2) {
            const __m256i* p = reinterpret_cast<const __m256i*>(of_table);
            return _mm256_shuffle_epi8(_mm256_load_si256(p), index);
          } else {
            const __m128i* p = reinterpret_cast<const __m128i*>(of_table);
            return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(p)), index);
          }
        };
        low.add(look_up(table.sums[b][q][0]));
        high.add(look_up(table.sums[b][q][1]));
      });
    }
    const __m256i lows[2] = {low.even(), low.odd}, highs[2] = {high.even(), high.odd};
    unroll<kSums>([&](auto i) FDK_LAMBDA {
      constexpr int s = i.value;
      const __m256i words = s % 2 == 0 ? _mm256_unpacklo_epi16(lows[s / 2], highs[s / 2])
                                       : _mm256_unpackhi_epi16(lows[s / 2], highs[s / 2]);
      const __m256i integers = _mm256_madd_epi16(words, base);
      __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(integers), unit, bias);
      if constexpr (kAffine) {
        const auto load = [&](std::size_t stripe) FDK_LAMBDA {
          return load4_zeros(w, stripes.slots[stripe] + slot + std::size_t(g) * kTileRows);
        };
        sum = _mm256_fnmadd_ps(both_halves<kBits>(load, s), _mm256_load_ps(table.x_sums[g]), sum);
      }
      const auto load = [&](std::size_t stripe) FDK_LAMBDA {
        const std::size_t at = stripes.slots[stripe] + slot + std::size_t(g) * kTileRows;
        return load4_scales(w.scales, at, w.scale_type);
      };
      y_sums[s] = _mm256_fmadd_ps(sum, both_halves<kBits>(load, s), y_sums[s]);
    });
  });
}

// Writes y of the stripes of one register of sums.
template <int kBits>
FDK_INLINE void store_sums(__m256 sums, float* y, std::size_t stripes) {
  if constexpr (kBits == 2) {
    const __m128 upper = _mm256_extractf128_ps(sums, 1);
    if (stripes > 0) _mm_storeu_ps(y, _mm_add_ps(_mm256_castps256_ps128(sums), upper));
  } else {
    sums = _mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    if (stripes > 0) _mm_storeu_ps(y, _mm256_castps256_ps128(sums));
    if (stripes > 1) _mm_storeu_ps(y + kTileRows, _mm256_extractf128_ps(sums, 1));
  }
}

// Stripes that are multiplied with the same tile in turn, so that its tables are read from L1.
constexpr std::size_t kStripes = 32;
// Prefetch distance for stripes that no earlier task prefetched.
constexpr std::size_t kTilesAhead = 4;

template <int kBits, int kGroups, bool kAffine>
void gemv_stripes(const TwoPassTask& task) {
  constexpr std::size_t kBytes = tile_bytes(kBits), kAtOnce = kStripesAtOnce<kBits>;
  constexpr std::size_t kBlocks = kStripes / kAtOnce, kStripesOfSum = kAtOnce / kSums;
  const Weight& w = *task.weight;
  const auto* tables = static_cast<const TileTables<kBits>*>(task.prepared);
  const std::size_t stripe_bytes = w.tiles * kBytes;
  const std::size_t scale_bytes = w.stored_groups * kTileRows * bytes_of(w.scale_type);
  const std::size_t scale_step = kAtOnce * scale_bytes / w.tiles;
  const std::size_t count = task.end - task.begin, blocks = ceil_div(count, kAtOnce);
  Stripes<kBits> stripes[kBlocks];
  __m256 y_sums[kBlocks][kSums];
  for (std::size_t i = 0; i < blocks * kAtOnce; i++) {
    const std::size_t at = task.begin + std::min(i, count - 1);  // repeated, and the result dropped
    stripes[i / kAtOnce].codes[i % kAtOnce] = w.codes + at * stripe_bytes;
    stripes[i / kAtOnce].slots[i % kAtOnce] = at * w.stored_groups * kTileRows;
  }
  for (std::size_t b = 0; b < blocks; b++) {
    for (int s = 0; s < kSums; s++) y_sums[b][s] = _mm256_setzero_ps();
  }
  // The stripes of the next task: each block prefetches as many as it has.
  const std::size_t first_next = std::min(task.next, w.stripes);
  std::size_t to_prefetch = (w.stripes - first_next) / kAtOnce * w.tiles;
  const std::uint8_t* next = w.codes + first_next * stripe_bytes;
  const auto* next_scales = static_cast<const std::uint8_t*>(w.scales) + first_next * scale_bytes;
  std::size_t slot = 0, left = w.tiles_per_group;
  for (std::size_t tile = 0; tile < w.tiles; tile++) {
    for (std::size_t b = 0; b < blocks; b++) {
      if (!task.prefetched && tile + kTilesAhead < w.tiles) {
        for (const std::uint8_t* from : stripes[b].codes) {
          prefetch(from + (tile + kTilesAhead) * kBytes, kBytes);
        }
      }
      if (to_prefetch != 0) {
        prefetch(next, kBytes * kAtOnce);
        prefetch(next_scales, scale_step);
        next += kBytes * kAtOnce;
        next_scales += scale_step;
        to_prefetch--;
      }
      alignas(32) __m256i codes[kBytesOfHalf];
      transpose<kBits>(stripes[b], tile * kBytes, codes);
      add_tile<kBits, kGroups, kAffine>(w, tables[tile], stripes[b], slot, codes, y_sums[b]);
    }
    if (kGroups > 1 || --left == 0) {
      slot += kGroups * kTileRows;
      left = w.tiles_per_group;
    }
  }
  for (std::size_t i = 0; i < blocks * kSums; i++) {
    const std::size_t first = i * kStripesOfSum;
    if (first >= count) break;
    store_sums<kBits>(y_sums[i / kSums][i % kSums], task.y + (task.begin + first) * kTileRows,
                      count - first);
  }
}

void gemv(const TwoPassTask& task) {
  with_kind(*task.weight, [&](auto bits, auto groups, auto affine) FDK_LAMBDA {
    gemv_stripes<bits.value, groups.value, affine.value>(task);
  });
}

bool prepare(const Weight& w, const void* x, void* prepared, std::size_t, std::size_t) {
  const float* from = static_cast<const float*>(x);
  if (w.bits == 1) return build_tiles(w, from, static_cast<TileTables<1>*>(prepared));
  return build_tiles(w, from, static_cast<TileTables<2>*>(prepared));
}

}  // namespace

extern const TwoPassGemv kLutGemvAvx2 = {supports, sizeof(TileTables<2>), prepare, kStripes,
                                         gemv,     &kGemvInt16Avx2};

}  // namespace fdk
