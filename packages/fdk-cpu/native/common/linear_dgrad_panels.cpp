// The product of backward in bf16: rows of grad_y, and blocks of W_hat as panels of pairs.
#include <algorithm>
#include <cassert>
#include <cstring>

#include "common/kernels.h"
#include "common/linear_internal.h"
#include "common/thread_pool.h"
#include "common/buffers.h"
#include "common/pack_activations.h"

namespace fdk {
namespace {

// Stripes that are decoded at once: a step of a panel's depth.
constexpr std::size_t kStripes = kPanelDepth / kTileRows;
static_assert(kPanelDepth % kTileRows == 0);
// Tiles from the one that is decoded to the one that is fetched.
constexpr std::size_t kFetched = 64;
constexpr std::size_t kLineItems = 32;  // bf16 of a line

// Tiles of a row of a block: fewer where threads would have no two pieces each.
std::size_t tiles_of_block(const GradPanels& grad, std::size_t tiles, std::size_t threads) {
  constexpr std::size_t kPieces = 2;
  std::size_t of_block = grad.block_tiles;
  while (of_block > 1 && ceil_div(tiles, of_block) < kPieces * threads) of_block /= 2;
  return of_block;
}

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
  const std::size_t block_rows = grad.block_rows;
  assert(block_rows % kPanelDepth == 0 && kTileK % grad.panel == 0);
  const std::size_t block_tiles = tiles_of_block(grad, layout.tiles, threads);
  const std::size_t most = std::min(block_rows, ceil_div(outputs, kPanelDepth) * kPanelDepth);
  // A line between panels, for the same reason (4 bits, m = 1, when blocks had four tiles: 2.5
  // -> 1.9 ms).
  const std::size_t step = most * grad.panel + kLineItems;
  const std::size_t pieces = ceil_div(layout.tiles, block_tiles);
  const std::size_t ahead = kFetched / block_tiles;
  parallel_for(pieces, 1, threads, [&](std::size_t begin, std::size_t end) {
    const std::size_t width = block_tiles * kTileK;
    const Buffer<std::uint16_t> panels(width / grad.panel * step);
    const Buffer<float> products(rows * width);
    for (std::size_t piece = begin; piece < end; piece++) {
      const std::size_t tile = piece * block_tiles;
      const std::size_t last = std::min(layout.tiles, tile + block_tiles);
      const std::size_t positions = (last - tile) * kTileK;
      std::fill_n(products.get(), rows * positions, 0.0f);
      for (std::size_t first = 0; first < outputs; first += block_rows) {
        const std::size_t count = std::min(block_rows, outputs - first);
        const std::size_t depth = ceil_div(count, kPanelDepth) * kPanelDepth;
        for (std::size_t row = 0; row < depth; row += kPanelDepth) {
          const std::size_t stripe = (first + row) / kTileRows;
          const std::size_t stop = std::min(layout.stripes, stripe + kStripes);
          for (std::size_t s = stripe + ahead; s < std::min(layout.stripes, stop + ahead); s++) {
            fetch_tiles(w, s, tile, last, true);
          }
          std::uint16_t* const to = panels.get() + row * grad.panel;
          grad.decode_pairs(w, stripe, stop, tile, last, to, step);
          const std::size_t decoded = (stop - stripe) * kTileRows;
          for (std::size_t p = 0; decoded < kPanelDepth && p < positions / grad.panel; p++) {
            std::fill(to + p * step + decoded * grad.panel,
                      to + p * step + kPanelDepth * grad.panel, std::uint16_t(0));
          }
        }
        for (std::size_t p = 0; p < positions; p += grad.panel) {
          kernels.panel_product(PanelTask{staged.get() + first, rows, stride, depth,
                                          panels.get() + p / grad.panel * step, grad.panel,
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
