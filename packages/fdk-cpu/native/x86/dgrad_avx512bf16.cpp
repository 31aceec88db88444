// GradPanels on AVX-512 BF16.
#include <immintrin.h>

#include "x86/round_bf16_avx512-inl.h"
#include "x86/linear_avx512bf16.h"
#include "common/kernels.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

constexpr std::size_t kLanes = 32;

// Lanes as decode_pairs leaves them: position 8 q + i is lane 4 q + i, or 16 lanes after it where
// i is 4 and more.
void round_panel(const float* products, std::uint16_t* out) {
  const __m512i first = _mm512_srli_epi32(rounded_to_bf16(_mm512_loadu_ps(products)), 16);
  const __m512i second = _mm512_srli_epi32(rounded_to_bf16(_mm512_loadu_ps(products + 16)), 16);
  _mm512_storeu_si512(out, _mm512_packus_epi32(first, second));
}

}  // namespace

// Of two tiles by 1024 rows it took 26 ms where this takes 22 (4096 x 4096, 8 bits, m = 128, Zen
// 4), of four by 256 the same.
extern const GradPanels kAvx512Bf16Grad = {
    .panel = kLanes,
    .block_rows = 2048,
    .block_tiles = 1,
    .decode_pairs = decode_pairs_avx512bf16,
    .round = round_panel,
};

// Tiles of products cost less than codes that lie apart: 33 ms by 2048 rows of one tile where this
// takes 23 (4 bits, m = 512, Emerald Rapids; m = 2 5.5 and 3.6).
extern const GradPanels kAmxGrad = {
    .panel = kLanes,
    .block_rows = 512,
    .block_tiles = 4,
    .decode_pairs = decode_pairs_avx512bf16,
    .round = round_panel,
};

}  // namespace fdk
