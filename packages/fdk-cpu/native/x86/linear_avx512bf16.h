// The parts of AVX-512 BF16 that are files of their own.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/kernels.h"

namespace fdk {

// Rows of x that rows_avx512bf16 takes at once, and of w that panel_avx512bf16 is best given.
inline constexpr std::size_t kAvx512Bf16Rows = 6;
inline constexpr std::size_t kAvx512Bf16PanelRows = 8;
// Kernels::block_rows and block_bytes: W_hat 256 KiB and a panel of x 128, of an L2 of 1 MiB and
// more. The outputs of a block are whole lines of y.
inline constexpr std::size_t kAvx512Bf16BlockRows = 64, kAvx512Bf16BlockBytes = 4096;

// The order of all of these kernels: positions as they lie.
struct Orders {
  Order natural;
};
extern const Orders kAvx512Bf16Orders;
// Kernels::gemv, for any m and for 2 and more, and how many of them meet a decoded code at once.
void gemv_avx512bf16(const GemvTask& task, std::size_t begin, std::size_t end);
void rows_avx512bf16(const GemvTask& task, std::size_t begin, std::size_t end);
std::size_t most_rows_avx512bf16(const Weight& w);
// Kernels::limits, and the cycles that a product of 512 bits takes, one after another.
RowLimits limits_avx512bf16(const Weight& w);
double cycles_of_products_avx512bf16();
bool is_wide_avx512bf16();  // where two of them begin in a cycle
// Kernels::decode, panel_product, stripe_product, write_panel and stage_panel.
void decode_avx512bf16(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                       void* out, std::size_t stride);
void panel_avx512bf16(const PanelTask& task);
void stripe_avx512bf16(const StripeTask& task);
void write_panel_avx512bf16(const PanelOut& out);
void stage_panel_avx512bf16(const void* x, std::size_t x_stride, std::size_t rows,
                            std::size_t positions, std::size_t width, void* out);

// Kernels::decode_fetching and stripes.
void decode_fetching_avx512bf16(const Weight& w, std::size_t stripe, std::size_t begin,
                                std::size_t end, void* out, std::size_t stride, const Fetch& fetch);
void stripes_avx512bf16(const StripesTask& task, std::size_t begin, std::size_t end);

// GradPanels::decode_pairs.
void decode_pairs_avx512bf16(const Weight& w, std::size_t first, std::size_t last,
                             std::size_t begin, std::size_t end, std::uint16_t* panels,
                             std::size_t step);

}  // namespace fdk
