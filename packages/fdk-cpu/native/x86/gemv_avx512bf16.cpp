// The GEMV of AVX-512 with BF16 and VBMI: bf16 activations, products of pairs summed in float32.
//
// Values before scaling are exact in bf16 (a codebook rounded to bf16, or codes below 256), and so
// are their products; the scale is applied to the sums of a group. Zero points are subtracted from
// the sums as well: sum x (code - zero) = sum x code - zero sum x, lane by lane, so that a single
// nonzero x still gives exactly (code - zero) scale.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "common/simd-inl.h"
#include "common/kernels.h"
#include "x86/codebook_avx512bf16-inl.h"
#include "x86/linear_avx512bf16.h"

namespace fdk {
namespace {

// The values of a tile in bf16, row by row, for one row of x.
//
// Rows are decoded one by one except at 3 bits, where that would take two broadcasts, two shifts
// and a select per row. There the tile is transposed by whole registers: two of the plane of 2
// bits, and one of the plane of 1 bit, which has all four rows. A field of 4 bits then has 2 bits
// of two rows, or 1 bit of four, and a table per row ignores the bits of the others: `vpermw` reads
// 5 bits.

// The codes of a tile, loaded some time before its values are needed.
template <int kBits>
struct TileCodes {
  using Table = Table16<kBits>;
  const std::uint8_t* tile;

  FDK_INLINE explicit TileCodes(const std::uint8_t* p) : tile(p) {}
  template <int r>
  FDK_INLINE Values<kBits> row(const Table& table) const {
    return Values<kBits>(tile, r, table);
  }
};

// Per row, where the index has its code: the low bits at places 2 and 3 and the high bit at place 0
// or 1 (rows 0 and 1), or the low bits at places 0 and 1 and the high bit at place 2 or 3 (rows 2
// and 3).
struct RowTables {
  __m512i t[kTileRows];

  FDK_INLINE explicit RowTables(const float* table) {
    alignas(64) std::uint16_t entries[32];
    for (unsigned r = 0; r < kTileRows; r++) {
      for (unsigned i = 0; i < 32; i++) {
        const unsigned low = r < 2 ? i >> 2 & 3 : i & 3, high = i >> r & 1;
        entries[i] = bf16_bits(table[4 * high + low]);
      }
      t[r] = _mm512_load_si512(entries);
    }
  }
};

// Step s is in the 4-bit fields at 4 s of 16-bit lanes. Each select overwrites a register that is
// no longer needed: otherwise GCC 12 copies the mask (256 rows, warm: 24.4 -> 23.5 us).
template <>
struct TileCodes<3> {
  using Table = RowTables;
  __m512i low02, low13;  // bits 0 and 1 of the code of row 2 (3), above them those of row 0 (1)
  __m512i high;          // bit 2 of rows 0 to 3

  FDK_INLINE explicit TileCodes(const std::uint8_t* tile) {
    const __m512i rows01 = _mm512_loadu_si512(tile), rows23 = _mm512_loadu_si512(tile + 64);
    // Even fields of 2 bits of a row are the first 16 positions of a step.
    const __m512i first = replace(_mm512_slli_epi16(rows01, 2), fields(0x3333), rows23);
    const __m512i last = replace(_mm512_srli_epi16(rows23, 2), fields(0xCCCC), rows01);
    low02 = _mm512_shuffle_i64x2(first, last, 0x44);
    low13 = _mm512_shuffle_i64x2(first, last, 0xEE);
    // Swaps quarter r and bit q of a field, where r is the row and q the q-th 8 positions of a
    // step: first halves and pairs of bits, then quarters and bits. Rotating 32-bit lanes carries
    // only bits of the same field into the places that are kept.
    const __m512i rows = _mm512_loadu_si512(tile + 128);
    const __m512i left2 = halves(2, 30), left1 = quarters(1, 31);
    const __m512i kept2 = halves(0x33333333, int(0xCCCCCCCC));
    const __m512i kept1 = quarters(0x55555555, int(0xAAAAAAAA));
    const __m512i other2 = _mm512_rolv_epi32(_mm512_shuffle_i64x2(rows, rows, 0x4E), left2);
    const __m512i half = replace(other2, kept2, rows);
    const __m512i other1 = _mm512_rolv_epi32(_mm512_permutex_epi64(half, 0x4E), left1);
    high = replace(other1, kept1, half);
  }

  template <int r>
  FDK_INLINE Values<3> row(const Table& table) const {
    const __m512i low = r % 2 == 0 ? low02 : low13;
    const __m512i codes = replace(low, fields(r < 2 ? 0x3333 : 0xCCCC), high);
    Values<3> values;
    unroll<kSteps>([&](auto step) FDK_LAMBDA {
      constexpr int s = step.value;
      values.v[s] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * s), table.t[r]);
    });
    return values;
  }

 private:
  // `mask ? with : from` for each bit.
  static FDK_INLINE __m512i replace(__m512i from, __m512i mask, __m512i with) {
    return _mm512_ternarylogic_epi32(from, mask, with, 0xB8);
  }
  static FDK_INLINE __m512i fields(std::uint16_t mask) { return _mm512_set1_epi16(short(mask)); }
  // 32-bit lanes for the even and odd halves, or quarters, of a register.
  static FDK_INLINE __m512i halves(int even, int odd) {
    return _mm512_inserti64x4(_mm512_set1_epi32(even), _mm256_set1_epi32(odd), 1);
  }
  static FDK_INLINE __m512i quarters(int even, int odd) {
    const __m256i two = _mm256_inserti128_si256(_mm256_set1_epi32(even), _mm_set1_epi32(odd), 1);
    return _mm512_broadcast_i64x4(two);
  }
};

// y = W_hat x for one row of x and stripes [begin, end), at least one.
template <int kBits, int kGroups, bool kAffine>
void gemv_stripes(const GemvTask& task, std::size_t begin, std::size_t end) {
  constexpr std::size_t kBytes = tile_bytes(kBits);
  constexpr int kRun = kGroups >= kSteps ? 1 : kSteps / kGroups;  // steps that share a scale
  const Weight& w = *task.weight;
  const typename TileCodes<kBits>::Table table(w.table);
  TileCodes<kBits> ahead(w.codes + begin * w.tiles * kBytes);
  const std::uint8_t* const last = w.codes + (end * w.tiles - 1) * kBytes;
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    __m512 sums[kTileRows];
    FDK_UNROLL
    for (std::size_t r = 0; r < kTileRows; r++) sums[r] = _mm512_setzero_ps();
    const std::uint16_t* x = static_cast<const std::uint16_t*>(task.x);
    const float* x_sums = task.x_sums;
    for_tiles(w, stripe, 0, w.tiles, kBytes,
              [&](std::size_t, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
                alignas(64) float scales[kGroups * kTileRows], zeros[kGroups * kTileRows];
                load_groups<kGroups, false>(w, slot, scales);
                if constexpr (kAffine) load_groups<kGroups, true>(w, slot, zeros);
                for (std::size_t i = 0; i < kBytes; i += 64) {
                  _mm_prefetch(reinterpret_cast<const char*>(codes + kPrefetchBytes + i),
                               _MM_HINT_T0);
                }
                // 3 bits: loads the codes of the next tile before the products of this one, which
                // would otherwise wait for their own (256 rows, warm: 34.2 -> 27.5 us).
                const TileCodes<kBits> of_tile = ahead;
                ahead = TileCodes<kBits>(codes == last ? codes : codes + kBytes);
                unroll<int(kTileRows)>([&](auto row) FDK_LAMBDA {
                  constexpr int r = row.value;
                  const Values<kBits> of_row = of_tile.template row<r>(table);
                  unroll<kSteps / kRun>([&](auto run) FDK_LAMBDA {
                    __m512 part = _mm512_setzero_ps();
                    unroll<kRun>([&](auto i) FDK_LAMBDA {
                      constexpr int s = run.value * kRun + i.value;
                      const __m512i activations = _mm512_loadu_si512(x + s * kStep);
                      part = _mm512_dpbf16_ps(part, as_bf16(activations), as_bf16(of_row.v[s]));
                      if constexpr (kAffine && i.value == 0) {
                        const __m512 sum = _mm512_loadu_ps(x_sums + s * kStep / 2);
                        part = _mm512_fnmadd_ps(group_at<kGroups, s>(zeros, r), sum, part);
                      }
                    });
                    const __m512 scale = group_at<kGroups, run.value * kRun>(scales, r);
                    sums[r] = _mm512_fmadd_ps(part, scale, sums[r]);
                  });
                });
                x += kTileK;
                if constexpr (kAffine) x_sums += kTileK / 2;
              });
    FDK_UNROLL
    for (std::size_t r = 0; r < kTileRows; r++) {
      task.y[stripe * kTileRows + r] = _mm512_reduce_add_ps(sums[r]);
    }
  }
}

}  // namespace

void gemv_avx512bf16(const GemvTask& task, std::size_t begin, std::size_t end) {
  if (task.m > 1) return gemm_small_m_avx512bf16(task, begin, end);
  const std::size_t groups = task.weight->groups_per_tile;
  with_bits(task.weight->bits, [&](auto bits) FDK_LAMBDA {
    with_groups(groups, [&](auto count) FDK_LAMBDA {
      if (task.weight->zeros != nullptr) {
        gemv_stripes<bits.value, count.value, true>(task, begin, end);
      } else {
        gemv_stripes<bits.value, count.value, false>(task, begin, end);
      }
    });
  });
}

}  // namespace fdk
