// Few rows of x: each decodes the weight anew, or meets tables over it.
#include <algorithm>
#include <cassert>
#include <cstring>
#include <vector>

#include "common/float_convert.h"
#include "common/kernels.h"
#include "common/linear_internal.h"
#include "common/thread_pool.h"
#include "common/buffers.h"
#include "common/pack_activations.h"

namespace fdk {
namespace {

// Stripes that the passes of gemv over many rows of x share: 64 KiB at 4 bits and k = 4096.
constexpr std::size_t kPassStripes = 8;
// x :: [m, k] to [m][positions].
template <class T>
void stage_rows(const Layout& layout, const std::vector<std::uint32_t>& columns, Activation type,
                const void* x, std::size_t m, T* out) {
  for (std::size_t row = 0; row < m; row++) {
    for (std::size_t p = 0; p < columns.size(); p++) {
      const std::size_t column = columns[p];
      *out++ = column < layout.k ? element<T>(x, row * layout.k + column, type) : T(0);
    }
  }
}

// x :: [m, k], of a weight without padding, to [m][k] in the kernel's order.
void stage_dense(const Order& order, Activation type, const void* x, std::size_t count,
                 float* out) {
  const auto stage = [&](auto value) {
    for (std::size_t tile = 0; tile < count; tile += kTileK) {
      for (std::size_t p = 0; p < kTileK; p++) out[tile + p] = value(tile + order[p]);
    }
  };
  const auto half = static_cast<const std::uint16_t*>(x);
  switch (type) {  // once, not for each value
    case Activation::bf16:
      return stage([=](std::size_t i) { return from_bf16(half[i]); });
    case Activation::fp16:
      return stage([=](std::size_t i) { return from_fp16(half[i]); });
    case Activation::fp32:
      return stage([=](std::size_t i) { return static_cast<const float*>(x)[i]; });
  }
}

// x is read again for every four rows of the weight, and a register that lies across two lines is
// two reads (3 bits, 256 x 4096, warm: 27.4 us, and 25.5 with the copy).
constexpr std::size_t kLineBytes = 64;

// Positions of a step of the bf16 kernels, and its sums of pairs.
constexpr std::size_t kStep = 32, kPairs = kStep / 2;

// GemvTask::x_sums of x :: [count], for runs of `run` steps.
void sum_pairs(const std::uint16_t* x, std::size_t count, std::size_t run, float* out) {
  for (std::size_t step = 0; step < count / kStep; step++) {
    float* sums = out + step / run * run * kPairs;
    for (std::size_t i = 0; i < kPairs; i++) {
      const float sum = from_bf16(x[step * kStep + 2 * i]) + from_bf16(x[step * kStep + 2 * i + 1]);
      sums[i] = step % run == 0 ? sum : sums[i] + sum;
    }
  }
}

}  // namespace

void linear_gemv(const PackedWeight& packed, const Weight& w, const Kernels& kernels,
                 Activation type, const void* x, std::size_t m, const void* bias, void* y,
                 std::size_t threads) {
  const Layout& layout = packed.layout;
  const std::size_t positions = layout.positions(), item = kernels.x_is_bf16 ? 2 : 4;
  const bool aligned = reinterpret_cast<std::uintptr_t>(x) % kLineBytes == 0;
  const bool as_it_is = kernels.x_is_bf16 && layout.dense() && aligned;
  const Buffer<std::uint8_t> staged(as_it_is ? 0 : m * positions * item);
  if (layout.dense() && kernels.x_is_bf16 && !as_it_is) {
    std::memcpy(staged.get(), x, m * positions * item);
  } else if (layout.dense() && !as_it_is) {
    stage_dense(*kernels.gemv_order, type, x, m * positions,
                reinterpret_cast<float*>(staged.get()));
  } else if (!as_it_is) {
    const std::vector<std::uint32_t> columns = columns_of(layout, *kernels.gemv_order);
    if (kernels.x_is_bf16) {
      stage_rows(layout, columns, type, x, m, reinterpret_cast<std::uint16_t*>(staged.get()));
    } else {
      stage_rows(layout, columns, type, x, m, reinterpret_cast<float*>(staged.get()));
    }
  }
  const std::uint8_t* from = as_it_is ? static_cast<const std::uint8_t*>(x) : staged.get();
  // Tables are built anew for each row of x: of several, gemv decodes the weight once.
  if (m == 1 && linear_by_tables(packed, w, kernels.tables, type, from, bias, y, threads)) return;
  const bool needs_sums = kernels.x_is_bf16 && w.zeros != nullptr;
  const Buffer<float> sums(needs_sums ? m * positions / 2 : 0);
  if (needs_sums) {
    const std::size_t steps = kTileK / kStep / w.groups_per_tile;
    sum_pairs(reinterpret_cast<const std::uint16_t*>(from), m * positions,
              m == 1 && steps > 1 ? steps : 1, sums.get());
  }
  const std::size_t y_stride = layout.stripes * kTileRows;
  const Buffer<float> products(m * y_stride);
  const std::size_t chunk = chunk_for(layout.stripes, threads);
  parallel_for(layout.stripes, chunk, threads, [&](std::size_t begin, std::size_t end) {
    // Few stripes at a time, whose codes the second pass over them finds in the cache.
    const std::size_t passes = ceil_div(m, kernels.gemv_rows);
    const std::size_t stripes = passes == 1 ? end - begin : kPassStripes;
    for (std::size_t stripe = begin; stripe < end; stripe += stripes) {
      for (std::size_t pass = 0; pass < passes; pass++) {
        const std::size_t row = pass * m / passes, rows = (pass + 1) * m / passes - row;
        // A kernel that meets one row reads sums of whole runs: those of more rows are of steps.
        assert(!needs_sums || (rows == 1) == (m == 1));
        const GemvTask task{&w,
                            from + row * positions * item,
                            needs_sums ? sums.get() + row * positions / 2 : nullptr,
                            rows,
                            products.get() + row * y_stride,
                            y_stride};
        kernels.gemv(task, stripe, std::min(end, stripe + stripes));
      }
    }
    const std::size_t stop = std::min(layout.n, end * kTileRows);
    for (std::size_t row = 0; row < m; row++) {
      const std::size_t first = begin * kTileRows;
      write_row(products.get() + row * y_stride + first, 1, offset(bias, first, type), type,
                stop - first, offset(y, row * layout.n + first, type));
    }
  });
}

}  // namespace fdk
