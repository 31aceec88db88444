// The product of backward: grad_x = grad_y @ W_hat, in float32.
#include <algorithm>
#include <vector>

#include "common/float_convert.h"
#include "common/kernels.h"
#include "common/linear_internal.h"
#include "common/thread_pool.h"
#include "common/buffers.h"
#include "common/pack_activations.h"

namespace fdk {
namespace {

// Rows of the block of backward, which is in L1.
constexpr std::size_t kGradRows = 48;

// W_hat as the reference has it, rounded to the dtype of the activations: a row of two values
// (1 bit, one scale) would otherwise err the same way in every product.
void round_to(Activation type, float* values, std::size_t count) {
  if (type == Activation::bf16) {
    for (std::size_t i = 0; i < count; i++) values[i] = from_bf16(to_bf16(values[i]));
  } else if (type == Activation::fp16) {
    for (std::size_t i = 0; i < count; i++) values[i] = from_fp16(to_fp16(values[i]));
  }
}

}  // namespace

void grad_rows(const PackedWeight& packed, const Weight& w, const Kernels& kernels, Activation type,
               const void* grad_y, std::size_t m, void* grad_x, std::size_t threads) {
  const Layout& layout = packed.layout;
  const std::vector<std::uint32_t> columns = columns_of(layout, *kernels.panel_order);
  const std::size_t stride = layout.stripes * kTileRows;
  const Buffer<float> staged(m * stride);
  for (std::size_t row = 0; row < m; row++) {
    for (std::size_t i = 0; i < stride; i++) {
      staged.get()[row * stride + i] = i < layout.n ? read(grad_y, row * layout.n + i, type) : 0;
    }
  }
  parallel_for(layout.tiles, 1, threads, [&](std::size_t begin, std::size_t end) {
    const Buffer<float> block(kGradRows * kTileK);
    const Buffer<float> sums(m * kTileK);
    for (std::size_t tile = begin; tile < end; tile++) {
      std::fill_n(sums.get(), m * kTileK, 0.0f);
      for (std::size_t first = 0; first < stride; first += kGradRows) {
        const std::size_t rows = std::min(kGradRows, stride - first);
        for (std::size_t r = 0; r < rows; r += kTileRows) {
          if (tile + 1 < end) fetch_tiles(w, (first + r) / kTileRows, tile + 1, tile + 2, true);
          kernels.decode(w, (first + r) / kTileRows, tile, tile + 1, block.get() + r * kTileK,
                         kTileK);
        }
        round_to(type, block.get(), rows * kTileK);
        kernels.grad_product(
            GradTask{block.get(), rows, staged.get() + first, m, stride, sums.get(), kTileK});
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

}  // namespace fdk
