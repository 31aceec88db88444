// 1 and 2 bits by tables over the activations (avx512_tables.h): the sums of 16 rows at a time.
#include <immintrin.h>

#include <array>

#include "x86/lut_codes_avx512vnni-inl.h"
#include "x86/lut_build_avx512vnni-inl.h"
#include "x86/linear_avx512bf16.h"
#include "common/kernels.h"
#include "common/gemv-inl.h"
#include "x86/scales_x86-inl.h"

namespace fdk {
namespace {

// The scales (or zero points) of 16 rows, `slot` after the first of each stripe: of kGroups groups
// that follow one another.
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

// y_sums += the products of 16 rows with one tile of x; the next codes are made meanwhile.
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
  // GCC 12 would copy tables to the stack once a tile, and look up in the copy (256 rows, warm: 2
  // bits 14.8 -> 13.4 us; 1 bit, which has half of them, 17.5 -> 17.3 in turns, and cold alike).
  asm volatile("" : "+r"(sums_of));
  // Two chains of products for each half of a tile, or for each step where it is a group: one alone
  // would be waited for.
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

// Blocks of 16 rows that follow one another on the same tile, so that its tables come from L1:
// those of a long x do not fit it.
constexpr std::size_t kBlocks = 8;
constexpr std::size_t kStripes = kBlocks * kStripesAtOnce;

// How far ahead codes of these stripes are fetched: those that the task before was asked to fetch
// too, for some of its fetches seem to be dropped (a loop of fetches into L2 alone passes 42 GB/s,
// 80 with two threads, where loads pass 21 and 27; once more, two threads: 229 -> 225 us, cold).
// Into L1, where the next tile's tables are fetched too, at 2 bits a tile ahead: among other
// kernels' calls, where a thread may take 20 us for 128 rows in place of 8, medians of two threads
// 223 -> 203, 211 -> 197 and 232 -> 204 us, of one 261 -> 259. At 1 bit, whose tables are half as
// long, where they fit L1 beside the codes, as on wide machines (48 KiB: 95 -> 91 us with one
// thread, 32: 149 -> 155); else into L2.
struct Near {
  std::size_t tiles;
  bool l1;
};
Near near_of(int bits) {
  if (bits == 2) return {1, true};
  return is_wide_avx512bf16() ? Near{2, true} : Near{4, false};
}

template <int kBits, int kGroups, bool kAffine>
void gemv_stripes(const TableTask& task) {
  constexpr std::size_t kBytes = tile_bytes(kBits);
  constexpr std::size_t kPart = ceil_div(sizeof(TileTables<kBits>), kBlocks * kLine) * kLine;
  const Weight& w = *task.weight;
  const auto* tables = static_cast<const TileTables<kBits>*>(task.tables);
  const Indices<kBits> indices;
  const std::size_t stripe_bytes = w.tiles * kBytes;
  const std::size_t scale_bytes = w.stored_groups * kTileRows * bytes_of(w.scale_type);
  const std::size_t scale_step = kStripesAtOnce * scale_bytes / w.tiles;
  const std::size_t stripe_slots = w.stored_groups * kTileRows;
  const Near near = near_of(kBits);
  // Blocks of 16 rows, and of the 4 of a stripe where fewer are left.
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
  // Of the stripes that come after, four for each block here, and a tile of them for each tile.
  const std::size_t first = task.next < w.stripes ? task.next : w.stripes;
  std::size_t to_fetch = (w.stripes - first) / kStripesAtOnce * w.tiles;
  const std::uint8_t* next = w.codes + first * stripe_bytes;
  const auto* next_scales = static_cast<const std::uint8_t*>(w.scales) + first * scale_bytes;
  // Where nothing more is to be fetched, fetches hit what is near.
  const auto* nothing = static_cast<const std::uint8_t*>(task.tables);
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
            fetch<Cache::l1>(codes + std::size_t(i.value) * stripes[b].apart, kBytes);
          });
          // The last part may reach into the tables after, which are read next.
          fetch<Cache::l1>(reinterpret_cast<const char*>(tables + tile + 1) + b * kPart, kPart);
        } else {
          unroll<kStripesAtOnce>([&](auto i) FDK_LAMBDA {
            fetch(codes + std::size_t(i.value) * stripes[b].apart, kBytes);
          });
        }
      }
      const std::uint8_t* later = to_fetch != 0 ? next : nothing;
      // GCC 12 would choose between both for each line, and spill registers to those of vectors (1
      // bit, of 16 rows of a tile in L1: 26 -> 24.5 cycles, 2 bits 46.5 -> 43.5).
      asm volatile("" : "+r"(later));
      if (to_fetch != 0) {
        fetch(next_scales, scale_step);
        next += kBytes * kStripesAtOnce;
        next_scales += scale_step;
        to_fetch--;
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

void gemv(const TableTask& task) {
  with_kind(*task.weight, [&](auto bits, auto groups, auto affine) FDK_LAMBDA {
    gemv_stripes<bits.value, groups.value, affine.value>(task);
  });
}

bool build(const Weight& w, const void* x, void* tables, std::size_t begin, std::size_t end) {
  const std::uint16_t* from = static_cast<const std::uint16_t*>(x);
  if (w.bits == 1) return build_tiles(w, from, static_cast<TileTables<1>*>(tables), begin, end);
  return build_tiles(w, from, static_cast<TileTables<2>*>(tables), begin, end);
}

}  // namespace

extern const TableKernels kAvx512Tables = {takes, sizeof(TileTables<2>), build, kStripes, gemv};

}  // namespace fdk
