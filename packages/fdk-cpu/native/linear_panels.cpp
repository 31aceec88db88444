// Many rows of x: blocks of W_hat, dequantised once, times panels of x.
#include <algorithm>
#include <cassert>
#include <vector>

#include "convert.h"
#include "kernels.h"
#include "linear_parts.h"
#include "panel_staging.h"
#include "pool.h"
#include "rows.h"
#include "staging.h"

namespace fdk {
namespace {

// Rows of the dequantised block are a line apart from a power of two, whose lines would share few
// sets of L1.
constexpr std::size_t kLineBytes = 64;
// Bytes of x that a block meets, up to which they stay in L2 beside it from one block to the next.
constexpr std::size_t kStayingBytes = 256 << 10;

[[maybe_unused]] bool is_natural(const Order& order) {
  for (std::size_t p = 0; p < kTileK; p++) {
    if (order[p] != p) return false;
  }
  return true;
}

}  // namespace

void linear_panels(const PackedWeight& packed, const Weight& w, const Kernels& kernels,
                   Activation type, const void* x, std::size_t m, const void* bias, void* y,
                   std::size_t threads) {
  const Layout& layout = packed.layout;
  const std::size_t positions = layout.positions(), item = kernels.x_is_bf16 ? 2 : 4;
  const Panels panels{m, kernels.panel, kernels.panel_step};
  const bool as_it_is = kernels.x_is_bf16 && layout.dense();
  const bool by_kernel = as_it_is && kernels.stage_panel != nullptr;
  assert(!by_kernel || is_natural(*kernels.panel_order));
  std::vector<std::uint32_t> columns, units;
  if (!by_kernel) {
    columns = columns_of(layout, *kernels.panel_order);
    units = units_of(layout, columns, type, kernels.x_is_bf16);
  }
  const Buffer<std::uint8_t> staged(panels.lanes() * positions * item);
  parallel_for(panels.count(), 1, threads, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; i++) {
      std::uint8_t* out = staged.get() + panels.lane(i) * positions * item;
      const std::size_t first = panels.lane(i), width = panels.width(i);
      if (by_kernel) {
        kernels.stage_panel(offset(x, first * layout.k, type), layout.k, std::min(width, m - first),
                            positions, width, out);
      } else if (!units.empty()) {
        stage_units(layout, units, type, x, m, first, width, out);
      } else if (kernels.x_is_bf16) {
        stage_panel(layout, columns, type, x, m, first, width,
                    reinterpret_cast<std::uint16_t*>(out));
      } else {
        stage_panel(layout, columns, type, x, m, first, width, reinterpret_cast<float*>(out));
      }
    }
  });
  const std::size_t block_rows = kernels.block_rows, block_stripes = block_rows / kTileRows;
  const std::size_t row_bytes = kernels.block_bytes + kLineBytes, stride = row_bytes / item;
  const std::size_t block_tiles = kernels.block_bytes / item / kTileK;
  const bool x_stays = panels.lanes() * kernels.block_bytes <= kStayingBytes;
  const std::size_t blocks = ceil_div(layout.stripes, block_stripes);
  parallel_for(
      blocks, chunk_for(blocks, threads), threads, [&](std::size_t begin, std::size_t end) {
        const std::size_t end_stripe = std::min(end * block_stripes, layout.stripes);
        const Buffer<std::uint8_t> block(block_rows * row_bytes);
        const Buffer<float> products(block_rows * panels.lanes());
        for (std::size_t b = begin; b < end; b++) {
          const std::size_t stripe = b * block_stripes;
          const std::size_t stripes = std::min(block_stripes, layout.stripes - stripe);
          const std::size_t rows = stripes * kTileRows;
          std::fill_n(products.get(), block_rows * panels.lanes(), 0.0f);
          for (std::size_t tile = 0; tile < layout.tiles; tile += block_tiles) {
            const std::size_t tiles = std::min(block_tiles, layout.tiles - tile);
            const bool last = tile + tiles == layout.tiles;
            const std::size_t next_stripe = last ? stripe + block_stripes : stripe;
            const std::size_t next = last ? 0 : tile + tiles;
            const std::size_t next_tiles = std::min(block_tiles, layout.tiles - next);
            for (std::size_t s = 0; s < stripes; s++) {
              if (next_stripe + s < end_stripe) {
                fetch_tiles(w, next_stripe + s, next, next + next_tiles, !kernels.panel_fetches);
              }
              kernels.decode(w, stripe + s, tile, tile + tiles,
                             block.get() + s * kTileRows * row_bytes, stride);
            }
            const auto panel_at = [&](std::size_t i, std::size_t first) {
              const std::size_t units = panels.lane(i) * positions;
              return staged.get() + (units + first * kTileK * panels.width(i)) * item;
            };
            for (std::size_t i = 0; i < panels.count(); i++) {
              PanelTask task{block.get(),
                             rows,
                             stride,
                             tiles * kTileK,
                             panel_at(i, tile),
                             panels.width(i),
                             products.get() + panels.lane(i) * block_rows};
              const bool last_panel = i + 1 == panels.count();
              const bool more = next_stripe < end_stripe;
              if (!x_stays && (!last_panel || more)) {
                const std::size_t panel = last_panel ? 0 : i + 1;
                task.next_x = panel_at(panel, last_panel ? next : tile);
                task.next_x_bytes =
                    (last_panel ? next_tiles : tiles) * kTileK * panels.width(panel) * item;
              }
              if (last_panel && more) {
                const std::size_t bytes = tile_bytes(w.bits);
                task.next_codes = w.codes + (next_stripe * w.tiles + next) * bytes;
                task.next_stripes = std::min(block_stripes, end_stripe - next_stripe);
                task.codes_bytes = next_tiles * bytes;
                task.codes_stride = w.tiles * bytes;
              }
              kernels.panel_product(task);
            }
          }
          const std::size_t first = stripe * kTileRows, outputs = std::min(layout.n - first, rows);
          for (std::size_t i = 0; i < panels.count(); i++) {
            const std::size_t lane = panels.lane(i), lanes = std::min(panels.wide, m - lane);
            const PanelOut out{products.get() + lane * block_rows,
                               panels.width(i),
                               lanes,
                               outputs,
                               offset(bias, first, type),
                               offset(y, lane * layout.n + first, type),
                               layout.n};
            if (kernels.write_panel != nullptr) {
              kernels.write_panel(out);
              continue;
            }
            for (std::size_t row = 0; row < lanes; row++) {
              write_row(out.products + row, out.panel, out.bias, type, outputs,
                        offset(out.y, row * layout.n, type));
            }
          }
        }
      });
}

}  // namespace fdk
