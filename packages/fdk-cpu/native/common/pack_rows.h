// Rows of x for the products with a stripe of W_hat.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "common/kernels.h"
#include "common/buffers.h"
#include "common/pack_activations.h"

namespace fdk {
namespace {

// bf16 rows of x in panel order, padded to whole tiles and a line further apart: at a power of two
// their lines would share few sets of L1 (4096 x 4096, m = 9 to 16: 2 to 6 % of the time).
class StripeRows {
 public:
  // x :: [m, k], bf16.
  StripeRows(const Layout& layout, const Order& order, const std::uint16_t* x, std::size_t m)
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
