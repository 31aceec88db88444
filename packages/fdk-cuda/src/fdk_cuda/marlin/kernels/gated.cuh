// silu(gate) * up where a product is written, for a weight whose rows are those of gate and of up,
// sixteen of each in turn: a block of 32 rows has sixteen of both. The product's rows are rounded
// to the activations' dtype first, and silu(gate) by itself: as where each is a kernel of its own.
//
//   GATED  1: so; y is [m, n / 2, dtype]
#pragma once
#include "common.cuh"

#ifndef GATED
#define GATED 0
#endif

constexpr int GATE_ROWS = 16;

__device__ __forceinline__ float rounded(float value) {
  return to_float(from_floats(value, 0.f) & 0xFFFFu);
}

// What a lane of gate has to write, from each lane's value: lane is the row in its block. The whole
// warp calls.
__device__ __forceinline__ float gate_up(float value) {
  const float own = rounded(value);
  const float up = __shfl_down_sync(~0u, own, GATE_ROWS);
  return rounded(own / (1.f + __expf(-own))) * up;
}

__device__ __forceinline__ bool is_gate(int row) { return row % BLOCK_ROWS < GATE_ROWS; }

__device__ __forceinline__ int gated_row(int row) {
  return row / BLOCK_ROWS * GATE_ROWS + row % GATE_ROWS;
}
