#include "common/linear_int8.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "common/thread_pool.h"
#include "common/buffers.h"
#include "common/pack_activations.h"
#include "common/quantised_x.h"

namespace fdk {
namespace {

// Codes of the stripes that all rows of x are multiplied with in turn: fits the L2 of any core.
constexpr std::size_t kBlockBytes = 192 << 10;

// Writes factor * sums + bias where y is not finite. Where bias made it so, the result is the same.
void write_missing(const float* sums, float factor, const void* bias, Activation type,
                   std::size_t count, void* y) {
  for (std::size_t i = 0; i < count; i++) {
    if (std::isfinite(element<float>(y, i, type))) continue;
    const float sum = sums[i] * factor;
    write_row(&sum, 1, offset(bias, i, type), type, 1, offset(y, i, type));
  }
}

// Sums of levels times x_scale may overflow where scales are so small that no output does. A second
// run multiplies x_scale with this power of two, and the products with its inverse: exact.
constexpr float kSmaller = 0x1p-64f;

// Computes y from x_scale times `smaller`. Returns whether all products are finite. If `smaller` is
// not 1, it writes only those outputs that are not finite.
bool linear_rows(const PackedWeight& packed, const Int8Table* table, const Int8Kernels& kernels,
                 float smaller, Activation type, const void* x, std::size_t m, const void* bias,
                 void* y, std::size_t threads) {
  const Layout& layout = packed.layout;
  const Weight w = weight_without_table(packed);
  const Levels levels(layout, table, kernels.unsigned_levels);
  QuantisedX quantised(layout, kernels, m);
  parallel_for(m, 1, threads, [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; row++) {
      quantised.quantise_row(layout, kernels, offset(x, row * layout.k, type), type,
                             levels.step * smaller, row);
    }
  });
  const std::size_t stripe_bytes = layout.tiles * tile_bytes(layout.bits);
  const std::size_t block =
      m <= kernels.rows ? layout.stripes : std::max<std::size_t>(1, kBlockBytes / stripe_bytes);
  const std::size_t chunk = chunk_for(layout.stripes, threads);
  std::atomic<bool> finite{true};
  parallel_for(layout.stripes, chunk, threads, [&](std::size_t from, std::size_t to) {
    const std::size_t stride = std::min(block, to - from) * kTileRows;
    const Buffer<float> products(m * stride);
    for (std::size_t begin = from; begin < to; begin += block) {
      const std::size_t end = std::min(to, begin + block);
      for (std::size_t row = 0; row < m; row += kernels.rows) {
        const std::size_t first = row * layout.tiles;
        kernels.gemv(
            Int8Task{&w, levels.bytes, levels.centre,
                     quantised.codes.get() + row * layout.positions(),
                     quantised.scales.get() + first,
                     quantised.sums.get() + first * layout.groups_per_tile,
                     std::min(kernels.rows, m - row), products.get() + row * stride, stride},
            begin, end);
      }
      const std::size_t column = begin * kTileRows;
      const std::size_t count = std::min(layout.n, end * kTileRows) - column;
      for (std::size_t row = 0; row < m; row++) {
        float* const sums = products.get() + row * stride;
        void* const out = offset(y, row * layout.n + column, type);
        if (smaller != 1) {
          write_missing(sums, 1 / smaller, offset(bias, column, type), type, count, out);
          continue;
        }
        if (!std::all_of(sums, sums + count, [](float sum) { return std::isfinite(sum); })) {
          finite.store(false, std::memory_order_relaxed);
        }
        write_row(sums, 1, offset(bias, column, type), type, count, out);
      }
    }
  });
  return finite.load(std::memory_order_relaxed);
}

}  // namespace

Int8Table int8_table_of(const float* codebook, int bits) {
  const int count = 1 << bits, most = bits == kMaxBits ? 255 : 254;
  Int8Table table{{}, 1, 0};
  double low = codebook[0], high = codebook[0], mean = 0;
  for (int i = 0; i < count; i++) {
    const double value = codebook[i];
    low = value < low ? value : low;
    high = value > high ? value : high;
    mean += value / count;
  }
  if (!std::isfinite(mean) || !std::isfinite(high - low)) {
    table.step = std::numeric_limits<float>::quiet_NaN();
    return table;
  }
  if (low == high) {
    table.offset = float(-low);
    return table;
  }
  double least = std::numeric_limits<double>::infinity();
  for (int steps = 128; steps <= most; steps++) {
    double levels[kMaxLevels], level_mean = 0, squares = 0, products = 0, error = 0;
    for (int i = 0; i < count; i++) {
      levels[i] = std::nearbyint((codebook[i] - low) / (high - low) * steps) - (steps + 1) / 2;
      level_mean += levels[i] / count;
    }
    for (int i = 0; i < count; i++) {
      const double level = levels[i] - level_mean;
      squares += level * level;
      products += level * (codebook[i] - mean);
    }
    const double step = products / squares;
    for (int i = 0; i < count; i++) {
      const double off = (levels[i] - level_mean) * step - (codebook[i] - mean);
      error += off * off;
    }
    if (!(error < least)) continue;
    least = error;
    for (int i = 0; i < count; i++) table.levels[i] = std::int8_t(levels[i]);
    table.step = float(step);
    table.offset = float(level_mean - mean / step);
  }
  return table;
}

const Int8Kernels& int8_kernels_for([[maybe_unused]] Isa isa, [[maybe_unused]] const Layout& layout,
                                    [[maybe_unused]] std::size_t m) {
#if defined(__x86_64__)
  if (isa >= Isa::avx512bf16) return kInt8Avx512Vnni;
  if (isa == Isa::avx2 || isa == Isa::avx512) return kInt8Avx2;
#endif
#if defined(__aarch64__)
  if (isa == Isa::neon) return kInt8Neon;
  if (isa >= Isa::neoni8mm && isa < Isa::avx2 && m > 1) return kInt8NeonI8mm;
#if defined(FDK_CPU_SVE)
  if ((isa == Isa::sve || isa == Isa::sve2) && int8_sve_supports(layout)) return kInt8Sve;
#endif
  if (isa > Isa::neon && isa < Isa::avx2) return kInt8NeonDot;
#endif
  return kInt8Scalar;
}

void linear_int8(const PackedWeight& weight, const Int8Table* table, Activation activation,
                 const void* x, std::size_t m, const void* bias, void* y, std::size_t threads,
                 bool batch_invariant) {
  const Layout& layout = weight.layout;
  threads = usable_threads(threads);
  for (std::size_t row = 0; row < m; row += kMaxRows) {
    const std::size_t rows = std::min(kMaxRows, m - row);
    const Int8Kernels& kernels =
        int8_kernels_for(current_isa(), layout, batch_invariant ? kMaxInt8Rows : rows);
    const auto run = [&](float smaller) {
      return linear_rows(weight, table, kernels, smaller, activation,
                         offset(x, row * layout.k, activation), rows, bias,
                         offset(y, row * layout.n, activation), threads);
    };
    if (!run(1)) run(kSmaller);
  }
}

}  // namespace fdk
