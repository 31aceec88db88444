// The backward product grad_x = grad_y @ W_hat, in float32 and in bf16.
#include <algorithm>
#include <cassert>
#include <cstring>
#include <vector>

#include "common/buffers.h"
#include "common/float_convert.h"
#include "common/kernels.h"
#include "common/linear_internal.h"
#include "common/pack_activations.h"
#include "common/thread_pool.h"

namespace fdk {
namespace {

// Rows of the dequantised block, which stays in L1.
constexpr std::size_t kDgradRows = 48;

// Rounds W_hat to the dtype of the activations as the reference does: with two values a row (1 bit,
// one scale) the error would otherwise be the same in every product.
void round_to(Activation type, float* values, std::size_t count) {
  if (type == Activation::bf16) {
    for (std::size_t i = 0; i < count; i++) values[i] = from_bf16(to_bf16(values[i]));
  } else if (type == Activation::fp16) {
    for (std::size_t i = 0; i < count; i++) values[i] = from_fp16(to_fp16(values[i]));
  }
}

}  // namespace

void dgrad_float(const PackedWeight& packed, const Weight& w, const LinearKernels& kernels,
                 Activation type, const void* grad_y, std::size_t m, void* grad_x,
                 std::size_t threads) {
  const Layout& layout = packed.layout;
  const std::vector<std::uint32_t> columns = columns_of(layout, *kernels.panel_order);
  const std::size_t stride = layout.stripes * kTileRows;
  const Buffer<float> packed_grad_y(m * stride);
  for (std::size_t row = 0; row < m; row++) {
    for (std::size_t i = 0; i < stride; i++) {
      packed_grad_y.get()[row * stride + i] =
          i < layout.n ? read(grad_y, row * layout.n + i, type) : 0;
    }
  }
  parallel_for(layout.tiles, 1, threads, [&](std::size_t begin, std::size_t end) {
    const Buffer<float> block(kDgradRows * kTileK);
    const Buffer<float> sums(m * kTileK);
    for (std::size_t tile = begin; tile < end; tile++) {
      std::fill_n(sums.get(), m * kTileK, 0.0f);
      for (std::size_t first = 0; first < stride; first += kDgradRows) {
        const std::size_t rows = std::min(kDgradRows, stride - first);
        for (std::size_t r = 0; r < rows; r += kTileRows) {
          if (tile + 1 < end) prefetch_tiles(w, (first + r) / kTileRows, tile + 1, tile + 2, true);
          kernels.dequantise(w, (first + r) / kTileRows, tile, tile + 1, block.get() + r * kTileK,
                             kTileK);
        }
        round_to(type, block.get(), rows * kTileK);
        kernels.dgrad(DgradTask{block.get(), rows, packed_grad_y.get() + first, m, stride,
                                sums.get(), kTileK});
      }
      for (std::size_t row = 0; row < m; row++) {
        for (std::size_t p = 0; p < kTileK; p++) {
          const std::size_t column = columns[tile * kTileK + p];
          if (column == layout.k) continue;
          write(grad_x, row * layout.k + column, type, sums.get()[row * kTileK + p]);
        }
      }
    }
  });
}

// In bf16: rows of grad_y times blocks of W_hat, dequantised as panels of pairs of rows.
namespace {

// Stripes that are dequantised at once: one depth step of a panel.
constexpr std::size_t kStripes = kPanelDepth / kTileRows;
static_assert(kPanelDepth % kTileRows == 0);
// Distance in tiles between the one dequantised and the one prefetched.
constexpr std::size_t kPrefetchTiles = 64;
constexpr std::size_t kLineItems = 32;  // bf16 values of a cache line

// Tiles per row of a block: halved until each thread has two pieces.
std::size_t tiles_of_block(const DgradPanels& grad, std::size_t tiles, std::size_t threads) {
  constexpr std::size_t kPieces = 2;
  std::size_t of_block = grad.block_tiles;
  while (of_block > 1 && ceil_div(tiles, of_block) < kPieces * threads) of_block /= 2;
  return of_block;
}

// Packs grad_y :: [m, n] to [rows][stride], padded with zeros.
void pack_grad_y(const std::uint16_t* grad_y, std::size_t m, std::size_t n, std::size_t rows,
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

void dgrad_panels(const PackedWeight& packed, const Weight& w, const LinearKernels& kernels,
                  const void* grad_y, std::size_t m, void* grad_x, std::size_t threads) {
  const Layout& layout = packed.layout;
  const DgradPanels& grad = *kernels.dgrad_panels;
  const std::size_t outputs = layout.stripes * kTileRows;
  const std::size_t rows = ceil_div(m, kTileRows) * kTileRows;
  // One cache line more than a row needs: rows a power of two apart would share few cache sets.
  const std::size_t stride = ceil_div(outputs, kLineItems) * kLineItems + kLineItems;
  const Buffer<std::uint16_t> packed_grad_y(rows * stride);
  pack_grad_y(static_cast<const std::uint16_t*>(grad_y), m, layout.n, rows, stride, threads,
              packed_grad_y.get());
  auto* const out = static_cast<std::uint16_t*>(grad_x);
  const std::size_t block_rows = grad.block_rows;
  assert(block_rows % kPanelDepth == 0 && kTileK % grad.panel == 0);
  const std::size_t block_tiles = tiles_of_block(grad, layout.tiles, threads);
  const std::size_t most = std::min(block_rows, ceil_div(outputs, kPanelDepth) * kPanelDepth);
  // One cache line between panels, for the same reason.
  const std::size_t step = most * grad.panel + kLineItems;
  const std::size_t pieces = ceil_div(layout.tiles, block_tiles);
  const std::size_t ahead = kPrefetchTiles / block_tiles;
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
            prefetch_tiles(w, s, tile, last, true);
          }
          std::uint16_t* const to = panels.get() + row * grad.panel;
          grad.dequantise_pairs(w, stripe, stop, tile, last, to, step);
          const std::size_t decoded = (stop - stripe) * kTileRows;
          for (std::size_t p = 0; decoded < kPanelDepth && p < positions / grad.panel; p++) {
            std::fill(to + p * step + decoded * grad.panel,
                      to + p * step + kPanelDepth * grad.panel, std::uint16_t(0));
          }
        }
        for (std::size_t p = 0; p < positions; p += grad.panel) {
          kernels.gemm_panel(GemmPanelTask{packed_grad_y.get() + first, rows, stride, depth,
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
