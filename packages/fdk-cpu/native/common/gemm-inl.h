// The float32 GEMM of an instruction set on dequantised tiles, forward and backward, over its
// vector operations V: Float, kLanes, load, store, set1, zero, add, fma.
#pragma once

#include <cstddef>

#include "common/kernels.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

// y[row][panel] += w[row][depth] * x[depth][panel] for kRows rows of w and kVectors vectors of x.
//
// A block is summed separately before it is added to y: the error grows with the number of blocks
// plus the depth of one, not with their product.
template <class V, int kRows, int kVectors>
void panel_rows(const GemmPanelTask& task, std::size_t row) {
  using Float = typename V::Float;
  const float* w = static_cast<const float*>(task.w) + row * task.stride;
  const float* x = static_cast<const float*>(task.x);
  float* y = task.y + row * task.panel;
  Float sums[kRows][kVectors];
  FDK_UNROLL
  for (int r = 0; r < kRows; r++) {
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) sums[r][v] = V::zero();
  }
  for (std::size_t i = 0; i < task.depth; i++, x += task.panel) {
    Float lane[kVectors];
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) lane[v] = V::load(x + v * V::kLanes);
    FDK_UNROLL
    for (int r = 0; r < kRows; r++) {
      const Float value = V::set1(w[r * task.stride + i]);
      FDK_UNROLL
      for (int v = 0; v < kVectors; v++) sums[r][v] = V::fma(value, lane[v], sums[r][v]);
    }
  }
  FDK_UNROLL
  for (int r = 0; r < kRows; r++) {
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) {
      float* to = y + r * task.panel + v * V::kLanes;
      V::store(to, V::add(V::load(to), sums[r][v]));
    }
  }
}

template <class V, int kRows, int kVectors>
void panel_all(const GemmPanelTask& task) {
  std::size_t row = 0;
  for (; row + kRows <= task.rows; row += kRows) panel_rows<V, kRows, kVectors>(task, row);
  for (; row < task.rows; row += kTileRows) panel_rows<V, int(kTileRows), kVectors>(task, row);
}

template <class V, int kRows>
void gemm_panel(const GemmPanelTask& task) {
  if (task.panel == V::kLanes) {
    panel_all<V, kRows, 1>(task);
  } else {
    panel_all<V, kRows, 2>(task);
  }
}

// out[m][..] += grad[m][row] * w[row][..] for kM rows of out and kVectors vectors from `column` on.
template <class V, int kM, int kVectors>
void dgrad_block(const DgradTask& task, std::size_t m, std::size_t column) {
  using Float = typename V::Float;
  float* out = task.out + m * task.out_stride + column;
  Float sums[kM][kVectors];
  FDK_UNROLL
  for (int i = 0; i < kM; i++) {
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) sums[i][v] = V::zero();
  }
  const float* w = task.w + column;
  const float* grad = task.grad + m * task.grad_stride;
  for (std::size_t row = 0; row < task.rows; row++, w += kTileK) {
    Float lane[kVectors];
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) lane[v] = V::load(w + v * V::kLanes);
    FDK_UNROLL
    for (int i = 0; i < kM; i++) {
      const Float value = V::set1(grad[std::size_t(i) * task.grad_stride + row]);
      FDK_UNROLL
      for (int v = 0; v < kVectors; v++) sums[i][v] = V::fma(value, lane[v], sums[i][v]);
    }
  }
  FDK_UNROLL
  for (int i = 0; i < kM; i++) {
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) {
      float* to = out + std::size_t(i) * task.out_stride + v * V::kLanes;
      V::store(to, V::add(V::load(to), sums[i][v]));
    }
  }
}

template <class V, int kVectors>
void dgrad(const DgradTask& task) {
  static_assert(int(kTileK) % (kVectors * V::kLanes) == 0);
  for (std::size_t column = 0; column < kTileK; column += std::size_t(kVectors * V::kLanes)) {
    std::size_t m = 0;
    for (; m + 3 <= task.m; m += 3) dgrad_block<V, 3, kVectors>(task, m, column);
    for (; m < task.m; m++) dgrad_block<V, 1, kVectors>(task, m, column);
  }
}

}  // namespace
}  // namespace fdk
