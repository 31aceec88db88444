// Rows of x rounded to 8 bits, and a codebook as levels, as kernels of linear_int8.h take them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/buffers.h"
#include "common/float_convert.h"
#include "common/linear_int8.h"

namespace fdk {
namespace {

// Converts x[start] to x[start + count - 1] to float32.
[[maybe_unused]] void read_values(const void* x, Activation type, std::size_t start,
                                  std::size_t count, float* out) {
  const auto half = static_cast<const std::uint16_t*>(x) + start;
  switch (type) {
    case Activation::bf16:
      for (std::size_t i = 0; i < count; i++) out[i] = from_bf16(half[i]);
      return;
    case Activation::fp16:
      for (std::size_t i = 0; i < count; i++) out[i] = from_fp16(half[i]);
      return;
    case Activation::fp32:
      std::copy_n(static_cast<const float*>(x) + start, count, out);
      return;
  }
}

// Reads a tile of a row of x, with zeros for the padding of groups and of the row.
[[maybe_unused]] void read_tile(const Layout& layout, const void* x, Activation type,
                                std::size_t tile, float* out) {
  if (layout.dense()) return read_values(x, type, tile * kTileK, kTileK, out);
  std::fill_n(out, kTileK, 0.0f);
  if (layout.tiles_per_group > 1) {
    const std::size_t group = tile / layout.tiles_per_group;
    const std::size_t within = tile % layout.tiles_per_group * kTileK;
    if (group >= layout.groups || within >= layout.group) return;
    const std::size_t count = std::min(kTileK, layout.group - within);
    return read_values(x, type, group * layout.group + within, count, out);
  }
  for (std::size_t g = 0; g < layout.groups_per_tile; g++) {
    const std::size_t group = tile * layout.groups_per_tile + g;
    if (group >= layout.groups) return;
    read_values(x, type, group * layout.group, layout.group, out + g * layout.padded_group);
  }
}

// Rows of x, rounded to 8 bits.
struct QuantisedX {
  std::size_t positions, tiles, groups;  // per row; groups per tile
  Buffer<std::int8_t> codes;
  Buffer<float> scales, sums;

  QuantisedX(const Layout& layout, const Int8Kernels& kernels, std::size_t m)
      : positions(layout.positions()),
        tiles(layout.tiles),
        groups(layout.groups_per_tile),
        codes((m + m % 2) * positions),
        scales(m * tiles),
        sums(m * tiles * groups) {
    if (kernels.pairs && m % 2 != 0) {
      std::fill_n(codes.get() + (m - 1) * positions, 2 * positions, std::int8_t(0));
    }
  }

  std::int8_t* tile_of(const Int8Kernels& kernels, std::size_t row, std::size_t tile) const {
    if (!kernels.pairs) return codes.get() + row * positions + tile * kTileK;
    return codes.get() + row / 2 * 2 * positions + tile * 2 * kTileK + row % 2 * kPairRun;
  }

  void quantise_row(const Layout& layout, const Int8Kernels& kernels, const void* x,
                    Activation type, float step, std::size_t row) {
    alignas(64) float values[kTileK];
    std::int32_t group_sums[kTileK];
    for (std::size_t tile = 0; tile < tiles; tile++) {
      read_tile(layout, x, type, tile, values);
      float* scale = scales.get() + row * tiles + tile;
      kernels.quantise_x(values, groups, Int8Tile{tile_of(kernels, row, tile), scale, group_sums});
      *scale *= step;
      float* to = sums.get() + (row * tiles + tile) * groups;
      for (std::size_t g = 0; g < groups; g++) to[g] = *scale * float(group_sums[g]);
    }
  }
};

// The codebook as levels, which replaces the float table, and the constant added to zero points.
struct Levels {
  std::uint8_t bytes[kMaxLevels];
  float centre, step;

  Levels(const Layout& layout, const Int8Table* table, bool is_unsigned) {
    const unsigned count = 1u << layout.bits;
    // Codes of 8 bits do not fit an int8; 128 less, they do.
    const unsigned lower = layout.bits == kMaxBits && !is_unsigned ? 128 : 0;
    const unsigned raise = is_unsigned ? 128 : 0;
    for (unsigned i = 0; i < kMaxLevels; i++) {
      const unsigned code = i % count;
      bytes[i] =
          std::uint8_t(table == nullptr ? code - lower : unsigned(table->levels[code]) + raise);
    }
    centre = table == nullptr ? -float(lower) : table->offset + float(raise);
    step = table == nullptr ? 1 : table->step;
  }
};

}  // namespace
}  // namespace fdk
