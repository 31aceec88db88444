// Rows of x to panels, for kernels that do not stage them themselves.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/kernels.h"
#include "common/pack_activations.h"

namespace fdk {
namespace {

// The panels that m rows of x are cut into: full ones, and a last one that may be narrower. Where
// that would be a single step of four, the one before it leaves it another: a step alone is bound
// by the loads of W_hat (AVX-512 BF16, m = 40, 4 bits: 7.2 -> 6.9 ms).
struct Panels {
  std::size_t m, wide, step;
  std::size_t count() const { return ceil_div(m, wide); }
  std::size_t width(std::size_t i) const {
    return std::min(lane(i + 1), ceil_div(m, step) * step) - lane(i);
  }
  // Lanes before panel i.
  std::size_t lane(std::size_t i) const {
    const bool left = i + 1 == count() && i != 0 && wide >= 4 * step && m - i * wide <= step;
    return i * wide - (left ? step : 0);
  }
  std::size_t lanes() const { return lane(count() - 1) + width(count() - 1); }
};

// A unit of a panel: a float32, or a pair of bf16 that one product takes.
constexpr std::size_t kUnitBytes = 4;

// First column of each unit where x holds all of them as they are, k where one is padding. Empty
// where it does not: x of another type, or pairs that the order of the kernel takes apart.
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

// Positions of every lane that are staged at once, so that what is written stays in L1 until its
// lines are full.
constexpr std::size_t kStaged = 32;

// x :: [m, k] to a panel [positions / unit][width][unit]; rows past m are zero.
template <class T>
void stage_panel(const Layout& layout, const std::vector<std::uint32_t>& columns, Activation type,
                 const void* x, std::size_t m, std::size_t first, std::size_t width, T* out) {
  constexpr std::size_t kUnit = kUnitBytes / sizeof(T);
  for (std::size_t begin = 0; begin < columns.size(); begin += kStaged) {
    for (std::size_t lane = 0; lane < width; lane++) {
      const std::size_t row = first + lane;
      for (std::size_t p = begin; p < begin + kStaged; p++) {
        const std::size_t column = columns[p];
        const bool there = row < m && column < layout.k;
        out[(p / kUnit * width + lane) * kUnit + p % kUnit] =
            there ? element<T>(x, row * layout.k + column, type) : T(0);
      }
    }
  }
}

// The same unit by unit (m = 512, k = 4096, bf16: 7 ms value by value).
inline void stage_units(const Layout& layout, const std::vector<std::uint32_t>& units,
                        Activation type, const void* x, std::size_t m, std::size_t first,
                        std::size_t width, std::uint8_t* out) {
  const std::size_t item = bytes_of(type), step = kStaged * item / kUnitBytes;
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

}  // namespace
}  // namespace fdk
