// Packs rows of x into the order of the kernels, and prefetches the tiles of a weight.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/buffers.h"
#include "common/float_convert.h"
#include "common/kernels.h"

namespace fdk {
namespace {

// The column of the weight at each position of a row in the kernel's order; k for padding.
[[maybe_unused]] std::vector<std::uint32_t> columns_of(const Layout& layout, const Order& order) {
  std::vector<std::uint32_t> columns(layout.positions());
  for (std::size_t p = 0; p < columns.size(); p++) {
    const std::size_t natural = p / kTileK * kTileK + order[p % kTileK];
    if (layout.dense()) {  // saves divisions, 30 us per call at k = 4096
      columns[p] = std::uint32_t(natural);
      continue;
    }
    const std::size_t group = natural / layout.padded_group, within = natural % layout.padded_group;
    const bool padding = group >= layout.groups || within >= layout.group;
    columns[p] = std::uint32_t(padding ? layout.k : group * layout.group + within);
  }
  return columns;
}

// T is float, or uint16_t for the bits of bf16.
template <class T>
T element(const void* x, std::size_t i, Activation type) {
  if constexpr (sizeof(T) == 2) {
    return static_cast<const std::uint16_t*>(x)[i];
  } else {
    return read(x, i, type);
  }
}

// Prefetches the scales of tiles [begin, end) of a stripe and, if `codes`, their codes. They are
// too few and too far apart for the hardware prefetcher.
[[maybe_unused]] void prefetch_tiles(const Weight& w, std::size_t stripe, std::size_t begin,
                                     std::size_t end, bool codes) {
  constexpr std::size_t kLine = 64;
  constexpr int kIntoL2 = 2;
  const auto prefetch = [](const void* from, std::size_t bytes) {
    const auto* p = static_cast<const std::uint8_t*>(from);
    for (std::size_t i = 0; i < bytes; i += kLine) __builtin_prefetch(p + i, 0, kIntoL2);
  };
  const std::size_t bytes = tile_bytes(w.bits);
  if (codes) prefetch(w.codes + (stripe * w.tiles + begin) * bytes, (end - begin) * bytes);
  const std::size_t wide = w.tiles_per_group;
  const std::size_t group = wide > 1 ? begin / wide : begin * w.groups_per_tile;
  const std::size_t groups =
      wide > 1 ? (end - 1) / wide - group + 1 : (end - begin) * w.groups_per_tile;
  const auto prefetch_groups = [&](const void* from, std::size_t item) {
    prefetch(static_cast<const std::uint8_t*>(from) +
                 (stripe * w.stored_groups + group) * kTileRows * item,
             groups * kTileRows * item);
  };
  prefetch_groups(w.scales, bytes_of(w.scale_type));
  if (w.zeros != nullptr) prefetch_groups(w.zeros, bytes_of(w.zero_type));
}

// The panels that m rows of x are cut into: full ones, and a last one that may be narrower. If that
// one would be a single step, the panel before gives it another: a single step is bound by the
// loads of W_hat (AVX-512 BF16, m = 40, 4 bits: 7.2 -> 6.9 ms).
struct Panels {
  std::size_t m, wide, step;
  std::size_t count() const { return ceil_div(m, wide); }
  std::size_t width(std::size_t i) const {
    return std::min(lane(i + 1), ceil_div(m, step) * step) - lane(i);
  }
  // The first row of panel i.
  std::size_t lane(std::size_t i) const {
    const bool left = i + 1 == count() && i != 0 && wide >= 4 * step && m - i * wide <= step;
    return i * wide - (left ? step : 0);
  }
  std::size_t lanes() const { return lane(count() - 1) + width(count() - 1); }
};

// A unit of a panel: one float32, or the pair of bf16 that one product multiplies.
constexpr std::size_t kUnitBytes = 4;

// The first column of each unit if x has the units contiguous, k for padding. Empty if it does not:
// x of another dtype, or pairs that the kernel's order splits.
inline std::vector<std::uint32_t> units_of(const Layout& layout,
                                           const std::vector<std::uint32_t>& columns,
                                           Activation type, bool pairs) {
  if (!pairs) return type == Activation::fp32 ? columns : std::vector<std::uint32_t>();
  std::vector<std::uint32_t> units(columns.size() / 2);
  for (std::size_t u = 0; u < units.size(); u++) {
    const std::size_t first = columns[2 * u], second = columns[2 * u + 1];
    const bool padding = first == layout.k && second == layout.k;
    if (!padding && (second != first + 1 || second == layout.k)) return {};
    units[u] = std::uint32_t(first);
  }
  return units;
}

// Positions that are packed for all rows at once, so that written lines stay in L1 until complete.
constexpr std::size_t kPackedPositions = 32;

// Packs x :: [m, k] to a panel [positions / unit][width][unit], zeros for rows from m on.
template <class T>
void pack_panel(const Layout& layout, const std::vector<std::uint32_t>& columns, Activation type,
                const void* x, std::size_t m, std::size_t first, std::size_t width, T* out) {
  constexpr std::size_t kUnit = kUnitBytes / sizeof(T);
  for (std::size_t begin = 0; begin < columns.size(); begin += kPackedPositions) {
    for (std::size_t lane = 0; lane < width; lane++) {
      const std::size_t row = first + lane;
      for (std::size_t p = begin; p < begin + kPackedPositions; p++) {
        const std::size_t column = columns[p];
        const bool there = row < m && column < layout.k;
        out[(p / kUnit * width + lane) * kUnit + p % kUnit] =
            there ? element<T>(x, row * layout.k + column, type) : T(0);
      }
    }
  }
}

// The same, one unit at a time.
inline void pack_units(const Layout& layout, const std::vector<std::uint32_t>& units,
                       Activation type, const void* x, std::size_t m, std::size_t first,
                       std::size_t width, std::uint8_t* out) {
  const std::size_t item = bytes_of(type), step = kPackedPositions * item / kUnitBytes;
  for (std::size_t begin = 0; begin < units.size(); begin += step) {
    for (std::size_t lane = 0; lane < width; lane++) {
      const std::size_t row = first + lane;
      const std::uint8_t* from = static_cast<const std::uint8_t*>(x) + row * layout.k * item;
      std::uint8_t* to = out + (begin * width + lane) * kUnitBytes;
      for (std::size_t u = begin; u < begin + step; u++, to += width * kUnitBytes) {
        std::uint32_t unit = 0;
        if (row < m && units[u] < layout.k) std::memcpy(&unit, from + units[u] * item, sizeof unit);
        std::memcpy(to, &unit, sizeof unit);
      }
    }
  }
}

// Rows of bf16 x in panel order, padded to whole tiles plus one cache line: at a power of two they
// would share few sets of L1 (4096 x 4096, m = 9 to 16: 2 to 6 % of the time).
class PackedRows {
 public:
  // x :: [m, k], bf16.
  PackedRows(const Layout& layout, const Order& order, const std::uint16_t* x, std::size_t m)
      : stride_(layout.positions() + kLine), rows_(m * stride_) {
    if (m == 0) return;
    std::vector<std::uint32_t> columns;
    bool natural = layout.dense();
    for (std::size_t p = 0; p < kTileK; p++) natural = natural && order[p] == p;
    if (!natural) columns = columns_of(layout, order);
    for (std::size_t row = 0; row < m; row++, x += layout.k) {
      std::uint16_t* const to = rows_.get() + row * stride_;
      if (natural) {
        std::memcpy(to, x, layout.positions() * sizeof *to);
        continue;
      }
      for (std::size_t p = 0; p < columns.size(); p++) {
        to[p] = columns[p] < layout.k ? x[columns[p]] : std::uint16_t(0);
      }
    }
  }
  const std::uint16_t* get() const { return rows_.get(); }
  std::size_t stride() const { return stride_; }

 private:
  static constexpr std::size_t kLine = 64 / sizeof(std::uint16_t);
  std::size_t stride_;
  Buffer<std::uint16_t> rows_;
};

}  // namespace
}  // namespace fdk
