// The parts of AVX-512 BF16 that are files of their own.
#pragma once

#include <cstddef>

#include "kernels.h"

namespace fdk {

// Rows of x that rows_avx512bf16 takes at once, and of w that panel_avx512bf16 is best given.
inline constexpr std::size_t kAvx512Bf16Rows = 6;
inline constexpr std::size_t kAvx512Bf16PanelRows = 8;

// Kernels::gemv for m of 2 and more, and Kernels::gemv_limit.
void rows_avx512bf16(const GemvTask& task, std::size_t begin, std::size_t end);
std::size_t rows_limit_avx512bf16(const Weight& w);
// Kernels::decode, panel_product, rest_product, write_panel and stage_panel.
void decode_avx512bf16(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                       void* out, std::size_t stride);
void panel_avx512bf16(const PanelTask& task);
void rest_avx512bf16(const RestTask& task);
void write_panel_avx512bf16(const PanelOut& out);
void stage_panel_avx512bf16(const void* x, std::size_t x_stride, std::size_t rows,
                            std::size_t positions, std::size_t width, void* out);

}  // namespace fdk
