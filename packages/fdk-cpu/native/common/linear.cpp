#include "common/linear.h"

#include <algorithm>

#include "common/float_convert.h"
#include "common/kernels.h"
#include "common/linear_internal.h"
#include "common/thread_pool.h"
#include "common/buffers.h"

namespace fdk {
namespace {

Weight weight_of(const PackedWeight& packed, Activation activation) {
  const Layout& layout = packed.layout;
  Weight w = without_table(packed);
  for (std::size_t i = 0; i < std::size_t(1) << layout.bits; i++) {
    float value = packed.codebook == nullptr ? float(i) : packed.codebook[i];
    if (activation == Activation::bf16) value = from_bf16(to_bf16(value));
    if (activation == Activation::fp16) value = from_fp16(to_fp16(value));
    w.table[i] = value;
  }
  return w;
}

}  // namespace

void linear(const PackedWeight& weight, Activation activation, const void* x, std::size_t m,
            const void* bias, void* y, std::size_t threads) {
  linear_within(nullptr, weight, activation, x, m, bias, y, threads);
}

void linear_within(const RowLimits* own, const PackedWeight& weight, Activation activation,
                   const void* x, std::size_t m, const void* bias, void* y, std::size_t threads) {
  const Layout& layout = weight.layout;
  const Kernels& kernels = kernels_for(current_isa(), activation);
  const Weight w = weight_of(weight, activation);
  const RowLimits limits = own != nullptr              ? *own
                           : kernels.limits == nullptr ? RowLimits()
                                                       : kernels.limits(w);
  threads = usable_threads(threads);
  for (std::size_t row = 0; row < m; row += kMaxRows) {
    const std::size_t rows = std::min(kMaxRows, m - row);
    const void* const rows_x = offset(x, row * layout.k, activation);
    void* const rows_y = offset(y, row * layout.n, activation);
    if (rows <= limits.gemv) {
      linear_gemv(weight, w, kernels, activation, rows_x, rows, bias, rows_y, threads);
    } else if (rows <= limits.stripes && kernels.stripes != nullptr) {
      linear_stripes(weight, w, kernels, activation, rows_x, rows, bias, rows_y, threads);
    } else {
      linear_panels(weight, w, kernels, limits, activation, rows_x, rows, bias, rows_y, threads);
    }
  }
}

void linear_grad_x(const PackedWeight& weight, Activation activation, const void* grad_y,
                   std::size_t m, void* grad_x, std::size_t threads) {
  const Layout& layout = weight.layout;
  const Kernels& kernels = float_kernels_for(current_isa());
  const Kernels& own = kernels_for(current_isa(), activation);
  const Weight w = weight_of(weight, activation);
  threads = usable_threads(threads);
  for (std::size_t row = 0; row < m; row += kMaxRows) {
    const std::size_t rows = std::min(kMaxRows, m - row);
    if (own.grad_panels != nullptr) {
      grad_panels(weight, w, own, offset(grad_y, row * layout.n, activation), rows,
                  offset(grad_x, row * layout.k, activation), threads);
      continue;
    }
    grad_rows(weight, w, kernels, activation, offset(grad_y, row * layout.n, activation), rows,
              offset(grad_x, row * layout.k, activation), threads);
  }
}

}  // namespace fdk
