// Single codes, scales and zero points, in plain C++.
#pragma once

#include "common/float_convert.h"
#include "common/kernels.h"

namespace fdk {
namespace {

[[maybe_unused]] float scale_at(const Weight& w, std::size_t slot) {
  switch (w.scale_type) {
    case ScaleType::bf16:
      return from_bf16(static_cast<const std::uint16_t*>(w.scales)[slot]);
    case ScaleType::fp16:
      return from_fp16(static_cast<const std::uint16_t*>(w.scales)[slot]);
    case ScaleType::fp32:
      return static_cast<const float*>(w.scales)[slot];
    case ScaleType::e8m0:
      return from_e8m0(static_cast<const std::uint8_t*>(w.scales)[slot]);
  }
  return 0;
}

[[maybe_unused]] float zero_at(const Weight& w, std::size_t slot) {
  switch (w.zero_type) {
    case ZeroType::none:
      return 0;
    case ZeroType::bf16:
      return from_bf16(static_cast<const std::uint16_t*>(w.zeros)[slot]);
    case ZeroType::fp16:
      return from_fp16(static_cast<const std::uint16_t*>(w.zeros)[slot]);
    case ZeroType::fp32:
      return static_cast<const float*>(w.zeros)[slot];
    case ZeroType::u8:
      return static_cast<const std::uint8_t*>(w.zeros)[slot];
  }
  return 0;
}

// The code at position i of row r of a tile.
[[maybe_unused]] unsigned code_at(const std::uint8_t* tile, const Planes& planes, std::size_t r,
                                  std::size_t i) {
  unsigned code = 0;
  for (int p = 0; p < planes.count; p++) {
    const Plane& plane = planes.plane[p];
    const std::uint8_t* lane =
        tile + plane.offset + r * plane.row_bytes() + 2 * (i % plane.lanes());
    const unsigned word = lane[0] | unsigned(lane[1]) << 8;
    const int shift = int(i / plane.lanes()) * plane.width;
    code |= (word >> shift & ((1u << plane.width) - 1)) << plane.low;
  }
  return code;
}

}  // namespace
}  // namespace fdk
