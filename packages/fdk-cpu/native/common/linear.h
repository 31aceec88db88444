// y = x @ W_hat.T + bias and its gradient dy @ W_hat over a packed weight, for any m.
#pragma once

#include <cstddef>

#include "common/layout.h"

namespace fdk {

// A packed weight as its owner holds it: codes, scales and zero points as in layout.h, and the
// float32 codebook, [2^bits], or null for affine formats.
struct PackedWeight {
  Layout layout;
  const std::uint8_t* codes;
  const void* scales;
  ScaleType scale_type;
  const void* zeros;
  ZeroType zero_type;
  const float* codebook;
};

// x    :: [m, k, activation]
// bias :: [n, activation] or null
// y    :: [m, n, activation]
//
// batch_invariant: a row of y does not depend on the other rows of x or their number.
void linear(const PackedWeight& weight, Activation activation, const void* x, std::size_t m,
            const void* bias, void* y, std::size_t threads, bool batch_invariant = false);

// grad_y :: [m, n, activation]
// grad_x :: [m, k, activation]
void linear_grad_x(const PackedWeight& weight, Activation activation, const void* grad_y,
                   std::size_t m, void* grad_x, std::size_t threads);

}  // namespace fdk
