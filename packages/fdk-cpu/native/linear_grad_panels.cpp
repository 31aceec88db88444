// The product of backward in bf16: rows of grad_y, and blocks of W_hat as panels of pairs.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "linear_parts.h"
#include "pool.h"
#include "rows.h"
#include "staging.h"

namespace fdk {
namespace {

// A block of W_hat, as panels of pairs, is a column of tiles: 512 KiB at most. Of two tiles by 1024
// rows it took 26 ms where this takes 22 (4096 x 4096, 8 bits, m = 128), of four by 256 the same.
constexpr std::size_t kBlockRows = 2048;
// Rows that are decoded before they are paired, in L1.
constexpr std::size_t kPairedRows = kPanelDepth;
static_assert(kBlockRows % kPairedRows == 0 && kPairedRows % kTileRows == 0);
// Stripes from the one that is decoded to the one that is fetched.
constexpr std::size_t kFetched = 64;
constexpr std::size_t kLineItems = 32;  // bf16 of a line

// grad_y :: [m, n] to [rows][stride], zero where there is none.
void stage(const std::uint16_t* grad_y, std::size_t m, std::size_t n, std::size_t rows,
           std::size_t stride, std::size_t threads, std::uint16_t* out) {
  parallel_for(rows, chunk_for(rows, threads), threads, [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; row++) {
      const std::size_t count = row < m ? n : 0;
      if (count != 0) {
        std::memcpy(out + row * stride, grad_y + row * n, sizeof(std::uint16_t) * count);
      }
      std::fill(out + row * stride + count, out + (row + 1) * stride, std::uint16_t(0));
    }
  });
}

}  // namespace

void grad_panels(const PackedWeight& packed, const Weight& w, const Kernels& kernels,
                 const void* grad_y, std::size_t m, void* grad_x, std::size_t threads) {
  const Layout& layout = packed.layout;
  const GradPanels& grad = *kernels.grad_panels;
  const std::size_t outputs = layout.stripes * kTileRows;
  const std::size_t rows = ceil_div(m, kTileRows) * kTileRows;
  // A line more than the lines of a row: rows a power of two apart would share few sets of a cache.
  const std::size_t stride = ceil_div(outputs, kLineItems) * kLineItems + kLineItems;
  const Buffer<std::uint16_t> staged(rows * stride);
  stage(static_cast<const std::uint16_t*>(grad_y), m, layout.n, rows, stride, threads,
        staged.get());
  auto* const out = static_cast<std::uint16_t*>(grad_x);
  const std::size_t most = std::min(kBlockRows, ceil_div(outputs, kPairedRows) * kPairedRows);
  // A line between panels, for the same reason (4 bits, m = 1, when blocks had four tiles: 2.5
  // -> 1.9 ms).
  const std::size_t step = most * grad.panel + kLineItems;
  parallel_for(layout.tiles, 1, threads, [&](std::size_t begin, std::size_t end) {
    const Buffer<std::uint16_t> decoded(kPairedRows * kTileK), panels(kTileK / grad.panel * step);
    const Buffer<float> products(rows * kTileK);
    for (std::size_t tile = begin; tile < end; tile++) {
      std::fill_n(products.get(), rows * kTileK, 0.0f);
      for (std::size_t first = 0; first < outputs; first += kBlockRows) {
        const std::size_t count = std::min(kBlockRows, outputs - first);
        const std::size_t depth = ceil_div(count, kPairedRows) * kPairedRows;
        for (std::size_t r = 0; r < depth; r += kTileRows) {
          const std::size_t stripe = (first + r) / kTileRows;
          std::uint16_t* const to = decoded.get() + r % kPairedRows * kTileK;
          if (stripe + kFetched < layout.stripes) {
            fetch_tiles(w, stripe + kFetched, tile, tile + 1, true);
          }
          if (stripe < layout.stripes) {
            kernels.decode(w, stripe, tile, tile + 1, to, kTileK);
          } else {
            std::fill_n(to, kTileRows * kTileK, std::uint16_t(0));
          }
          if ((r + kTileRows) % kPairedRows != 0) continue;
          const std::size_t row = r + kTileRows - kPairedRows;
          grad.pair_rows(decoded.get(), kTileK, kPairedRows, kTileK,
                         panels.get() + row * grad.panel, step);
        }
        for (std::size_t p = 0; p < kTileK; p += grad.panel) {
          kernels.panel_product(PanelTask{staged.get() + first, rows, stride, depth,
                                          panels.get() + p / grad.panel * step, grad.panel,
                                          products.get() + p * rows});
        }
      }
      for (std::size_t row = 0; row < m; row++) {
        for (std::size_t p = 0; p < kTileK; p += grad.panel) {
          std::uint16_t rounded[kMaxPanel];
          grad.round(products.get() + p * rows + row * grad.panel, rounded);
          const std::size_t position = tile * kTileK + p;
          if (layout.dense()) {
            std::memcpy(out + row * layout.k + position, rounded,
                        sizeof(std::uint16_t) * grad.panel);
            continue;
          }
          for (std::size_t i = 0; i < grad.panel; i++) {
            const std::size_t group = (position + i) / layout.padded_group;
            const std::size_t within = (position + i) % layout.padded_group;
            if (group >= layout.groups || within >= layout.group) continue;  // padding
            out[row * layout.k + group * layout.group + within] = rounded[i];
          }
        }
      }
    }
  });
}

}  // namespace fdk
