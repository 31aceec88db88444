// Products with x rounded to 8 bits, as defined by fdk_formats.int8.
//
// x is rounded per tile: 128 int8 codes and one scale, the tile's absmax / 127. The values of a
// codebook are (level - offset) * step with int8 levels; for affine formats the codes are the
// levels. A kernel sums level * x_code over each group of a tile in integers and scales these sums.
// Constants of a group (zero points, the offset, and the 128 by which unsigned levels are too
// large) are multiplied with the sum of x over the group, once for all rows:
//
//   y = sum of scale x_scale (sum of level x_code)  -  sum of scale (zero + centre) x_sum
//
// with x_sum = x_scale * (sum of x_code over the group). Both sums run over the groups of a row,
// and x_scale includes the step of the table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "common/dispatch.h"
#include "common/kernels.h"
#include "common/linear.h"

namespace fdk {

struct Int8Table {
  std::int8_t levels[kMaxLevels];  // at least -127 up to 7 bits, so that -level fits an int8 too
  float step, offset;
};

// The table of codebook :: [2^bits], the same as fdk_formats.int8.int8_table.
Int8Table int8_table_of(const float* codebook, int bits);

// y = x_hat @ W_hat.T + bias, as fdk_formats.int8.int8_linear; `table` is null for affine formats.
//
// x    :: [m, k, activation]
// bias :: [n, activation] or null
// y    :: [m, n, activation]
//
// batch_invariant: a row of y does not depend on the other rows of x or their number.
void linear_int8(const PackedWeight& weight, const Int8Table* table, Activation activation,
                 const void* x, std::size_t m, const void* bias, void* y, std::size_t threads,
                 bool batch_invariant = false);

// The most rows of x that one call of a kernel multiplies.
inline constexpr std::size_t kMaxInt8Rows = 16;
inline constexpr float kMaxXCode = 127;
// Tiles of x with a smaller absmax count as zero: 127 / absmax must be finite.
inline constexpr float kSmallestTile = 0x1p-120f;

// For kernels that multiply pairs of rows of x: the rows of a pair alternate every kPairRun codes.
inline constexpr std::size_t kPairRun = 8;

// One tile of x.
struct Int8Tile {
  std::int8_t* codes;  // [kTileK], in the kernel's order; for pairs, every other kPairRun
  float* scale;        // absmax / 127; NaN if x is not finite, and the codes are zero
  std::int32_t* sums;  // [groups], sums of the codes of each group
};

// How a tile of x is rounded: multiplied with `inverse`, or set to zero.
struct TileRounding {
  bool is_zero;
  float inverse;  // 0 if is_zero
  float scale;    // Int8Tile::scale
};

// From the absmax of the tile, which is NaN or infinity if x is not finite.
static inline TileRounding rounding_of(float largest) {
  if (!(largest <= std::numeric_limits<float>::max())) {
    return {true, 0, std::numeric_limits<float>::quiet_NaN()};
  }
  if (largest < kSmallestTile) return {true, 0, 0};
  return {false, kMaxXCode / largest, largest / kMaxXCode};
}

// The operands of a GEMV with int8 x:
//   x        :: [m][tiles][kTileK]         int8, in the kernel's order; for kernels that take pairs
//               [ceil(m / 2)][tiles][kTileK / kPairRun][2][kPairRun], zeros after an odd last row
//   x_scales :: [m][tiles]                 times the step of the table
//   x_sums   :: [m][tiles][groups_per_tile]
//   y        :: [m][y_stride]              float32; its first column is the first row of `begin`
struct Int8Task {
  const Weight* weight;  // without its float table
  // [kMaxLevels], int8 or uint8; the first 2^bits are repeated to the end.
  const std::uint8_t* levels;
  float centre;  // added to zero points, or used instead of them
  const std::int8_t* x;
  const float* x_scales;
  const float* x_sums;
  std::size_t m;  // up to Int8Kernels::rows
  float* y;
  std::size_t y_stride;
};

struct Int8Kernels {
  bool unsigned_levels;  // levels are uint8: int8 + 128, or the codes of affine formats
  std::size_t rows;      // most rows of x per call of gemv, up to kMaxInt8Rows
  // Rounds x :: [kTileK] in memory order to codes in the order of gemv.
  void (*quantise_x)(const float* x, std::size_t groups, const Int8Tile& out);
  // Computes y for stripes [begin, end).
  void (*gemv)(const Int8Task&, std::size_t begin, std::size_t end);
  bool pairs = false;  // rows of x are packed in pairs
};

extern const Int8Kernels kInt8Scalar;
#if defined(__x86_64__)
extern const Int8Kernels kInt8Avx2;
extern const Int8Kernels kInt8Avx512Vnni;
#endif
#if defined(__aarch64__)
extern const Int8Kernels kInt8Neon;
extern const Int8Kernels kInt8NeonDot;
extern const Int8Kernels kInt8NeonI8mm;
extern const Int8Kernels kInt8Sve;  // for one row of x
// Returns whether kInt8Sve supports the weight with the vector length of this machine.
bool int8_sve_supports(const Layout& layout);
#endif

// The kernels for m rows of x.
const Int8Kernels& int8_kernels_for(Isa isa, const Layout& layout, std::size_t m);

}  // namespace fdk
