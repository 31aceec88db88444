// Medium m: each stripe of W_hat is dequantised once and multiplied with all rows of x in L1.
#include <algorithm>
#include <cassert>

#include "common/kernels.h"
#include "common/linear_internal.h"
#include "common/thread_pool.h"
#include "common/buffers.h"
#include "common/pack_activations.h"

namespace fdk {

void linear_gemm_stripes(const PackedWeight& packed, const Weight& w, const LinearKernels& kernels,
                         Activation type, const void* x, std::size_t m, const void* bias, void* y,
                         std::size_t threads) {
  assert(kernels.x_is_bf16 && type == Activation::bf16);
  const Layout& layout = packed.layout;
  const PackedRows rows(layout, *kernels.panel_order, static_cast<const std::uint16_t*>(x), m);
  const std::size_t y_stride = layout.stripes * kTileRows;
  const Buffer<float> products(m * y_stride);
  const GemmStripesTask task{&w, rows.get(), m, rows.stride(), products.get(), y_stride};
  const std::size_t chunk = chunk_for(layout.stripes, threads);
  parallel_for(layout.stripes, chunk, threads, [&](std::size_t begin, std::size_t end) {
    kernels.gemm_stripes(task, begin, end);
    const std::size_t first = begin * kTileRows, stop = std::min(layout.n, end * kTileRows);
    for (std::size_t row = 0; row < m; row++) {
      write_row(products.get() + row * y_stride + first, 1, offset(bias, first, type), type,
                stop - first, offset(y, row * layout.n + first, type));
    }
  });
}

}  // namespace fdk
