#include "linear_tables.h"

#include <algorithm>
#include <atomic>

#include "pool.h"
#include "rows.h"

namespace fdk {

bool linear_by_tables(const PackedWeight& packed, const Weight& w, const TableKernels& kernels,
                      Activation type, const void* x, const void* bias, void* y,
                      std::size_t threads) {
  const Layout& layout = packed.layout;
  const Buffer<std::uint8_t> tables(layout.tiles * kernels.tile_bytes);
  if (!kernels.build(w, x, tables.get())) return false;
  const Buffer<float> products(layout.stripes * kTileRows);
  // Each thread takes its next piece before it works on one, so that it knows what to fetch ahead.
  // Pieces are small, for one core may be slower than the other (two threads, cold, median us of
  // runs in turns: 4096 x 4096, 1 bit 151 -> 124, 2 bits 262 -> 223; 8192 x 8192, 731 -> 493 and
  // 1314 -> 1098, where a piece was a quarter of the weight).
  std::atomic<std::size_t> first{0};
  const auto take = [&] { return first.fetch_add(kernels.stripes, std::memory_order_relaxed); };
  const auto work = [&](std::size_t, std::size_t) {
    bool fetched = false;
    for (std::size_t begin = take(); begin < layout.stripes;) {
      const std::size_t end = std::min(layout.stripes, begin + kernels.stripes), next = take();
      kernels.gemv({&w, tables.get(), products.get(), begin, end, next, fetched});
      const std::size_t row = begin * kTileRows, stop = std::min(layout.n, end * kTileRows);
      write_row(products.get() + row, 1, offset(bias, row, type), type, stop - row,
                offset(y, row, type));
      begin = next;
      fetched = true;
    }
  };
  const std::size_t pieces = ceil_div(layout.stripes, kernels.stripes);
  parallel_for(std::min(threads, pieces), 1, threads, work);
  return true;
}

}  // namespace fdk
