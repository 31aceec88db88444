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

// A block of W_hat, as panels of pairs: 256 KiB at most. Its tiles lie together in memory.
constexpr std::size_t kBlockTiles = 4, kBlockRows = 256;
// Rows that are decoded before they are paired, in L1.
constexpr std::size_t kPairedRows = kPanelDepth;
static_assert(kBlockRows % kPairedRows == 0 && kPairedRows % kTileRows == 0);
constexpr std::size_t kBlockStripes = kBlockRows / kTileRows;
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
  // Narrower where a thread would have none.
  const std::size_t share = layout.tiles / std::max<std::size_t>(threads, 1);
  const std::size_t tiles_of_block = std::clamp<std::size_t>(share, 1, kBlockTiles);
  const std::size_t blocks = ceil_div(layout.tiles, tiles_of_block);
  parallel_for(blocks, 1, threads, [&](std::size_t begin, std::size_t end) {
    constexpr std::size_t kPositions = kBlockTiles * kTileK, kStride = kPositions + kLineItems;
    const Buffer<std::uint16_t> decoded(kPairedRows * kStride), panels(kBlockRows * kPositions);
    const Buffer<float> products(rows * kPositions);
    for (std::size_t b = begin; b < end; b++) {
      const std::size_t tile = b * tiles_of_block;
      const std::size_t last = std::min(layout.tiles, tile + tiles_of_block);
      const std::size_t positions = (last - tile) * kTileK;
      std::fill_n(products.get(), rows * positions, 0.0f);
      for (std::size_t first = 0; first < outputs; first += kBlockRows) {
        const std::size_t count = std::min(kBlockRows, outputs - first);
        const std::size_t depth = ceil_div(count, kPairedRows) * kPairedRows;
        for (std::size_t r = 0; r < depth; r += kTileRows) {
          const std::size_t stripe = (first + r) / kTileRows;
          std::uint16_t* const to = decoded.get() + r % kPairedRows * kStride;
          if (stripe + kBlockStripes < layout.stripes) {
            fetch_tiles(w, stripe + kBlockStripes, tile, last, true);
          }
          if (stripe < layout.stripes) {
            kernels.decode(w, stripe, tile, last, to, kStride);
          } else {
            std::fill_n(to, kTileRows * kStride, std::uint16_t(0));
          }
          if ((r + kTileRows) % kPairedRows != 0) continue;
          const std::size_t row = r + kTileRows - kPairedRows;
          grad.pair_rows(decoded.get(), kStride, kPairedRows, positions,
                         panels.get() + row * grad.panel, depth * grad.panel);
        }
        for (std::size_t p = 0; p < positions; p += grad.panel) {
          kernels.panel_product(PanelTask{staged.get() + first, rows, stride, depth,
                                          panels.get() + p * depth, grad.panel,
                                          products.get() + p * rows});
        }
      }
      for (std::size_t row = 0; row < m; row++) {
        for (std::size_t p = 0; p < positions; p += grad.panel) {
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
