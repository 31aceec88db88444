// The NEON kernels that SVE's share: what is not worth writing twice.
#pragma once

#include "common/kernels.h"

namespace fdk {

void gemv_neonbf16(const GemvTask& task, std::size_t begin, std::size_t end);
void decode_neonbf16(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                     void* out, std::size_t stride);
void panel_product_neonbf16(const PanelTask& task);

// The bf16 kernels of ARM take x as it lies.
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
