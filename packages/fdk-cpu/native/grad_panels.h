// grad_x = grad_y @ W_hat in bf16, for sets that have GradPanels.
#pragma once

#include <cstddef>

#include "kernels.h"
#include "linear.h"

namespace fdk {

// grad_y :: [m, n] bf16, grad_x :: [m, k] bf16
void grad_panels(const PackedWeight& packed, const Weight& w, const Kernels& kernels,
                 const void* grad_y, std::size_t m, void* grad_x, std::size_t threads);

}  // namespace fdk
