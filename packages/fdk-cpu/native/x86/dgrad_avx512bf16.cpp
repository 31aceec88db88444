// The backward product in bf16: AVX-512 BF16 and AMX.
#include <immintrin.h>

#include "x86/round_bf16_avx512-inl.h"
#include "x86/linear_avx512bf16.h"
#include "common/kernels.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

constexpr std::size_t kLanes = 32;

// The lanes are those of dequantise_pairs: position 8 q + i is lane 4 q + i, or 16 lanes later for
// i of 4 or more.
void round_panel(const float* products, std::uint16_t* out) {
  const __m512i first = _mm512_srli_epi32(rounded_to_bf16(_mm512_loadu_ps(products)), 16);
  const __m512i second = _mm512_srli_epi32(rounded_to_bf16(_mm512_loadu_ps(products + 16)), 16);
  _mm512_storeu_si512(out, _mm512_packus_epi32(first, second));
}

}  // namespace

// 2048 rows of one tile: two tiles of 1024 rows took 26 ms instead of 22 (Zen 4, 4096 x 4096, 8
// bits, m = 128).
extern const DgradPanels kDgradAvx512Bf16 = {
    .panel = kLanes,
    .block_rows = 2048,
    .block_tiles = 1,
    .dequantise_pairs = dequantise_pairs_avx512bf16,
    .round = round_panel,
};

// With AMX, products cost less than codes that are far apart: 2048 rows of one tile took 33 ms
// instead of 23 (Emerald Rapids, 4096 x 4096, 4 bits, m = 512).
extern const DgradPanels kDgradAmx = {
    .panel = kLanes,
    .block_rows = 512,
    .block_tiles = 4,
    .dequantise_pairs = dequantise_pairs_avx512bf16,
    .round = round_panel,
};

}  // namespace fdk
