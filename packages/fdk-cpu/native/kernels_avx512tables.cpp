// 1 and 2 bits by tables over the activations (avx512_tables.h): the sums of 16 rows at a time.
//
// Registers of the codes of 16 rows, [h][t]: byte 4 row + i of register t belongs to table 4 t + i
// of step 2 h of 32 positions (its low four bits) and of step 2 h + 1 (its high ones).
#include <immintrin.h>

#include <array>

#include "avx512_tables.h"
#include "kernels.h"
#include "simd_float.h"
#include "x86_scales.h"

namespace fdk {
namespace {

constexpr std::size_t kStripesAtOnce = 4;  // of 4 rows: the 16 dwords of a register

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
  const TileTables<kBits>* sums_of = &table;
  // GCC 12 would copy all 32 registers of tables to the stack once a tile, and look up in the copy
  // (256 rows, warm: 14.8 -> 13.4 us; 1 bit has half of them, and is better with the copy).
  if constexpr (kBits == 2) asm volatile("" : "+r"(sums_of));
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
        const __m512i low = _mm512_load_si512(sums_of->sums[s][t][0]);
        const __m512i high = _mm512_load_si512(sums_of->sums[s][t][1]);
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
void gemv_stripes(const TableTask& task) {
  constexpr std::size_t kBytes = tile_bytes(kBits);
  const Weight& w = *task.weight;
  const auto* tables = static_cast<const TileTables<kBits>*>(task.tables);
  const Transposer<kBits> transpose;
  const std::size_t stripe_bytes = w.tiles * kBytes;
  const std::size_t scale_bytes = w.stored_groups * kTileRows * bytes_of(w.scale_type);
  const std::size_t scale_step = kStripesAtOnce * scale_bytes / w.tiles;
  const std::size_t count = task.end - task.begin, blocks = ceil_div(count, kStripesAtOnce);
  Stripes stripes[kBlocks];
  __m512 y_sums[kBlocks];
  for (std::size_t i = 0; i < blocks * kStripesAtOnce; i++) {
    const std::size_t at = task.begin + (i < count ? i : count - 1);  // repeated, and then dropped
    Stripes& of = stripes[i / kStripesAtOnce];
    of.codes[i % kStripesAtOnce] = w.codes + at * stripe_bytes;
    of.slots[i % kStripesAtOnce] = at * w.stored_groups * kTileRows;
  }
  for (std::size_t b = 0; b < blocks; b++) y_sums[b] = _mm512_setzero_ps();
  // Of the stripes that come after, four for each block here, and a tile of them for each tile.
  const std::size_t first = task.next < w.stripes ? task.next : w.stripes;
  std::size_t to_fetch = (w.stripes - first) / kStripesAtOnce * w.tiles;
  const std::uint8_t* next = w.codes + first * stripe_bytes;
  const auto* next_scales = static_cast<const std::uint8_t*>(w.scales) + first * scale_bytes;
  RowCodes<kBits> ahead = transpose(stripes[0], 0);
  std::size_t slot = 0, left = w.tiles_per_group;
  for (std::size_t tile = 0; tile < w.tiles; tile++) {
    for (std::size_t b = 0; b < blocks; b++) {
      if (!task.fetched && tile + kTilesAhead < w.tiles) {
        for (const std::uint8_t* from : stripes[b].codes) {
          fetch(from + (tile + kTilesAhead) * kBytes, kBytes);
        }
      }
      if (to_fetch != 0) {
        fetch(next, kBytes * kStripesAtOnce);
        fetch(next_scales, scale_step);
        next += kBytes * kStripesAtOnce;
        next_scales += scale_step;
        to_fetch--;
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
    const std::size_t row = b * kStripesAtOnce * kTileRows, rows = count * kTileRows - row;
    const __mmask16 there = rows >= 16 ? __mmask16(0xFFFF) : __mmask16((1u << rows) - 1);
    _mm512_mask_storeu_ps(task.y + task.begin * kTileRows + row, there, y_sums[b]);
  }
}

void gemv(const TableTask& task) {
  with_kind(*task.weight, [&](auto bits, auto groups, auto affine) FDK_LAMBDA {
    gemv_stripes<bits.value, groups.value, affine.value>(task);
  });
}

bool build(const Weight& w, const void* x, void* tables) {
  const std::uint16_t* from = static_cast<const std::uint16_t*>(x);
  if (w.bits == 1) return build_tiles(w, from, static_cast<TileTables<1>*>(tables));
  return build_tiles(w, from, static_cast<TileTables<2>*>(tables));
}

}  // namespace

extern const TableKernels kAvx512Tables = {takes, sizeof(TileTables<2>), build, kStripes, gemv};

}  // namespace fdk
