// y = x @ W.T with weights that are not quantised: the baseline of the kernels in linear.h.
//
//   x :: [m, k]    w :: [n, k]    y :: [m, n]    all bf16 or all float32, summed in float32
#pragma once

#include <cstddef>

#include "common/layout.h"

namespace fdk {

// For m = 1: one pass over w.
void dense_gemv(Activation type, const void* x, const void* w, std::size_t n, std::size_t k,
                void* y, std::size_t threads);

// For any m.
void dense_gemm(Activation type, const void* x, std::size_t m, const void* w, std::size_t n,
                std::size_t k, void* y, std::size_t threads);

// The sum of x[i] w[i] for i < k; each instruction set has its own.
using Dot = float (*)(const void* x, const void* w, std::size_t k);

struct Dots {
  Dot bf16, fp32;
};

extern const Dots kDotsScalar;
#if defined(__aarch64__)
extern const Dots kDotsNeon;
extern const Dots kDotsNeonBf16;
#endif
#if defined(__x86_64__)
extern const Dots kDotsAvx2;
extern const Dots kDotsAvx512;
extern const Dots kDotsAvx512Bf16;
#endif

}  // namespace fdk
