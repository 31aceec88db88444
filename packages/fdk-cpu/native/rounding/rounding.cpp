#include "rounding/rounding.h"

#include <algorithm>
#include <limits>

#include "common/dispatch.h"
#include "common/thread_pool.h"

namespace fdk {
namespace {

// Weights in a piece of a thread's work.
constexpr std::size_t kPieceWeights = std::size_t(1) << 14;
// Rows in a piece, where columns are rounded: two of the widest tiles.
constexpr std::size_t kPieceRows = 128;

const RoundingKernels& kernels() {
#if defined(__x86_64__)
  const Isa isa = current_isa();
  if (isa >= Isa::avx512) return kRoundingAvx512;
  if (isa >= Isa::avx2) return kRoundingAvx2;
#endif
  return kRoundingBaseline;
}

template <class F>
void for_pieces(const Groups& groups, std::size_t threads, F f) {
  const std::size_t piece =
      std::max<std::size_t>(1, kPieceWeights / std::max<std::size_t>(1, groups.size));
  parallel_for(groups.groups, piece, threads, f);
}

}  // namespace

RoundingTable rounding_table_of(const float* midpoints, const float* entries, std::size_t count) {
  RoundingTable table{};
  table.entries = count;
  std::copy_n(midpoints, count - 1, table.midpoint);
  std::fill(table.midpoint + count - 1, table.midpoint + kMaxRoundingEntries,
            std::numeric_limits<float>::infinity());
  std::copy_n(entries, count, table.entry);
  std::fill(table.entry + count, table.entry + kMaxRoundingEntries, entries[count - 1]);
  return table;
}

void round_groups(const RoundingTable& table, const Groups& groups, std::uint8_t* codes,
                  float* rounded, std::size_t threads) {
  for_pieces(groups, threads, [&](std::size_t begin, std::size_t end) {
    kernels().round(table, groups, begin, end, codes, rounded);
  });
}

void group_errors(const RoundingTable& table, const Groups& groups, float* errors,
                  std::size_t threads) {
  for_pieces(groups, threads, [&](std::size_t begin, std::size_t end) {
    kernels().errors(table, groups, begin, end, errors);
  });
}

void group_products(const RoundingTable& table, const Groups& groups, float* product, float* square,
                    std::size_t threads) {
  for_pieces(groups, threads, [&](std::size_t begin, std::size_t end) {
    kernels().products(table, groups, begin, end, product, square);
  });
}

void round_columns(const RoundingTable& table, const Columns& columns, std::uint8_t* codes,
                   float* residual, std::size_t threads) {
  parallel_for(columns.rows, kPieceRows, threads, [&](std::size_t begin, std::size_t end) {
    kernels().columns(table, columns, begin, end, codes, residual);
  });
}

}  // namespace fdk
