#pragma once

#include "common/linear.h"
#include "checks.h"

// A weight of 1 or 2 bits with scales of 1, whose rows are all zero at column `column`.
struct ZeroColumn {
  static constexpr std::size_t kRows = 50, kDepth = 512;  // defaults
  static constexpr float kValues[2][4] = {{0, 1, 0, 0}, {-1, 0, 0.5f, 1}};
  Case c;
  fdk::Layout layout;
  std::vector<unsigned> codes;
  Bytes laid_out, scales;

  ZeroColumn(int bits, std::size_t m, std::size_t column, Random& random, std::size_t rows = kRows,
             std::size_t depth = kDepth)
      : c{rows, depth, 64, m, bits, false, ScaleType::fp32, ZeroType::none, Activation::bf16},
        layout(fdk::layout_of(c.n, c.k, c.group, bits)),
        codes(c.n * c.k),
        laid_out(layout.code_bytes()),
        scales(layout.scales() * 4) {
    for (auto& code : codes) code = unsigned(random.upto((1u << bits) - 1));
    for (std::size_t row = 0; row < c.n; row++) codes[row * c.k + column] = unsigned(bits - 1);
    fdk::pack_codes(layout, pack_canonical(codes, c).data(), laid_out.data(), 1);
    for (std::size_t i = 0; i < layout.scales(); i++) put(scales, i, 2, 1);
  }
  double value(std::size_t i) const { return double(kValues[c.bits - 1][codes[i]]); }
  fdk::PackedWeight packed() const {
    return {layout,  laid_out.data(), scales.data(),      ScaleType::fp32,
            nullptr, ZeroType::none,  kValues[c.bits - 1]};
  }
};
