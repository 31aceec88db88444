// One row of x by tables of 1 and 2 bits: AVX2.
//
// `vpshufb` looks up 16 rows in one table, the low and the high bytes of the sums apart, so that
// codes are transposed first: byte b of 16 rows.
//
// Bytes are summed in 16-bit lanes. Those of odd rows are cut out (`vpmaddubsw`) and summed by
// themselves; what the lanes hold modulo 2^16, less 256 times that, is the sum of the even rows.
//
// The 128-bit halves of a register are different rows at 1 bit (of a row pair, whose bytes of a
// tile lie side by side), and different bytes of the same rows, b and b + 16, at 2 bits.
#include <immintrin.h>

#include <algorithm>

#include "x86/lut_build_avx2-inl.h"
#include "common/kernels.h"
#include "common/gemv-inl.h"
#include "x86/scales_x86-inl.h"

namespace fdk {
namespace {

// Stripes of 4 rows that one register of codes has.
template <int kBits>
inline constexpr std::size_t kStripesAtOnce = 8 / kBits;
// Registers of 8 sums that these make; at 2 bits, sums of the same 4 rows in both halves.
constexpr int kSums = 4;

// Where the codes and scales of the stripes of a register begin.
template <int kBits>
struct Stripes {
  const std::uint8_t* codes[kStripesAtOnce<kBits>];
  std::size_t slots[kStripesAtOnce<kBits>];
};

// Byte b of the rows, at out[b], of the tile that lies `offset` after the first of each stripe. Row
// j of a register is that of input j: of the even inputs, then of the odd ones, each four (1 bit:
// pairs of rows, of two stripes) make one register of sums.
template <int kBits>
FDK_INLINE void transpose(const Stripes<kBits>& stripes, std::size_t offset, __m256i* out) {
  __m256i from[kBytesOfHalf], to[kBytesOfHalf];
  unroll<kBytesOfHalf>([&](auto input) FDK_LAMBDA {
    constexpr std::size_t j = std::size_t(input.value), at = j % 2 * 8 + j / 2;
    constexpr std::size_t kInputs = 2 * std::size_t(kBits);  // of a stripe
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

// Four scales of stripe `at`, twice, or of `at` and the next one in the order of the sums.
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

// Sums of bytes in 16-bit lanes: of all, modulo 2^16, and of the odd rows.
struct ByteSums {
  __m256i all = _mm256_setzero_si256(), odd = _mm256_setzero_si256();

  FDK_INLINE void add(__m256i bytes) {
    all = _mm256_add_epi16(all, bytes);
    odd = _mm256_add_epi16(odd, _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x0100)));
  }
  FDK_INLINE __m256i even() const { return _mm256_sub_epi16(all, _mm256_slli_epi16(odd, 8)); }
};

// y_sums += the products of these rows with one tile of x.
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
    // Unrolled, GCC 12 sums only after all lookups, and keeps those in memory.
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

// y of the stripes that a register of sums is of.
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

// Rows that follow one another on the same tile, so that its tables come from L1.
constexpr std::size_t kStripes = 32;
// How far ahead the stripes of a loop are fetched that no task before it did.
constexpr std::size_t kTilesAhead = 4;

template <int kBits, int kGroups, bool kAffine>
void gemv_stripes(const TableTask& task) {
  constexpr std::size_t kBytes = tile_bytes(kBits), kAtOnce = kStripesAtOnce<kBits>;
  constexpr std::size_t kBlocks = kStripes / kAtOnce, kStripesOfSum = kAtOnce / kSums;
  const Weight& w = *task.weight;
  const auto* tables = static_cast<const TileTables<kBits>*>(task.tables);
  const std::size_t stripe_bytes = w.tiles * kBytes;
  const std::size_t scale_bytes = w.stored_groups * kTileRows * bytes_of(w.scale_type);
  const std::size_t scale_step = kAtOnce * scale_bytes / w.tiles;
  const std::size_t count = task.end - task.begin, blocks = ceil_div(count, kAtOnce);
  Stripes<kBits> stripes[kBlocks];
  __m256 y_sums[kBlocks][kSums];
  for (std::size_t i = 0; i < blocks * kAtOnce; i++) {
    const std::size_t at = task.begin + std::min(i, count - 1);  // repeated, and then dropped
    stripes[i / kAtOnce].codes[i % kAtOnce] = w.codes + at * stripe_bytes;
    stripes[i / kAtOnce].slots[i % kAtOnce] = at * w.stored_groups * kTileRows;
  }
  for (std::size_t b = 0; b < blocks; b++) {
    for (int s = 0; s < kSums; s++) y_sums[b][s] = _mm256_setzero_ps();
  }
  // Of the stripes that come after, as many for each block here as it has.
  const std::size_t first_next = std::min(task.next, w.stripes);
  std::size_t to_fetch = (w.stripes - first_next) / kAtOnce * w.tiles;
  const std::uint8_t* next = w.codes + first_next * stripe_bytes;
  const auto* next_scales = static_cast<const std::uint8_t*>(w.scales) + first_next * scale_bytes;
  std::size_t slot = 0, left = w.tiles_per_group;
  for (std::size_t tile = 0; tile < w.tiles; tile++) {
    for (std::size_t b = 0; b < blocks; b++) {
      if (!task.fetched && tile + kTilesAhead < w.tiles) {
        for (const std::uint8_t* from : stripes[b].codes) {
          fetch(from + (tile + kTilesAhead) * kBytes, kBytes);
        }
      }
      if (to_fetch != 0) {
        fetch(next, kBytes * kAtOnce);
        fetch(next_scales, scale_step);
        next += kBytes * kAtOnce;
        next_scales += scale_step;
        to_fetch--;
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

void gemv(const TableTask& task) {
  with_kind(*task.weight, [&](auto bits, auto groups, auto affine) FDK_LAMBDA {
    gemv_stripes<bits.value, groups.value, affine.value>(task);
  });
}

bool build(const Weight& w, const void* x, void* tables, std::size_t, std::size_t) {
  const float* from = static_cast<const float*>(x);
  if (w.bits == 1) return build_tiles(w, from, static_cast<TileTables<1>*>(tables));
  return build_tiles(w, from, static_cast<TileTables<2>*>(tables));
}

}  // namespace

extern const TableKernels kAvx2Tables = {takes,      sizeof(TileTables<2>), build, kStripes, gemv,
                                         &kAvx2Fixed};

}  // namespace fdk
