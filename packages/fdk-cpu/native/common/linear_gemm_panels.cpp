// Large m: blocks of W_hat, each dequantised once, times panels of x.
#include <algorithm>
#include <atomic>
#include <cassert>
#include <vector>

#include "common/float_convert.h"
#include "common/kernels.h"
#include "common/linear_internal.h"
#include "common/thread_pool.h"
#include "common/buffers.h"
#include "common/pack_activations.h"

namespace fdk {
namespace {

// Rows of the dequantised block are one cache line longer than a power of two, whose lines would
// share few sets of L1.
constexpr std::size_t kLineBytes = 64;

// The rows of x after the last full panel or panel step that are multiplied with each stripe of
// W_hat when it is dequantised: faster than a panel that is mostly padding.
std::size_t rest_of(const LinearKernels& kernels, std::size_t limit, std::size_t m) {
  if (kernels.gemm_stripe == nullptr) return 0;
  const std::size_t step = limit == 0 ? kernels.panel_step : kernels.panel;
  const std::size_t rest = m % step;
  return rest != m && rest <= (limit == 0 ? kMaxRest : limit) ? rest : 0;
}

// A range of stripes of W_hat.
struct Stripes {
  std::size_t begin = 0, end = 0;
  std::size_t count() const { return end - begin; }
};

// The pieces of W_hat that threads take: whole blocks of stripes, then half blocks at the end, so
// that threads finish at nearly the same time.
class Pieces {
 public:
  Pieces(std::size_t stripes, std::size_t block, std::size_t threads)
      : stripes_(stripes),
        block_(block),
        half_(ceil_div(block, std::size_t(2))),
        whole_(threads == 1 ? stripes / block
                            : stripes / block - std::min(stripes / block, kHalved * threads)) {}
  std::size_t count() const { return whole_ + ceil_div(stripes_ - whole_ * block_, half_); }
  Stripes at(std::size_t i) const {
    const std::size_t begin =
        std::min(stripes_, i < whole_ ? i * block_ : whole_ * block_ + (i - whole_) * half_);
    return {begin, std::min(stripes_, begin + (i < whole_ ? block_ : half_))};
  }

 private:
  static constexpr std::size_t kHalved = 2;  // blocks per thread
  std::size_t stripes_, block_, half_, whole_;
};

// Rows of a block of W_hat: more if panels do not stay in the cache, as long as each thread has
// four blocks.
std::size_t rows_of_block(const LinearKernels& kernels, std::size_t rows, std::size_t threads,
                          bool is_far) {
  constexpr std::size_t kBlocks = 4;
  std::size_t of_block = kernels.block_rows;
  if (!is_far) return of_block;
  while (2 * of_block <= kernels.far_block_rows && 2 * of_block * kBlocks * threads <= rows) {
    of_block *= 2;
  }
  return of_block;
}

[[maybe_unused]] bool is_natural(const Order& order) {
  for (std::size_t p = 0; p < kTileK; p++) {
    if (order[p] != p) return false;
  }
  return true;
}

}  // namespace

void linear_gemm_panels(const PackedWeight& packed, const Weight& w, const LinearKernels& kernels,
                        const DispatchThresholds& thresholds, Activation type, const void* x,
                        std::size_t m, const void* bias, void* y, std::size_t threads) {
  const Layout& layout = packed.layout;
  const bool as_it_is = kernels.x_is_bf16 && layout.dense();
  const bool invariant = thresholds.batch_invariant;
  const std::size_t rest = invariant ? 0 : rest_of(kernels, thresholds.max_rest, m);
  m -= rest;
  const PackedRows rest_x(layout, *kernels.panel_order,
                          static_cast<const std::uint16_t*>(offset(x, m * layout.k, type)), rest);
  void* const rest_y = offset(y, m * layout.n, type);
  const std::size_t positions = layout.positions(), item = kernels.x_is_bf16 ? 2 : 4;
  const std::size_t step = invariant && kernels.invariant_panel_step != 0
                               ? kernels.invariant_panel_step
                               : kernels.panel_step;
  const Panels panels{m, kernels.panel, step};
  const bool by_kernel = as_it_is && kernels.pack_panel != nullptr;
  assert(!by_kernel || is_natural(*kernels.panel_order));
  std::vector<std::uint32_t> columns, units;
  if (!by_kernel) {
    columns = columns_of(layout, *kernels.panel_order);
    units = units_of(layout, columns, type, kernels.x_is_bf16);
  }
  const std::size_t packed_bytes = panels.lanes() * positions * item;
  const bool is_far = packed_bytes > thresholds.near_panel_bytes;
  const Buffer<std::uint8_t> packed_x(packed_bytes);
  parallel_for(panels.count(), 1, threads, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; i++) {
      std::uint8_t* out = packed_x.get() + panels.lane(i) * positions * item;
      const std::size_t first = panels.lane(i), width = panels.width(i);
      if (by_kernel) {
        kernels.pack_panel(offset(x, first * layout.k, type), layout.k, std::min(width, m - first),
                           positions, width, out);
      } else if (!units.empty()) {
        pack_units(layout, units, type, x, m, first, width, out);
      } else if (kernels.x_is_bf16) {
        pack_panel(layout, columns, type, x, m, first, width,
                   reinterpret_cast<std::uint16_t*>(out));
      } else {
        pack_panel(layout, columns, type, x, m, first, width, reinterpret_cast<float*>(out));
      }
    }
  });
  const auto packed_at = [&](std::size_t i, std::size_t tile) {
    const std::size_t position = panels.lane(i) * positions + tile * kTileK * panels.width(i);
    return packed_x.get() + position * item;
  };
  const std::size_t block_rows =
      rows_of_block(kernels, layout.stripes * kTileRows, threads, is_far);
  const std::size_t row_bytes = kernels.block_bytes + kLineBytes;
  const std::size_t stride = row_bytes / item, block_tiles = kernels.block_bytes / item / kTileK;
  const Pieces pieces(layout.stripes, block_rows / kTileRows, threads);
  // Each thread takes its next piece before it works on one, so that it knows what to prefetch.
  std::atomic<std::size_t> taken{0};
  const auto take = [&] { return pieces.at(taken.fetch_add(1, std::memory_order_relaxed)); };
  const auto write = [&](const Stripes& piece, std::size_t i, const float* products) {
    const std::size_t first = piece.begin * kTileRows, lane = panels.lane(i);
    const PanelOut out{products,
                       panels.width(i),
                       std::min(panels.width(i), m - lane),
                       std::min(layout.n - first, piece.count() * kTileRows),
                       offset(bias, first, type),
                       offset(y, lane * layout.n + first, type),
                       layout.n};
    if (kernels.write_panel != nullptr) return kernels.write_panel(out);
    for (std::size_t row = 0; row < out.lanes; row++) {
      write_row(out.products + row, out.panel, out.bias, type, out.outputs,
                offset(out.y, row * layout.n, type));
    }
  };
  const auto write_rest = [&](const Stripes& piece, const float* products) {
    const std::size_t first = piece.begin * kTileRows;
    for (std::size_t row = 0; row < rest; row++) {
      write_row(products + row * block_rows, 1, offset(bias, first, type), type,
                std::min(layout.n - first, piece.count() * kTileRows),
                offset(rest_y, row * layout.n + first, type));
    }
  };
  parallel_for(std::min(threads, pieces.count()), 1, threads, [&](std::size_t, std::size_t) {
    const Buffer<std::uint8_t> block(block_rows * row_bytes);
    const Buffer<float> sums(block_rows * panels.lanes());
    const Buffer<float> rest_sums(block_rows * rest);
    for (Stripes piece = take(), following; piece.count() != 0; piece = following) {
      following = take();
      const std::size_t rows = piece.count() * kTileRows;
      for (std::size_t tile = 0; tile < layout.tiles; tile += block_tiles) {
        const std::size_t tiles = std::min(block_tiles, layout.tiles - tile);
        const bool last = tile + tiles == layout.tiles;
        const Stripes& next = last ? following : piece;
        const std::size_t next_tile = last ? 0 : tile + tiles;
        const std::size_t next_tiles = std::min(block_tiles, layout.tiles - next_tile);
        if (tile == 0) std::fill_n(rest_sums.get(), block_rows * rest, 0.0f);
        for (std::size_t s = 0; s < piece.count(); s++) {
          Prefetcher codes;
          if (s < next.count()) {
            prefetch_tiles(
                w, next.begin + s, next_tile, next_tile + next_tiles,
                !kernels.panel_prefetches_codes && kernels.dequantise_prefetching == nullptr);
            const std::size_t bytes = tile_bytes(w.bits);
            codes.from = w.codes + ((next.begin + s) * w.tiles + next_tile) * bytes;
            codes.bytes = ceil_div(next_tiles * bytes, tiles);
          }
          std::uint8_t* const stripe = block.get() + s * kTileRows * row_bytes;
          if (kernels.dequantise_prefetching != nullptr) {
            kernels.dequantise_prefetching(w, piece.begin + s, tile, tile + tiles, stripe, stride,
                                           codes);
          } else {
            kernels.dequantise(w, piece.begin + s, tile, tile + tiles, stripe, stride);
          }
          if (rest == 0) continue;
          kernels.gemm_stripe({stripe, stride, tiles * kTileK, rest_x.get() + tile * kTileK, rest,
                               rest_x.stride(), rest_sums.get() + s * kTileRows, block_rows});
        }
        if (last) write_rest(piece, rest_sums.get());
        for (std::size_t i = 0; i < panels.count(); i++) {
          const std::size_t width = panels.width(i);
          float* const products = sums.get() + panels.lane(i) * block_rows;
          if (tile == 0) std::fill_n(products, rows * width, 0.0f);
          GemmPanelTask task{block.get(),        rows,  stride,  tiles * kTileK,
                             packed_at(i, tile), width, products};
          if (i + 1 < panels.count() && is_far) {
            task.next = packed_at(i + 1, tile);
            task.parts = piece.count();
            task.part_bytes = tiles * kTileK * panels.width(i + 1) * item / piece.count();
            task.part_stride = task.part_bytes;
          } else if (i + 1 == panels.count() && next.count() != 0 &&
                     kernels.panel_prefetches_codes) {
            const std::size_t bytes = tile_bytes(w.bits);
            task.next = w.codes + (next.begin * w.tiles + next_tile) * bytes;
            task.parts = next.count();
            task.part_bytes = next_tiles * bytes;
            task.part_stride = w.tiles * bytes;
          }
          kernels.gemm_panel(task);
          if (last) write(piece, i, products);
        }
      }
    }
  });
}

}  // namespace fdk
