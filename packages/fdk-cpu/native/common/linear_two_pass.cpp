// One row of x by what is made of it first: tables over it, or integers.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "common/kernels.h"
#include "common/linear_internal.h"
#include "common/thread_pool.h"
#include "common/buffers.h"

namespace fdk {
namespace {

// Pieces that a thread gets at least, where the weight is large enough: it holds two at once.
constexpr std::size_t kPiecesOfThread = 4;
// Of stripes: what a register of codes takes at most (1 bit on AVX2).
constexpr std::size_t kPieceStep = 8;

// Stripes of a piece: few enough that all threads work, at most what the kernels take.
std::size_t piece_for(std::size_t stripes, std::size_t threads, std::size_t most) {
  const std::size_t share =
      ceil_div(stripes, kPiecesOfThread * std::clamp<std::size_t>(threads, 1, stripes));
  return std::min(most, ceil_div(share, kPieceStep) * kPieceStep);
}

// linear_by_tables with these kernels, which take the weight. False where they refuse x, or where a
// product is not finite: their sums may overflow where those of gemv do not.
//
// Each thread builds tables of its own, for those of another are read from its L2, and it would
// wait while one builds them: they take 11 us of a cold call of 270 (k = 4096, 2 bits, two threads,
// in a noisy hour), 3 when all is near.
bool product(const PackedWeight& packed, const Weight& w, const TableKernels& kernels,
             Activation type, const void* x, const void* bias, void* y, std::size_t threads) {
  const Layout& layout = packed.layout;
  const std::size_t piece = piece_for(layout.stripes, threads, kernels.stripes);
  const Buffer<float> products(layout.stripes * kTileRows);
  // Each thread takes its next piece before it works on one, so that it knows what to fetch ahead.
  // Pieces are small, for one core may be slower than the other (two threads, cold, median us of
  // runs in turns: 4096 x 4096, 1 bit 151 -> 124, 2 bits 262 -> 223; 8192 x 8192, 731 -> 493 and
  // 1314 -> 1098, where a piece was a quarter of the weight).
  std::atomic<std::size_t> first{0};
  std::atomic<bool> refused{false};
  const auto take = [&] { return first.fetch_add(piece, std::memory_order_relaxed); };
  const auto work = [&](std::size_t, std::size_t) {
    std::size_t begin = take();
    if (begin >= layout.stripes) return;
    const Buffer<std::uint8_t> tables(w.tiles * kernels.tile_bytes);
    const std::size_t stop = std::min(layout.stripes, begin + piece);
    // Alike on every thread.
    if (!kernels.build(w, x, tables.get(), begin, stop)) {
      refused.store(true, std::memory_order_relaxed);
      return;
    }
    for (bool fetched = false; begin < layout.stripes; fetched = true) {
      const std::size_t end = std::min(layout.stripes, begin + piece), next = take();
      kernels.gemv({&w, tables.get(), products.get(), begin, end, next, fetched});
      const std::size_t row = begin * kTileRows, stop = std::min(layout.n, end * kTileRows);
      const float* sums = products.get();
      if (!std::all_of(sums + row, sums + stop, [](float sum) { return std::isfinite(sum); })) {
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

bool linear_by_tables(const PackedWeight& packed, const Weight& w, const TableKernels* kernels,
                      Activation type, const void* x, const void* bias, void* y,
                      std::size_t threads) {
  for (; kernels != nullptr; kernels = kernels->next) {
    if (kernels->takes(w) && product(packed, w, *kernels, type, x, bias, y, threads)) return true;
  }
  return false;
}

}  // namespace fdk
