// One row of x by what is made of it first: tables over it, or integers.
#include <algorithm>
#include <atomic>
#include <utility>

#include "kernels.h"
#include "linear_parts.h"
#include "pool.h"
#include "rows.h"

namespace fdk {
namespace {

// One row of x as TableKernels have it, and those; none where x or the weight needs gemv.
struct Tables {
  const TableKernels* kernels;
  Buffer<std::uint8_t> built;
};

// The first of a set's that take the weight, and x :: [positions] as gemv has it.
Tables tables_for(const TableKernels* kernels, const Weight& w, const void* x) {
  for (; kernels != nullptr; kernels = kernels->next) {
    if (!kernels->takes(w)) continue;
    Buffer<std::uint8_t> built(w.tiles * kernels->tile_bytes);
    if (kernels->build(w, x, built.get())) return {kernels, std::move(built)};
  }
  return {nullptr, Buffer<std::uint8_t>(0)};
}

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

}  // namespace

bool linear_by_tables(const PackedWeight& packed, const Weight& w, const TableKernels* kernels,
                      Activation type, const void* x, const void* bias, void* y,
                      std::size_t threads) {
  const Tables tables = tables_for(kernels, w, x);
  if (tables.kernels == nullptr) return false;
  const Layout& layout = packed.layout;
  const std::size_t piece = piece_for(layout.stripes, threads, tables.kernels->stripes);
  const Buffer<float> products(layout.stripes * kTileRows);
  // Each thread takes its next piece before it works on one, so that it knows what to fetch ahead.
  // Pieces are small, for one core may be slower than the other (two threads, cold, median us of
  // runs in turns: 4096 x 4096, 1 bit 151 -> 124, 2 bits 262 -> 223; 8192 x 8192, 731 -> 493 and
  // 1314 -> 1098, where a piece was a quarter of the weight).
  std::atomic<std::size_t> first{0};
  const auto take = [&] { return first.fetch_add(piece, std::memory_order_relaxed); };
  const auto work = [&](std::size_t, std::size_t) {
    bool fetched = false;
    for (std::size_t begin = take(); begin < layout.stripes;) {
      const std::size_t end = std::min(layout.stripes, begin + piece), next = take();
      tables.kernels->gemv({&w, tables.built.get(), products.get(), begin, end, next, fetched});
      const std::size_t row = begin * kTileRows, stop = std::min(layout.n, end * kTileRows);
      write_row(products.get() + row, 1, offset(bias, row, type), type, stop - row,
                offset(y, row, type));
      begin = next;
      fetched = true;
    }
  };
  const std::size_t pieces = ceil_div(layout.stripes, piece);
  parallel_for(std::min(threads, pieces), 1, threads, work);
  return true;
}

}  // namespace fdk
