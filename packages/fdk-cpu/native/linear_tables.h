// y = x @ W_hat.T of one row of x, by tables over it.
#pragma once

#include <cstddef>

#include "kernels.h"
#include "linear.h"

namespace fdk {

// x :: [1][positions] in the kernel's order, bias :: [n] or null, y :: [n]. False, and y as it was,
// where x has what tables cannot hold.
bool linear_by_tables(const PackedWeight& packed, const Weight& w, const TableKernels& kernels,
                      Activation type, const void* x, const void* bias, void* y,
                      std::size_t threads);

}  // namespace fdk
