// Products with x rounded to 8 bits: fdk_formats.int8 is the definition, this its kernels.
//
// A tile of x is a block of that definition: 128 int8 codes and one scale, its largest magnitude /
// 127. Of a codebook, values are (level - offset) * step with int8 levels; of an affine format the
// codes are the levels. A kernel sums level * x_code within each group of a tile in integers and
// scales those sums. What is constant within a group (zero points, the offset, and the 128 that
// unsigned levels are too large by) is met by the sum of x over the group, for all rows at once:
//
//   y = sum of scale x_scale (sum of level x_code)  -  sum of scale (zero + centre) x_sum
//
// with x_sum = x_scale * (sum of x_code over the group), both over the groups of a row, and the
// table's step in x_scale.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "common/kernels.h"
#include "common/linear.h"

namespace fdk {

struct Int8Table {
  std::int8_t levels[kMaxLevels];  // up to 7 bits at least -127, so that -level is an int8 too
  float step, offset;
};

// The table of codebook :: [2^bits], as fdk_formats.int8.int8_table makes it.
Int8Table int8_table_of(const float* codebook, int bits);

// y = x_hat @ W_hat.T + bias, of int8_linear of fdk_formats; `table` is null for affine formats.
//
// x    :: [m, k, activation]
// bias :: [n, activation] or null
// y    :: [m, n, activation]
void linear_int8(const PackedWeight& weight, const Int8Table* table, Activation activation,
                 const void* x, std::size_t m, const void* bias, void* y, std::size_t threads);

// Rows of x that a kernel takes at once, at most.
inline constexpr std::size_t kMaxInt8Rows = 16;
inline constexpr float kMaxXCode = 127;
// Tiles of x with no larger magnitude count as zero: 127 over it must be finite.
inline constexpr float kSmallestTile = 0x1p-120f;

// Where rows of x come in pairs, this many codes of each lie in turn.
inline constexpr std::size_t kPairRun = 8;

// One tile of x.
struct Int8Tile {
  std::int8_t* codes;  // [kTileK], in the kernel's order; in pairs, every other kPairRun
  float* scale;        // largest magnitude / 127; NaN where x is not finite, the codes being zero
  std::int32_t* sums;  // [groups], of the codes of each group
};

// How a tile of x is rounded: times `inverse`, or to zeros.
struct TileRounding {
  bool is_zero;
  float inverse;  // 0 where is_zero
  float scale;    // of Int8Tile
};

// By the largest magnitude of the tile, which is NaN or infinity where x is not finite.
static inline TileRounding rounding_of(float largest) {
  if (!(largest <= std::numeric_limits<float>::max())) {
    return {true, 0, std::numeric_limits<float>::quiet_NaN()};
  }
  if (largest < kSmallestTile) return {true, 0, 0};
  return {false, kMaxXCode / largest, largest / kMaxXCode};
}

//   x        :: [m][tiles][kTileK]         int8, in the kernel's order; for kernels that take pairs
//               [ceil(m / 2)][tiles][kTileK / kPairRun][2][kPairRun], of an odd last row zeros
//   x_scales :: [m][tiles]                 times the step of the table
//   x_sums   :: [m][tiles][groups_per_tile]
//   y        :: [m][y_stride]              float32; its first column is the first row of `begin`
struct Int8Task {
  const Weight* weight;        // but for its float table
  const std::uint8_t* levels;  // [kMaxLevels] of the codes, as int8 or as uint8; the first 2^bits
                               // are repeated to the end
  float centre;                // added to zero points, or in their place
  const std::int8_t* x;
  const float* x_scales;
  const float* x_sums;
  std::size_t m;  // up to `rows` of the kernels
  float* y;
  std::size_t y_stride;
};

struct Int8Kernels {
  bool unsigned_levels;  // levels are uint8: int8 + 128, or the codes of affine formats
  std::size_t rows;      // of x that gemv takes at once, up to kMaxInt8Rows
  // x :: [kTileK] in its natural order; the codes come in the order of gemv.
  void (*stage)(const float* x, std::size_t groups, const Int8Tile& out);
  // y for stripes [begin, end).
  void (*gemv)(const Int8Task&, std::size_t begin, std::size_t end);
  bool pairs = false;  // rows of x come in pairs
};

extern const Int8Kernels kScalarInt8;
#if defined(__x86_64__)
extern const Int8Kernels kAvx2Int8;
extern const Int8Kernels kAvx512Bf16Int8;
#endif
#if defined(__aarch64__)
extern const Int8Kernels kNeonInt8;
extern const Int8Kernels kNeonDotInt8;
extern const Int8Kernels kNeonI8mmInt8;
extern const Int8Kernels kSveInt8;  // of one row of x
// Whether kSveInt8 takes such a weight, at the length that vectors have here.
bool sve_takes_int8(const Layout& layout);
#endif

// For m rows of x at once.
const Int8Kernels& int8_kernels_for(Isa isa, const Layout& layout, std::size_t m);

}  // namespace fdk
