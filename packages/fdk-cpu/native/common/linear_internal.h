// The products that linear.cpp chooses from by m.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/kernels.h"
#include "common/linear.h"

namespace fdk {

// The weight as kernels see it, with its table rounded to the dtype of the activations.
Weight weight_of(const PackedWeight& packed, Activation activation);

// They take up to kMaxRows (buffers.h) rows of x or grad_y; the tensors are those of linear.h.

// Like linear, with the given thresholds (for tests), or those of the kernels if null.
void linear_with_thresholds(const DispatchThresholds* own, const PackedWeight& weight,
                            Activation activation, const void* x, std::size_t m, const void* bias,
                            void* y, std::size_t threads);

// One row, x :: [1][positions] in the kernel's order. Returns false, with y undefined, if no
// two-pass kernel supports the weight and x.
bool linear_two_pass(const PackedWeight& packed, const Weight& w, const TwoPassGemv* kernels,
                     Activation type, const void* x, const void* bias, void* y,
                     std::size_t threads);
// Sums of bf16 x for GemvTask::x_sums: x :: [m][positions] in the kernel's order, sums ::
// [m * positions / 2].
void sum_x_pairs(const Weight& w, const std::uint16_t* x, std::size_t m, float* sums);
bool is_finite(const float* values, std::size_t count);
// Small m: kernels.gemv, or kernels.two_pass for one row.
void linear_gemv(const PackedWeight& packed, const Weight& w, const LinearKernels& kernels,
                 Activation type, const void* x, std::size_t m, const void* bias, void* y,
                 std::size_t threads);
// Medium m, for sets that have gemm_stripes: each stripe of W_hat is dequantised once for all rows.
void linear_gemm_stripes(const PackedWeight& packed, const Weight& w, const LinearKernels& kernels,
                         Activation type, const void* x, std::size_t m, const void* bias, void* y,
                         std::size_t threads);
// Large m: each block of W_hat is dequantised once and multiplied with panels of x.
void linear_gemm_panels(const PackedWeight& packed, const Weight& w, const LinearKernels& kernels,
                        const DispatchThresholds& thresholds, Activation type, const void* x,
                        std::size_t m, const void* bias, void* y, std::size_t threads);
void dgrad_float(const PackedWeight& packed, const Weight& w, const LinearKernels& kernels,
                 Activation type, const void* grad_y, std::size_t m, void* grad_x,
                 std::size_t threads);
// The same in bf16, for sets that have DgradPanels; grad_y and grad_x are bf16.
void dgrad_panels(const PackedWeight& packed, const Weight& w, const LinearKernels& kernels,
                  const void* grad_y, std::size_t m, void* grad_x, std::size_t threads);

}  // namespace fdk
