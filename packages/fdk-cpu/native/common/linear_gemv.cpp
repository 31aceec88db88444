// Small m: every gemv_rows rows of x decode the weight again; one row may use a two-pass kernel.
#include <algorithm>
#include <atomic>
#include <cassert>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/buffers.h"
#include "common/float_convert.h"
#include "common/kernels.h"
#include "common/linear_internal.h"
#include "common/pack_activations.h"
#include "common/thread_pool.h"

namespace fdk {
namespace {

// Stripes that several passes of gemv share: 64 KiB at 4 bits and k = 4096.
constexpr std::size_t kPassStripes = 8;
// x :: [m, k] to [m][positions].
template <class T>
void pack_rows(const Layout& layout, const std::vector<std::uint32_t>& columns, Activation type,
               const void* x, std::size_t m, T* out) {
  for (std::size_t row = 0; row < m; row++) {
    for (std::size_t p = 0; p < columns.size(); p++) {
      const std::size_t column = columns[p];
      *out++ = column < layout.k ? element<T>(x, row * layout.k + column, type) : T(0);
    }
  }
}

// Converts x :: [m, k], of a weight without padding, to float32 [m][k] in the kernel's order.
void pack_dense(const Order& order, Activation type, const void* x, std::size_t count, float* out) {
  const auto convert = [&](auto value) {
    for (std::size_t tile = 0; tile < count; tile += kTileK) {
      for (std::size_t p = 0; p < kTileK; p++) out[tile + p] = value(tile + order[p]);
    }
  };
  const auto half = static_cast<const std::uint16_t*>(x);
  switch (type) {  // outside of the loop
    case Activation::bf16:
      return convert([=](std::size_t i) { return from_bf16(half[i]); });
    case Activation::fp16:
      return convert([=](std::size_t i) { return from_fp16(half[i]); });
    case Activation::fp32:
      return convert([=](std::size_t i) { return static_cast<const float*>(x)[i]; });
  }
}

// An unaligned x is copied: it is read again for every four rows of the weight, and a register that
// crosses a cache line takes two reads (3 bits, 256 x 4096, warm, Zen 4: 27.4 -> 25.5 us).
constexpr std::size_t kLineBytes = 64;

// Positions of a step of the bf16 kernels, and pairs in it.
constexpr std::size_t kStep = 32, kPairs = kStep / 2;

// Computes GemvTask::x_sums of x :: [count], for runs of `run` steps.
void sum_pairs(const std::uint16_t* x, std::size_t count, std::size_t run, float* out) {
  for (std::size_t step = 0; step < count / kStep; step++) {
    float* sums = out + step / run * run * kPairs;
    for (std::size_t i = 0; i < kPairs; i++) {
      const float sum = from_bf16(x[step * kStep + 2 * i]) + from_bf16(x[step * kStep + 2 * i + 1]);
      sums[i] = step % run == 0 ? sum : sums[i] + sum;
    }
  }
}

// Computes the outputs whose products are not finite again, from the dequantised weight. The gemv
// kernels scale sums of codebook values times x: with a large codebook and small scales such a sum
// may overflow where no weight and no output does.
//
//   products :: [m][stride], from gemv
void repair(const PackedWeight& packed, const Weight& w, const LinearKernels& kernels,
            Activation type, const void* x, std::size_t m, const void* bias, const float* products,
            std::size_t stride, void* y, std::size_t threads) {
  const std::size_t n = packed.layout.n, item = bytes_of(type);
  const Buffer<std::uint8_t> again(n * item);
  for (std::size_t row = 0; row < m; row++) {
    const float* of_row = products + row * stride;
    if (is_finite(of_row, n)) continue;
    linear_gemm_panels(packed, w, kernels, DispatchThresholds(), type,
                       offset(x, row * packed.layout.k, type), 1, bias, again.get(), threads);
    for (std::size_t i = 0; i < n; i++) {
      if (std::isfinite(of_row[i])) continue;
      std::memcpy(offset(y, row * n + i, type), again.get() + i * item, item);
    }
  }
}

}  // namespace

bool is_finite(const float* values, std::size_t count) {
  return std::all_of(values, values + count, [](float value) { return std::isfinite(value); });
}

void sum_x_pairs(const Weight& w, const std::uint16_t* x, std::size_t m, float* sums) {
  const std::size_t steps = kTileK / kStep / w.groups_per_tile;
  sum_pairs(x, m * w.tiles * kTileK, m == 1 && steps > 1 ? steps : 1, sums);
}

void linear_gemv(const PackedWeight& packed, const Weight& w, const LinearKernels& kernels,
                 Activation type, const void* x, std::size_t m, const void* bias, void* y,
                 std::size_t threads) {
  const Layout& layout = packed.layout;
  const std::size_t positions = layout.positions(), item = kernels.x_is_bf16 ? 2 : 4;
  const bool aligned = reinterpret_cast<std::uintptr_t>(x) % kLineBytes == 0;
  const bool as_it_is = kernels.x_is_bf16 && layout.dense() && aligned;
  const Buffer<std::uint8_t> packed_x(as_it_is ? 0 : m * positions * item);
  if (layout.dense() && kernels.x_is_bf16 && !as_it_is) {
    std::memcpy(packed_x.get(), x, m * positions * item);
  } else if (layout.dense() && !as_it_is) {
    pack_dense(*kernels.gemv_order, type, x, m * positions,
               reinterpret_cast<float*>(packed_x.get()));
  } else if (!as_it_is) {
    const std::vector<std::uint32_t> columns = columns_of(layout, *kernels.gemv_order);
    if (kernels.x_is_bf16) {
      pack_rows(layout, columns, type, x, m, reinterpret_cast<std::uint16_t*>(packed_x.get()));
    } else {
      pack_rows(layout, columns, type, x, m, reinterpret_cast<float*>(packed_x.get()));
    }
  }
  const std::uint8_t* from = as_it_is ? static_cast<const std::uint8_t*>(x) : packed_x.get();
  // A two-pass kernel prepares each row of x separately; for several rows gemv decodes the weight
  // once.
  if (m == 1 && linear_two_pass(packed, w, kernels.two_pass, type, from, bias, y, threads)) return;
  const bool needs_sums = kernels.x_is_bf16 && w.zeros != nullptr;
  const Buffer<float> sums(needs_sums ? m * positions / 2 : 0);
  if (needs_sums) {
    sum_x_pairs(w, reinterpret_cast<const std::uint16_t*>(from), m, sums.get());
  }
  const std::size_t y_stride = layout.stripes * kTileRows;
  const Buffer<float> products(m * y_stride);
  const std::size_t chunk = chunk_for(layout.stripes, threads);
  std::atomic<bool> overflows{false};
  parallel_for(layout.stripes, chunk, threads, [&](std::size_t begin, std::size_t end) {
    // A few stripes at a time, so that the second pass finds their codes in the cache.
    const std::size_t passes = ceil_div(m, kernels.gemv_rows);
    const std::size_t stripes = passes == 1 ? end - begin : kPassStripes;
    for (std::size_t stripe = begin; stripe < end; stripe += stripes) {
      for (std::size_t pass = 0; pass < passes; pass++) {
        const std::size_t row = pass * m / passes, rows = (pass + 1) * m / passes - row;
        // A kernel for one row reads sums of whole runs, one for more rows those of single steps.
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
      const float* of_row = products.get() + row * y_stride + first;
      if (!is_finite(of_row, stop - first)) overflows.store(true, std::memory_order_relaxed);
      write_row(of_row, 1, offset(bias, first, type), type, stop - first,
                offset(y, row * layout.n + first, type));
    }
  });
  if (!overflows.load(std::memory_order_relaxed)) return;
  repair(packed, w, kernels, type, x, m, bias, products.get(), y_stride, y, threads);
}

// One row of x in two passes: lookup tables over x, or x as integers.
namespace {

// The least pieces per thread for a large weight: a thread holds two at a time.
constexpr std::size_t kPiecesOfThread = 4;
// In stripes: the most that one register of codes covers (1 bit on AVX2).
constexpr std::size_t kPieceStep = 8;

// Stripes per piece: few enough that all threads have work, and at most what the kernel takes.
std::size_t piece_for(std::size_t stripes, std::size_t threads, std::size_t most) {
  const std::size_t share =
      ceil_div(stripes, kPiecesOfThread * std::clamp<std::size_t>(threads, 1, stripes));
  return std::min(most, ceil_div(share, kPieceStep) * kPieceStep);
}

// linear_two_pass with one kernel that supports the weight. Returns false if it refuses x, or if a
// product is not finite: its sums may overflow where those of gemv do not.
//
// Each thread prepares x for itself: to read another core's result, and to wait for it, costs more
// than the 3 us that preparing takes.
bool product(const PackedWeight& packed, const Weight& w, const TwoPassGemv& kernels,
             Activation type, const void* x, const void* bias, void* y, std::size_t threads) {
  const Layout& layout = packed.layout;
  const std::size_t piece = piece_for(layout.stripes, threads, kernels.stripes);
  const Buffer<float> products(layout.stripes * kTileRows);
  // Each thread takes its next piece before it works on one, so that it knows what to prefetch.
  // Pieces are small because one core may be slower than the other (Zen 4, two threads, 4096 x
  // 4096, 2 bits: 262 -> 223 us against a quarter of the weight each).
  std::atomic<std::size_t> first{0};
  std::atomic<bool> refused{false};
  const auto take = [&] { return first.fetch_add(piece, std::memory_order_relaxed); };
  const auto work = [&](std::size_t, std::size_t) {
    std::size_t begin = take();
    if (begin >= layout.stripes) return;
    const Buffer<std::uint8_t> prepared(w.tiles * kernels.tile_bytes);
    const std::size_t stop = std::min(layout.stripes, begin + piece);
    // The result is the same on every thread.
    if (!kernels.prepare(w, x, prepared.get(), begin, stop)) {
      refused.store(true, std::memory_order_relaxed);
      return;
    }
    for (bool prefetched = false; begin < layout.stripes; prefetched = true) {
      const std::size_t end = std::min(layout.stripes, begin + piece), next = take();
      kernels.gemv({&w, prepared.get(), products.get(), begin, end, next, prefetched});
      const std::size_t row = begin * kTileRows, stop = std::min(layout.n, end * kTileRows);
      const float* sums = products.get();
      if (!is_finite(sums + row, stop - row)) {
        refused.store(true, std::memory_order_relaxed);
        return;
      }
      write_row(sums + row, 1, offset(bias, row, type), type, stop - row, offset(y, row, type));
      begin = next;
    }
  };
  parallel_for(std::min(threads, ceil_div(layout.stripes, piece)), 1, threads, work);
  return !refused.load(std::memory_order_relaxed);
}

}  // namespace

bool linear_two_pass(const PackedWeight& packed, const Weight& w, const TwoPassGemv* kernels,
                     Activation type, const void* x, const void* bias, void* y,
                     std::size_t threads) {
  for (; kernels != nullptr; kernels = kernels->fallback) {
    if (kernels->supports(w) && product(packed, w, *kernels, type, x, bias, y, threads))
      return true;
  }
  return false;
}

}  // namespace fdk
