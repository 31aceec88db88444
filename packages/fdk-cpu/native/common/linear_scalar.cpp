// The linear kernels in plain C++ for any machine: the reference for the other instruction sets.
#include "common/codes_scalar.h"
#include "common/kernels.h"

namespace fdk {
namespace {

// The values of row r of a tile before scaling, and the scale of each position.
void values_of(const Weight& w, std::size_t stripe, std::size_t tile, std::size_t r, float* values,
               float* scales) {
  const Planes planes = planes_of(w.bits);
  const std::uint8_t* bytes = w.codes + (stripe * w.tiles + tile) * tile_bytes(w.bits);
  const std::size_t group = tile / w.tiles_per_group * w.groups_per_tile;
  const std::size_t size = kTileK / w.groups_per_tile;
  for (std::size_t i = 0; i < kTileK; i++) {
    const std::size_t slot = (stripe * w.stored_groups + group + i / size) * kTileRows + r;
    values[i] = w.table[code_at(bytes, planes, r, i)] - zero_at(w, slot);
    scales[i] = scale_at(w, slot);
  }
}

void gemv(const GemvTask& task, std::size_t begin, std::size_t end) {
  const Weight& w = *task.weight;
  const float* x = static_cast<const float*>(task.x);
  float values[kTileK], scales[kTileK];
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    for (std::size_t r = 0; r < kTileRows; r++) {
      double sums[kMaxGemvRows] = {};
      for (std::size_t tile = 0; tile < w.tiles; tile++) {
        values_of(w, stripe, tile, r, values, scales);
        for (std::size_t m = 0; m < task.m; m++) {
          const float* row = x + (m * w.tiles + tile) * kTileK;
          for (std::size_t i = 0; i < kTileK; i++) {
            sums[m] += double(row[i]) * double(values[i] * scales[i]);
          }
        }
      }
      for (std::size_t m = 0; m < task.m; m++) {
        task.y[m * task.y_stride + stripe * kTileRows + r] = float(sums[m]);
      }
    }
  }
}

void dequantise(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end, void* out,
                std::size_t stride) {
  float values[kTileK], scales[kTileK];
  for (std::size_t r = 0; r < kTileRows; r++) {
    float* row = static_cast<float*>(out) + r * stride;
    for (std::size_t tile = begin; tile < end; tile++, row += kTileK) {
      values_of(w, stripe, tile, r, values, scales);
      for (std::size_t i = 0; i < kTileK; i++) row[i] = values[i] * scales[i];
    }
  }
}

void gemm_panel(const GemmPanelTask& task) {
  const float* w = static_cast<const float*>(task.w);
  const float* x = static_cast<const float*>(task.x);
  for (std::size_t row = 0; row < task.rows; row++) {
    for (std::size_t m = 0; m < task.panel; m++) {
      double sum = 0;
      for (std::size_t i = 0; i < task.depth; i++) {
        sum += double(w[row * task.stride + i]) * double(x[i * task.panel + m]);
      }
      task.y[row * task.panel + m] += float(sum);
    }
  }
}

void dgrad(const DgradTask& task) {
  for (std::size_t m = 0; m < task.m; m++) {
    double sums[kTileK] = {};
    for (std::size_t row = 0; row < task.rows; row++) {
      const double grad = task.grad[m * task.grad_stride + row];
      for (std::size_t i = 0; i < kTileK; i++) sums[i] += grad * double(task.w[row * kTileK + i]);
    }
    for (std::size_t i = 0; i < kTileK; i++) task.out[m * task.out_stride + i] += float(sums[i]);
  }
}

struct Orders {
  Order natural;
};

constexpr Orders make_orders() {
  Orders orders{};
  for (std::size_t i = 0; i < kTileK; i++) orders.natural[i] = std::uint8_t(i);
  return orders;
}

constexpr Orders kOrders = make_orders();

}  // namespace

extern const LinearKernels kLinearScalar = {
    .x_is_bf16 = false,
    .gemv_order = &kOrders.natural,
    .panel_order = &kOrders.natural,
    .panel = 8,
    .panel_step = 1,
    .gemv = gemv,
    .dequantise = dequantise,
    .gemm_panel = gemm_panel,
    .dgrad = dgrad,
};

}  // namespace fdk
