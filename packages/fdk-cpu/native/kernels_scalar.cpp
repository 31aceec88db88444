// Plain C++ on any machine: what the other instruction sets are tested against.
#include <array>

#include "convert.h"
#include "kernels.h"

namespace fdk {
namespace {

float scale_at(const Weight& w, std::size_t slot) {
  switch (w.scale_type) {
    case ScaleType::bf16: return from_bf16(static_cast<const std::uint16_t*>(w.scales)[slot]);
    case ScaleType::fp16: return from_fp16(static_cast<const std::uint16_t*>(w.scales)[slot]);
    case ScaleType::fp32: return static_cast<const float*>(w.scales)[slot];
    case ScaleType::e8m0: return from_e8m0(static_cast<const std::uint8_t*>(w.scales)[slot]);
  }
  return 0;
}

float zero_at(const Weight& w, std::size_t slot) {
  switch (w.zero_type) {
    case ZeroType::none: return 0;
    case ZeroType::bf16: return from_bf16(static_cast<const std::uint16_t*>(w.zeros)[slot]);
    case ZeroType::fp16: return from_fp16(static_cast<const std::uint16_t*>(w.zeros)[slot]);
    case ZeroType::fp32: return static_cast<const float*>(w.zeros)[slot];
    case ZeroType::u8: return static_cast<const std::uint8_t*>(w.zeros)[slot];
  }
  return 0;
}

unsigned code_at(const std::uint8_t* tile, const Planes& planes, std::size_t r, std::size_t i) {
  unsigned code = 0;
  for (int p = 0; p < planes.count; p++) {
    const Plane& plane = planes.plane[p];
    const std::uint8_t* lane =
        tile + plane.offset + r * plane.row_bytes() + 2 * (i % plane.lanes());
    const unsigned word = lane[0] | unsigned(lane[1]) << 8;
    const int shift = int(i / plane.lanes()) * plane.width;
    code |= (word >> shift & ((1u << plane.width) - 1)) << plane.low;
  }
  return code;
}

// The values of row r of a tile before their scale, and the slot of its first group's scale.
void values_of(const Weight& w, std::size_t stripe, std::size_t tile, std::size_t r,
               float* values, float* scales) {
  const Planes planes = planes_of(w.bits);
  const std::uint8_t* bytes = w.codes + (stripe * w.tiles + tile) * tile_bytes(w.bits);
  const std::size_t group = tile / w.tiles_per_group * w.groups_per_tile;
  const std::size_t size = kTileK / w.groups_per_tile;
  for (std::size_t i = 0; i < kTileK; i++) {
    const std::size_t slot =
        (stripe * w.stored_groups + group + i / size) * kTileRows + r;
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

void decode(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end, void* out,
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

void panel_product(const PanelTask& task) {
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

void grad_product(const GradTask& task) {
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

extern const Kernels kScalar = {false, &kOrders.natural, &kOrders.natural, 8,    8,
                                1,     gemv,             decode,           panel_product,
                                grad_product};

}  // namespace fdk
