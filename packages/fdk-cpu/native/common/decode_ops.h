// The parts of a decode step that are not products with quantised weights, one sequence at a time.
//
// Tensors are in the dtype `type`. Sums are float32, and results are rounded to the dtype where the
// models of transformers round them: after each operation of torch.
#pragma once

#include <cstddef>

#include "common/layout.h"

namespace fdk {

// The operands of attention for one head of one sequence. The last position is not read from the
// cache: another thread may be writing it there.
//   q        :: [d]
//   keys     :: [length - 1, d], and values likewise
//   last_key :: [d], and last_value likewise
//   out      :: [d]
// Scratch memory: scores [length] and sums [2][d].
struct AttentionTask {
  const void *q, *keys, *values, *last_key, *last_value;
  std::size_t length, d;
  float scale;
  float *scores, *sums;
  void* out;
};

struct DecodeOps {
  // Converts x[n] to float32.
  void (*widen)(Activation type, const void* x, std::size_t n, float* out);
  // The sum of x[i] w[i], with float32 x.
  float (*dot)(Activation type, const float* x, const void* w, std::size_t n);
  // x += y
  void (*add)(Activation type, void* x, const void* y, std::size_t n);
  // out = x / sqrt(mean(x^2) + eps) * weight
  void (*rms_norm)(Activation type, const void* x, const void* weight, std::size_t n, float eps,
                   void* out);
  // out = x * cos + rotate_half(x) * sin, each [d]
  void (*rotary)(Activation type, const void* x, const void* cos, const void* sin, std::size_t d,
                 void* out);
  // out = silu(gate) * up
  void (*swiglu)(Activation type, const void* gate, const void* up, std::size_t n, void* out);
  // out = softmax(scale q keys^T) values
  void (*attend)(Activation type, const AttentionTask& task);
};

extern const DecodeOps kDecodeOpsScalar;
#if defined(__aarch64__)
extern const DecodeOps kDecodeOpsNeon;
#endif
#if defined(__x86_64__)
extern const DecodeOps kDecodeOpsAvx2;
#endif

}  // namespace fdk
