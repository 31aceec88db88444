// Products with a stack of experts: each row of x with the weights of its experts, for any number.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/linear.h"

namespace fdk {

// Packed weights of one shape, one after another.
struct ExpertStack {
  PackedWeight first;
  std::size_t experts;
  // Floats from one codebook to the next; 0 if all experts have the same one.
  std::size_t codebook_stride;
};

// Which experts each token goes to.
// ids :: [tokens, top_k]; others than 0 to experts - 1 stand for none
struct Routing {
  const std::int64_t* ids;
  std::size_t tokens;
  std::size_t top_k;
};

// x       :: [tokens, k, activation], or [tokens, top_k, k] if x_has_places
// bias    :: [experts, n, activation] or null
// weights :: [tokens, top_k, float] or null
// y       :: [tokens, top_k, n, activation]; with weights [tokens, n], the weighted sums
//
// y is zero where there is no expert. batch_invariant: see linear.
void expert_linear(const ExpertStack& stack, Activation activation, const Routing& routing,
                   const void* x, bool x_has_places, const void* bias, const float* weights,
                   void* y, std::size_t threads, bool batch_invariant = false);

// grad_y :: [tokens, top_k, n, activation]
// grad_x :: [tokens, top_k, k, activation]
void expert_linear_grad_x(const ExpertStack& stack, Activation activation, const Routing& routing,
                          const void* grad_y, void* grad_x, std::size_t threads);

}  // namespace fdk
