// The linear kernels of AVX-512 BF16: bf16 activations, products of pairs summed in float32.
#include "x86/linear_avx512bf16.h"

#include "common/kernels.h"

namespace fdk {
namespace {

constexpr Orders make_orders() {
  Orders orders{};
  for (std::size_t i = 0; i < kTileK; i++) orders.natural[i] = std::uint8_t(i);
  return orders;
}

}  // namespace

extern constinit const Orders kAvx512Bf16Orders = make_orders();

extern const LinearKernels kLinearAvx512Bf16 = {
    .x_is_bf16 = true,
    .gemv_order = &kAvx512Bf16Orders.natural,
    .panel_order = &kAvx512Bf16Orders.natural,
    .panel = 32,
    .panel_step = 8,
    .invariant_panel_step = 16,  // panels of 8 have two chains of sums
    .gemv = gemv_avx512bf16,
    .dequantise = dequantise_avx512bf16,
    .gemm_panel = gemm_panel_avx512bf16,
    .dgrad = nullptr,
    .two_pass = &kLutGemvAvx512Vnni,
    .gemv_rows = kAvx512Bf16GemvRows,
    .thresholds = dispatch_thresholds_avx512bf16,
    .write_panel = write_panel_avx512bf16,
    .pack_panel = pack_panel_avx512bf16,
    .block_rows = kAvx512Bf16BlockRows,
    .block_bytes = kAvx512Bf16BlockBytes,
    .panel_prefetches_codes = true,
    .dgrad_panels = &kDgradAvx512Bf16,
    .gemm_stripe = gemm_stripe_avx512bf16,
    .gemm_stripes = gemm_stripes_avx512bf16,
};

}  // namespace fdk
