// 1 bit with 9 or more rows of x: operand A is W_hat itself, rounded as in dequantise.cu, so all
// groups add to one float32 sum. Sums that are scaled group by group need more registers (128 x 64
// weights: 240 per thread, here 146), so 12 warps fit instead of 8.
//
// Even fragments are looked up, then scaled. In odd ones, the bits of register i in step s are bit
// 3 + s + 4 i and the one 16 above (layout.py: _bit_positions): the two values of a row are scaled
// once, and bits select between them. With -c and c (SIGNS) a bit is the sign.
#pragma once
#include "common/decode.cuh"

static_assert(!SCALES_WEIGHTS || (BITS == 1 && !AFFINE && SCALE_TYPE == FP16));
static_assert(!SIGNS || SCALES_WEIGHTS);

// The two values of one row, in one half of a block.
struct ScaledRow {
  uint32 scale;  // as a pair
  uint32 first,
      other;  // the value of code 0 as a pair, and the bits in which that of code 1 differs

  __forceinline__ ScaledRow(const Scales& scales, uint32 codebook, int half, int fragment,
                            int row) {
    scale = scales.pair(half, fragment, row);
    first = multiply_pair(byte_permute(codebook, codebook, 0x1010), scale);
    other = first ^ multiply_pair(byte_permute(codebook, codebook, 0x3232), scale);
  }
};

// Decodes the four registers of step s of a fragment; `rows` are its rows g and g + 8.
__forceinline__ void decode_scaled(uint32 (&a)[REGISTERS], const uint32 (&words)[LANE_WORDS],
                                   int fragment, int s, const uint8* table,
                                   const DecodeConstants& c, const ScaledRow (&rows)[2]) {
  if (fragment % 2 == 0) {
    decode(a, words, fragment, s, table, c);
#pragma unroll
    for (int i = 0; i < REGISTERS; i++) a[i] = multiply_pair(a[i], rows[i & 1].scale);
    return;
  }
  const uint32 word = words[fragment];
#pragma unroll
  for (int i = 0; i < REGISTERS; i++) {
    const ScaledRow& row = rows[i & 1];
    if (SIGNS) {
      a[i] = row.first ^ (rotate_right(word, 4 * i + s - 12) & 0x80008000u);
    } else {
      // A rotation moves the bits of register i to bits 15 and 31, those of i + 2 to 23 and 7: sign
      // bits of bytes, which a permutation replicates over halves.
      const uint32 turned = rotate_right(word, 4 * (i & 1) + s - 12);
      const uint32 mask = byte_permute(turned, turned, i < 2 ? 0xBB99 : 0x88AA);
      a[i] = row.first ^ (mask & row.other);
    }
  }
}
