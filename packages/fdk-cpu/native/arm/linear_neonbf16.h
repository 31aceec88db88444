// The kernels of NEON with BF16 that SVE uses too.
#pragma once

#include "common/kernels.h"

namespace fdk {

void gemv_neonbf16(const GemvTask& task, std::size_t begin, std::size_t end);
void dequantise_neonbf16(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                         void* out, std::size_t stride);
void gemm_panel_neonbf16(const GemmPanelTask& task);

// The bf16 kernels of ARM use x in memory order.
struct NaturalOrder {
  Order order;
};

constexpr NaturalOrder natural_order() {
  NaturalOrder natural{};
  for (std::size_t i = 0; i < kTileK; i++) natural.order[i] = std::uint8_t(i);
  return natural;
}

static constexpr NaturalOrder kNatural = natural_order();
inline constexpr std::size_t kNeonPanel = 16, kNeonPanelStep = 4;

}  // namespace fdk
