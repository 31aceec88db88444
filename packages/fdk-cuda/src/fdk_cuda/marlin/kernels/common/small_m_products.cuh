// Operands and sums of a warp's stage with few rows of x. small_m_block.cuh has the products.
//
// Macros, in addition to those of small_m_tile.cuh:
//   M_TILES  1 or 2: tiles of 8 rows of x
//   SPREAD   1: up to 4 rows of x are in the even columns of operand B. A lane's sums of odd
//            columns are then unused, which halves the work on sums
//   SCALES_WEIGHTS, SIGNS  see decode_1bit_scaled.cuh
#pragma once
#include "common/decode_1bit_scaled.cuh"
#include "common/small_m_tile.cuh"

static_assert(M_TILES == 1 || M_TILES == 2);
static_assert(!SPREAD || M_TILES == 1);
static_assert(!SCALES_WEIGHTS || M_TILES == 2);
// The used ones of a lane's four sums (rows g, then g + 8).
constexpr int COLUMNS = SPREAD ? 1 : 2, VALUES = 2 * COLUMNS;

// Index of a used sum among the four.
constexpr int value_index(int value) { return SPREAD ? 2 * value : value; }

// Loads x of the next stage during this one, where that gains more than the registers cost (H200,
// 8192 x 8192, m = 16: 8 bits 21.7 us -> 20.9, 4 bits 14.4 -> 14.2, but 1 bit 12.3 -> 14.0).
constexpr bool X_AHEAD = M_TILES == 2 && BITS >= 4 && K_BLOCKS == 1;

// 1 bit codebook: the sum of bits and the sum of x are kept separately until the end, where c0 and
// c1 multiply them. So a one-hot x gives exactly c0 or c1.
constexpr bool KEEPS_X_SUM = COMPUTES_FRAGMENT && !AFFINE && !SCALES_WEIGHTS;
constexpr bool NEEDS_SUM = KEEPS_X_SUM || AFFINE;

// A lane's x for a stage: rows g and g + 8, eight neighbouring columns in each half of a block.
struct Activations {
  uint4 v[K_BLOCKS][2][M_TILES];

  __forceinline__ uint32 word(int block, int s, int tile, int which) const {
    const uint4& u = v[block][s >> 1][tile];
    return s & 1 ? (which ? u.w : u.z) : (which ? u.y : u.x);
  }
};

// Sums of x over a group, which zero points and 1-bit bases multiply.
struct RowSums {
  float x[K_BLOCKS][PER_ROW][M_TILES][COLUMNS];  // sums for rows 2 t and 2 t + 1; SPREAD: row t
  // 1 bit: sums of x times its step's base, negated.
  float based[K_BLOCKS][PER_ROW][M_TILES][COLUMNS];

  // Computed by the tensor cores, as products with a weight whose upper rows are negated bases and
  // lower rows are ones, which puts the sums into the lanes that need them.
  __forceinline__ void compute(const Activations& a, const uint32 (&base)[STEPS]) {
    const uint32 ones = FP16 ? 0x3C003C00u : 0x3F803F80u;
#pragma unroll
    for (int half = 0; half < PER_ROW; half++) {
      float d[K_BLOCKS][M_TILES][4] = {};
#pragma unroll
      for (int s = half * STEPS / PER_ROW; s < (half + 1) * STEPS / PER_ROW; s++) {
        const uint32 upper = COMPUTES_FRAGMENT ? base[s] ^ 0x80008000u : ones;
        const uint32 weight[REGISTERS] = {upper, ones, upper, ones};
#pragma unroll
        for (int block = 0; block < K_BLOCKS; block++)
#pragma unroll
          for (int tile = 0; tile < M_TILES; tile++)
            multiply(d[block][tile], weight, a.word(block, s, tile, 0), a.word(block, s, tile, 1));
      }
#pragma unroll
      for (int block = 0; block < K_BLOCKS; block++)
#pragma unroll
        for (int tile = 0; tile < M_TILES; tile++)
#pragma unroll
          for (int e = 0; e < COLUMNS; e++) {
            based[block][half][tile][e] = d[block][tile][e];
            x[block][half][tile][e] = d[block][tile][2 + e];
          }
    }
  }
};

// SCALES_WEIGHTS: adds the products of a block to the sums from fragment `first` on.
template <int COUNT>
__forceinline__ void add_scaled(float (&sum)[COUNT][M_TILES][VALUES], int first,
                                const uint32 (&words)[LANE_WORDS], const Scales& scales,
                                const Activations& x, int k_block, const uint8* table,
                                const DecodeConstants& constants) {
#pragma unroll
  for (int half = 0; half < PER_ROW; half++)
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      const ScaledRow rows[2] = {{scales, constants.values[0], half, f, 0},
                                 {scales, constants.values[0], half, f, 1}};
#pragma unroll
      for (int s = half * STEPS / PER_ROW; s < (half + 1) * STEPS / PER_ROW; s++) {
        uint32 a[REGISTERS];
        decode_scaled(a, words, f, s, table, constants, rows);
#pragma unroll
        for (int c = 0; c < M_TILES; c++)
          multiply(sum[first + f][c], a, x.word(k_block, s, c, 0), x.word(k_block, s, c, 1));
      }
    }
}

// 1 bit codebook: joins the sums of bits and of x.
template <int BLOCKS>
__forceinline__ void join_x_sums(float (&sum)[FRAGMENTS * BLOCKS][M_TILES][VALUES],
                                 const float (&x_sum)[BLOCKS][M_TILES][VALUES],
                                 const DecodeConstants& constants) {
  if (KEEPS_X_SUM) {
    const float c0 = to_float(constants.values[0] & 0xFFFFu);
    const float c1 = to_float(constants.values[0] >> 16);
#pragma unroll
    for (int n_block = 0; n_block < BLOCKS; n_block++)
#pragma unroll
      for (int c = 0; c < M_TILES; c++)
#pragma unroll
        for (int e = 0; e < VALUES; e++) {
          float& ones = sum[n_block * FRAGMENTS + 1][c][e];
          ones = fmaf(c1, ones, c0 * (x_sum[n_block][c][e] - ones));
        }
  }
}
