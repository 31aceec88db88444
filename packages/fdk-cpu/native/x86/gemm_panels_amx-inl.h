// The GEMM of a block of W_hat with panels of x in AMX tiles. It is a template over the tiles, so
// that a test runs it on any machine.
//
// "Tile" means the tile registers here, up to 16 rows of 64 bytes, not a tile of codes. One product
// adds w :: [16 rows, 32 positions] times x :: [16 pairs of positions, 16 lanes] to sums :: [16
// rows, 16 lanes]; rows of W_hat and a panel of x are loaded without conversion.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>

#include "common/kernels.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

constexpr std::size_t kAmxRows = 16, kAmxLanes = 16, kAmxDepth = 32;
static_assert(kPanelDepth % kAmxDepth == 0);

// Tiles 0 to 3 are sums, so that four products are in flight (one takes 16 cycles and has a latency
// of 52). The others hold rows of W_hat and lanes of x: two tiles of rows with both halves of a
// wide panel, or four with a narrow panel.
template <class Tiles, bool kWide>
struct AmxPanel {
  static constexpr std::size_t kMost = kWide ? 2 : 4;  // tiles of rows at once
  static constexpr int kSums = kWide ? 2 : 1;          // tiles of sums per tile of rows
  static constexpr std::size_t kStep = kAmxRows * kMost;
  static constexpr int kX = 6;

  // The last tile of rows has its own register because it alone may be partly filled.
  template <int kTiles>
  static constexpr int w_tile(int t) {
    if (t + 1 == kTiles) return kWide ? 5 : 7;
    return 4 + t % 2;
  }

  // Configures the rows of each tile; the last of kTiles tiles of w has `rest`.
  template <int kTiles>
  FDK_INLINE static void configure(std::size_t rest) {
    std::uint8_t rows[8];
    for (auto& of : rows) of = std::uint8_t(kAmxRows);
    rows[w_tile<kTiles>(kTiles - 1)] = std::uint8_t(rest);
    for (int s = 0; s < kSums; s++) rows[(kTiles - 1) * kSums + s] = std::uint8_t(rest);
    Tiles::configure(rows);
  }

  // The part of GemmPanelTask::next that these rows prefetch.
  template <int kTiles>
  FDK_INLINE static Prefetcher prefetch_at(const GemmPanelTask& task, std::size_t row) {
    if (task.next == nullptr) return {};
    const std::size_t bytes = kTiles * kAmxRows / kTileRows * task.part_bytes;
    return {task.next + row / kTileRows * task.part_stride, bytes * kAmxDepth / task.depth};
  }

  template <int kTiles>
  FDK_INLINE static void products(const GemmPanelTask& task, std::size_t row) {
    const std::uint16_t* w = static_cast<const std::uint16_t*>(task.w) + row * task.stride;
    const std::uint16_t* x = static_cast<const std::uint16_t*>(task.x);
    float* const y = task.y + row * task.panel;
    const auto sums = [&](auto visit) FDK_LAMBDA {
      unroll<kTiles * kSums>([&](auto i) FDK_LAMBDA {
        constexpr std::size_t t = i.value / kSums, half = i.value % kSums;
        visit(i, y + t * kAmxRows * task.panel + half * kAmxLanes);
      });
    };
    sums([&](auto i, float* at)
             FDK_LAMBDA { Tiles::template load<i.value>(at, task.panel * sizeof(float)); });
    Prefetcher prefetcher = prefetch_at<kTiles>(task, row);
    for (std::size_t p = 0; p < task.depth; p += kAmxDepth, w += kAmxDepth) {
      prefetcher.step();
      unroll<kSums>([&](auto half) FDK_LAMBDA {
        Tiles::template load<kX + half.value>(x + half.value * 2 * kAmxLanes, task.panel * 4);
      });
      unroll<kTiles>([&](auto t) FDK_LAMBDA {
        constexpr int of_w = w_tile<kTiles>(t.value);
        Tiles::template load<of_w>(w + t.value * kAmxRows * task.stride, task.stride * 2);
        unroll<kSums>([&](auto half) FDK_LAMBDA {
          Tiles::template product<t.value * kSums + half.value, of_w, kX + half.value>();
        });
      });
      x += kAmxDepth * task.panel;
    }
    sums([&](auto i, float* at)
             FDK_LAMBDA { Tiles::template store<i.value>(at, task.panel * sizeof(float)); });
  }

  // The remaining rows: kTiles tiles; the last may be partly filled.
  template <int kTiles>
  static void last(const GemmPanelTask& task, std::size_t row) {
    if constexpr (kTiles > 0) {
      const std::size_t full = kAmxRows * (kTiles - 1), left = task.rows - row;
      if (left <= full) return last<kTiles - 1>(task, row);
      configure<kTiles>(left - full);
      products<kTiles>(task, row);
    }
  }

  static void all(const GemmPanelTask& task) {
    std::size_t row = 0;
    if (task.rows >= kStep) configure<int(kMost)>(kAmxRows);
    for (; row + kStep <= task.rows; row += kStep) products<int(kMost)>(task, row);
    last<int(kMost)>(task, row);
    Tiles::release();
  }
};

// LinearKernels::gemm_panel, for panels of 16 and 32 lanes.
template <class Tiles>
void gemm_panel_tiles(const GemmPanelTask& task) {
  if (task.panel == kAmxLanes) return AmxPanel<Tiles, false>::all(task);
  assert(task.panel == 2 * kAmxLanes);
  AmxPanel<Tiles, true>::all(task);
}

}  // namespace
}  // namespace fdk
