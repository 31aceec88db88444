// A linear layer's product by the rows of x and backward; linear.cpp chooses among them.
#pragma once

#include <cstddef>

#include "common/kernels.h"
#include "common/linear.h"

namespace fdk {

// Rows of x or grad_y up to kMaxRows of rows.h; tensors as linear and linear_grad_x have them.

// linear with limits of one's own, as a test has them; null for those of the kernels.
void linear_within(const RowLimits* own, const PackedWeight& weight, Activation activation,
                   const void* x, std::size_t m, const void* bias, void* y, std::size_t threads);

// x :: [1][positions] in the kernel's order. False, and y of no meaning, where none of the table
// kernels takes the weight, or x has what they cannot hold.
bool linear_by_tables(const PackedWeight& packed, const Weight& w, const TableKernels* kernels,
                      Activation type, const void* x, const void* bias, void* y,
                      std::size_t threads);
// Few rows: kernels.gemv, or kernels.tables for one row.
void linear_gemv(const PackedWeight& packed, const Weight& w, const Kernels& kernels,
                 Activation type, const void* x, std::size_t m, const void* bias, void* y,
                 std::size_t threads);
// Stripes of W_hat, dequantised once for all rows, for sets that have Kernels::stripes.
void linear_stripes(const PackedWeight& packed, const Weight& w, const Kernels& kernels,
                    Activation type, const void* x, std::size_t m, const void* bias, void* y,
                    std::size_t threads);
// Blocks of W_hat, dequantised once for all rows, and panels of x.
void linear_panels(const PackedWeight& packed, const Weight& w, const Kernels& kernels,
                   const RowLimits& limits, Activation type, const void* x, std::size_t m,
                   const void* bias, void* y, std::size_t threads);
void grad_rows(const PackedWeight& packed, const Weight& w, const Kernels& kernels, Activation type,
               const void* grad_y, std::size_t m, void* grad_x, std::size_t threads);
// The same in bf16, for sets that have GradPanels; grad_y and grad_x are bf16.
void grad_panels(const PackedWeight& packed, const Weight& w, const Kernels& kernels,
                 const void* grad_y, std::size_t m, void* grad_x, std::size_t threads);

}  // namespace fdk
