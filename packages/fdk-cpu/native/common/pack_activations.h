// Where the values of x lie for kernels, and which tiles of a weight come next.
#pragma once

#include <cstdint>
#include <vector>

#include "common/float_convert.h"
#include "common/kernels.h"

namespace fdk {
namespace {

// Column of the weight at each position of a row in the kernel's order; k where it is padding.
[[maybe_unused]] std::vector<std::uint32_t> columns_of(const Layout& layout, const Order& order) {
  std::vector<std::uint32_t> columns(layout.positions());
  for (std::size_t p = 0; p < columns.size(); p++) {
    const std::size_t natural = p / kTileK * kTileK + order[p % kTileK];
    if (layout.dense()) {  // without the divisions, 30 us of a call at k = 4096
      columns[p] = std::uint32_t(natural);
      continue;
    }
    const std::size_t group = natural / layout.padded_group, within = natural % layout.padded_group;
    const bool padding = group >= layout.groups || within >= layout.group;
    columns[p] = std::uint32_t(padding ? layout.k : group * layout.group + within);
  }
  return columns;
}

// T is float, or uint16_t for bf16 x as it is.
template <class T>
T element(const void* x, std::size_t i, Activation type) {
  if constexpr (sizeof(T) == 2) {
    return static_cast<const std::uint16_t*>(x)[i];
  } else {
    return read(x, i, type);
  }
}

// Scales of tiles [begin, end) of a stripe, and their codes if `codes`, which the next block will
// decode: its lines are too few and too far apart for the processor to foresee.
[[maybe_unused]] void fetch_tiles(const Weight& w, std::size_t stripe, std::size_t begin,
                                  std::size_t end, bool codes) {
  constexpr std::size_t kLine = 64;
  constexpr int kIntoL2 = 2;
  const auto fetch = [](const void* from, std::size_t bytes) {
    const auto* p = static_cast<const std::uint8_t*>(from);
    for (std::size_t i = 0; i < bytes; i += kLine) __builtin_prefetch(p + i, 0, kIntoL2);
  };
  const std::size_t bytes = tile_bytes(w.bits);
  if (codes) fetch(w.codes + (stripe * w.tiles + begin) * bytes, (end - begin) * bytes);
  const std::size_t wide = w.tiles_per_group;
  const std::size_t group = wide > 1 ? begin / wide : begin * w.groups_per_tile;
  const std::size_t groups =
      wide > 1 ? (end - 1) / wide - group + 1 : (end - begin) * w.groups_per_tile;
  const auto fetch_groups = [&](const void* from, std::size_t item) {
    fetch(static_cast<const std::uint8_t*>(from) +
              (stripe * w.stored_groups + group) * kTileRows * item,
          groups * kTileRows * item);
  };
  fetch_groups(w.scales, bytes_of(w.scale_type));
  if (w.zeros != nullptr) fetch_groups(w.zeros, bytes_of(w.zero_type));
}

}  // namespace
}  // namespace fdk
