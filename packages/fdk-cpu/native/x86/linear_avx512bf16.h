// The kernels of AVX-512 BF16, one per file. AMX uses most of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/kernels.h"

namespace fdk {

// Rows of x that gemm_small_m_avx512bf16 multiplies at once.
inline constexpr std::size_t kAvx512Bf16GemvRows = 6;
// LinearKernels::block_rows and block_bytes: 256 KiB of W_hat and 128 KiB of x per panel fit an L2
// of 1 MiB and more. A row of y gets whole cache lines from each block.
inline constexpr std::size_t kAvx512Bf16BlockRows = 64, kAvx512Bf16BlockBytes = 4096;

// The memory order, which all of these kernels use.
struct Orders {
  Order natural;
};
extern const Orders kAvx512Bf16Orders;
// LinearKernels::gemv for any m, the GEMM for m of 2 or more, and the rows of x that share one
// decoding of a code.
void gemv_avx512bf16(const GemvTask& task, std::size_t begin, std::size_t end);
void gemm_small_m_avx512bf16(const GemvTask& task, std::size_t begin, std::size_t end);
std::size_t rows_per_pass_avx512bf16(const Weight& w);
// LinearKernels::thresholds, and the reciprocal throughput of a 512-bit product in cycles.
DispatchThresholds dispatch_thresholds_avx512bf16(const Weight& w);
double cycles_of_products_avx512bf16();
bool is_wide_avx512bf16();  // two 512-bit products start per cycle
// LinearKernels::dequantise, gemm_panel, gemm_stripe, write_panel and pack_panel.
void dequantise_avx512bf16(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                           void* out, std::size_t stride);
void gemm_panel_avx512bf16(const GemmPanelTask& task);
void gemm_stripe_avx512bf16(const GemmStripeTask& task);
void write_panel_avx512bf16(const PanelOut& out);
void pack_panel_avx512bf16(const void* x, std::size_t x_stride, std::size_t rows,
                           std::size_t positions, std::size_t width, void* out);

// LinearKernels::dequantise_prefetching and gemm_stripes.
void dequantise_prefetching_avx512bf16(const Weight& w, std::size_t stripe, std::size_t begin,
                                       std::size_t end, void* out, std::size_t stride,
                                       const Prefetcher& prefetcher);
void gemm_stripes_avx512bf16(const GemmStripesTask& task, std::size_t begin, std::size_t end);

// DgradPanels::dequantise_pairs.
void dequantise_pairs_avx512bf16(const Weight& w, std::size_t first, std::size_t last,
                                 std::size_t begin, std::size_t end, std::uint16_t* panels,
                                 std::size_t step);

}  // namespace fdk
