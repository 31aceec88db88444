// Chooses the kernel of a product by m.
#include "common/linear.h"

#include <algorithm>

#include "common/float_convert.h"
#include "common/dispatch.h"
#include "common/kernels.h"
#include "common/linear_internal.h"
#include "common/thread_pool.h"
#include "common/buffers.h"

namespace fdk {

Weight weight_of(const PackedWeight& packed, Activation activation) {
  const Layout& layout = packed.layout;
  Weight w = weight_without_table(packed);
  for (std::size_t i = 0; i < std::size_t(1) << layout.bits; i++) {
    float value = packed.codebook == nullptr ? float(i) : packed.codebook[i];
    if (activation == Activation::bf16) value = from_bf16(to_bf16(value));
    if (activation == Activation::fp16) value = from_fp16(to_fp16(value));
    w.table[i] = value;
  }
  return w;
}

namespace {

DispatchThresholds thresholds_of(const LinearKernels& kernels, const Weight& w) {
  return kernels.thresholds == nullptr ? DispatchThresholds() : kernels.thresholds(w);
}

}  // namespace

void linear(const PackedWeight& weight, Activation activation, const void* x, std::size_t m,
            const void* bias, void* y, std::size_t threads, bool batch_invariant) {
  if (!batch_invariant) {
    return linear_with_thresholds(nullptr, weight, activation, x, m, bias, y, threads);
  }
  DispatchThresholds thresholds =
      thresholds_of(linear_kernels_for(current_isa(), activation), weight_of(weight, activation));
  thresholds.max_gemv_m = thresholds.max_stripes_m = 0;
  thresholds.batch_invariant = true;
  linear_with_thresholds(&thresholds, weight, activation, x, m, bias, y, threads);
}

void linear_with_thresholds(const DispatchThresholds* own, const PackedWeight& weight,
                            Activation activation, const void* x, std::size_t m, const void* bias,
                            void* y, std::size_t threads) {
  const Layout& layout = weight.layout;
  const LinearKernels& kernels = linear_kernels_for(current_isa(), activation);
  const Weight w = weight_of(weight, activation);
  const DispatchThresholds thresholds = own != nullptr ? *own : thresholds_of(kernels, w);
  threads = usable_threads(threads);
  for (std::size_t row = 0; row < m; row += kMaxRows) {
    const std::size_t rows = std::min(kMaxRows, m - row);
    const void* const rows_x = offset(x, row * layout.k, activation);
    void* const rows_y = offset(y, row * layout.n, activation);
    if (rows <= thresholds.max_gemv_m) {
      linear_gemv(weight, w, kernels, activation, rows_x, rows, bias, rows_y, threads);
    } else if (rows <= thresholds.max_stripes_m && kernels.gemm_stripes != nullptr) {
      linear_gemm_stripes(weight, w, kernels, activation, rows_x, rows, bias, rows_y, threads);
    } else {
      linear_gemm_panels(weight, w, kernels, thresholds, activation, rows_x, rows, bias, rows_y,
                         threads);
    }
  }
}

void linear_grad_x(const PackedWeight& weight, Activation activation, const void* grad_y,
                   std::size_t m, void* grad_x, std::size_t threads) {
  const Layout& layout = weight.layout;
  const LinearKernels& kernels = float_linear_kernels_for(current_isa());
  const LinearKernels& own = linear_kernels_for(current_isa(), activation);
  const Weight w = weight_of(weight, activation);
  threads = usable_threads(threads);
  for (std::size_t row = 0; row < m; row += kMaxRows) {
    const std::size_t rows = std::min(kMaxRows, m - row);
    if (own.dgrad_panels != nullptr) {
      dgrad_panels(weight, w, own, offset(grad_y, row * layout.n, activation), rows,
                   offset(grad_x, row * layout.k, activation), threads);
      continue;
    }
    dgrad_float(weight, w, kernels, activation, offset(grad_y, row * layout.n, activation), rows,
                offset(grad_x, row * layout.k, activation), threads);
  }
}

}  // namespace fdk
