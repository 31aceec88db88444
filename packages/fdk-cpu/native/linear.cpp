#include "linear.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <vector>

#include "convert.h"
#include "grad_panels.h"
#include "kernels.h"
#include "linear_tables.h"
#include "pool.h"
#include "rows.h"

namespace fdk {
namespace {

// Rows of x up to which tables over each row are used, where there are any.
constexpr std::size_t kTableLimit = 1;
// Rows of the dequantised block are a line apart from a power of two, whose lines would share few
// sets of L1.
constexpr std::size_t kLineBytes = 64;
// Bytes of x that a block meets, up to which they stay in L2 beside it from one block to the next.
constexpr std::size_t kStayingBytes = 256 << 10;
// Rows of the block of backward, which is in L1.
constexpr std::size_t kGradRows = 48;
// Stripes that the passes of gemv over many rows of x share: 64 KiB at 4 bits and k = 4096.
constexpr std::size_t kPassStripes = 8;

Weight weight_of(const PackedWeight& packed, Activation activation) {
  const Layout& layout = packed.layout;
  Weight w = without_table(packed);
  for (std::size_t i = 0; i < std::size_t(1) << layout.bits; i++) {
    float value = packed.codebook == nullptr ? float(i) : packed.codebook[i];
    if (activation == Activation::bf16) value = from_bf16(to_bf16(value));
    if (activation == Activation::fp16) value = from_fp16(to_fp16(value));
    w.table[i] = value;
  }
  return w;
}

// Column of the weight at each position of a row in the kernel's order; k where it is padding.
std::vector<std::uint32_t> columns_of(const Layout& layout, const Order& order) {
  std::vector<std::uint32_t> columns(layout.positions());
  for (std::size_t p = 0; p < columns.size(); p++) {
    const std::size_t natural = p / kTileK * kTileK + order[p % kTileK];
    if (layout.dense()) {  // without the divisions, 30 us of a call at k = 4096
      columns[p] = std::uint32_t(natural);
      continue;
    }
    const std::size_t group = natural / layout.padded_group, within = natural % layout.padded_group;
    const bool padding = group >= layout.groups || within >= layout.group;
    columns[p] = std::uint32_t(padding ? layout.k : group * layout.group + within);
  }
  return columns;
}

[[maybe_unused]] bool is_natural(const Order& order) {
  for (std::size_t p = 0; p < kTileK; p++) {
    if (order[p] != p) return false;
  }
  return true;
}

// T is float, or uint16_t for bf16 x as it is.
template <class T>
T element(const void* x, std::size_t i, Activation type) {
  if constexpr (sizeof(T) == 2) {
    return static_cast<const std::uint16_t*>(x)[i];
  } else {
    return read(x, i, type);
  }
}

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

// Tables where the set has them for this weight, and m is small enough to go row by row.
const TableKernels* table_kernels_for(const Kernels& kernels, const Weight& w, std::size_t m) {
  const TableKernels* tables = kernels.tables;
  return tables != nullptr && m <= kTableLimit && tables->takes(w) ? tables : nullptr;
}

void linear_gemv(const PackedWeight& packed, const Weight& w, const Kernels& kernels,
                 Activation type, const void* x, std::size_t m, const void* bias, void* y,
                 std::size_t threads) {
  const Layout& layout = packed.layout;
  const std::size_t positions = layout.positions(), item = kernels.x_is_bf16 ? 2 : 4;
  const bool as_it_is = kernels.x_is_bf16 && layout.dense();
  const Buffer<std::uint8_t> staged(as_it_is ? 0 : m * positions * item);
  if (!as_it_is) {
    const std::vector<std::uint32_t> columns = columns_of(layout, *kernels.gemv_order);
    if (kernels.x_is_bf16) {
      stage_rows(layout, columns, type, x, m, reinterpret_cast<std::uint16_t*>(staged.get()));
    } else {
      stage_rows(layout, columns, type, x, m, reinterpret_cast<float*>(staged.get()));
    }
  }
  const std::uint8_t* from = as_it_is ? static_cast<const std::uint8_t*>(x) : staged.get();
  const TableKernels* tables = table_kernels_for(kernels, w, m);
  if (tables != nullptr && linear_by_tables(packed, w, *tables, type, from, bias, y, threads)) {
    return;
  }
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

// The panels that m rows of x are cut into: full ones, and a last one that may be narrower.
struct Panels {
  std::size_t m, wide, step;
  std::size_t count() const { return ceil_div(m, wide); }
  std::size_t width(std::size_t i) const {
    return std::min(wide, ceil_div(m - i * wide, step) * step);
  }
  // Lanes before panel i.
  std::size_t lane(std::size_t i) const { return i * wide; }
  std::size_t lanes() const { return lane(count() - 1) + width(count() - 1); }
};

// A unit of a panel: a float32, or a pair of bf16 that one product takes.
constexpr std::size_t kUnitBytes = 4;

// First column of each unit where x holds all of them as they are, k where one is padding. Empty
// where it does not: x of another type, or pairs that the order of the kernel takes apart.
std::vector<std::uint32_t> units_of(const Layout& layout, const std::vector<std::uint32_t>& columns,
                                    Activation type, bool pairs) {
  if (!pairs) return type == Activation::fp32 ? columns : std::vector<std::uint32_t>();
  std::vector<std::uint32_t> units(columns.size() / 2);
  for (std::size_t u = 0; u < units.size(); u++) {
    const std::size_t first = columns[2 * u], second = columns[2 * u + 1];
    const bool padding = first == layout.k && second == layout.k;
    if (!padding && (second != first + 1 || second == layout.k)) return {};
    units[u] = std::uint32_t(first);
  }
  return units;
}

// Positions of every lane that are staged at once, so that what is written stays in L1 until its
// lines are full.
constexpr std::size_t kStaged = 32;

// x :: [m, k] to a panel [positions / unit][width][unit]; rows past m are zero.
template <class T>
void stage_panel(const Layout& layout, const std::vector<std::uint32_t>& columns, Activation type,
                 const void* x, std::size_t m, std::size_t first, std::size_t width, T* out) {
  constexpr std::size_t kUnit = kUnitBytes / sizeof(T);
  for (std::size_t begin = 0; begin < columns.size(); begin += kStaged) {
    for (std::size_t lane = 0; lane < width; lane++) {
      const std::size_t row = first + lane;
      for (std::size_t p = begin; p < begin + kStaged; p++) {
        const std::size_t column = columns[p];
        const bool there = row < m && column < layout.k;
        out[(p / kUnit * width + lane) * kUnit + p % kUnit] =
            there ? element<T>(x, row * layout.k + column, type) : T(0);
      }
    }
  }
}

// The same unit by unit (m = 512, k = 4096, bf16: 7 ms value by value).
void stage_units(const Layout& layout, const std::vector<std::uint32_t>& units, Activation type,
                 const void* x, std::size_t m, std::size_t first, std::size_t width,
                 std::uint8_t* out) {
  const std::size_t item = bytes_of(type), step = kStaged * item / kUnitBytes;
  for (std::size_t begin = 0; begin < units.size(); begin += step) {
    for (std::size_t lane = 0; lane < width; lane++) {
      const std::size_t row = first + lane;
      const std::uint8_t* from = static_cast<const std::uint8_t*>(x) + row * layout.k * item;
      std::uint8_t* to = out + (begin * width + lane) * kUnitBytes;
      for (std::size_t u = begin; u < begin + step; u++, to += width * kUnitBytes) {
        std::uint32_t unit = 0;
        if (row < m && units[u] < layout.k) std::memcpy(&unit, from + units[u] * item, sizeof unit);
        std::memcpy(to, &unit, sizeof unit);
      }
    }
  }
}

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

// W_hat as the reference has it, rounded to the dtype of the activations: a row of two values
// (1 bit, one scale) would otherwise err the same way in every product.
void round_to(Activation type, float* values, std::size_t count) {
  if (type == Activation::bf16) {
    for (std::size_t i = 0; i < count; i++) values[i] = from_bf16(to_bf16(values[i]));
  } else if (type == Activation::fp16) {
    for (std::size_t i = 0; i < count; i++) values[i] = from_fp16(to_fp16(values[i]));
  }
}

void grad_rows(const PackedWeight& packed, const Weight& w, const Kernels& kernels, Activation type,
               const void* grad_y, std::size_t m, void* grad_x, std::size_t threads) {
  const Layout& layout = packed.layout;
  const std::vector<std::uint32_t> columns = columns_of(layout, *kernels.panel_order);
  const std::size_t stride = layout.stripes * kTileRows;
  const Buffer<float> staged(m * stride);
  for (std::size_t row = 0; row < m; row++) {
    for (std::size_t i = 0; i < stride; i++) {
      staged.get()[row * stride + i] = i < layout.n ? read(grad_y, row * layout.n + i, type) : 0;
    }
  }
  parallel_for(layout.tiles, 1, threads, [&](std::size_t begin, std::size_t end) {
    const Buffer<float> block(kGradRows * kTileK);
    const Buffer<float> sums(m * kTileK);
    for (std::size_t tile = begin; tile < end; tile++) {
      std::fill_n(sums.get(), m * kTileK, 0.0f);
      for (std::size_t first = 0; first < stride; first += kGradRows) {
        const std::size_t rows = std::min(kGradRows, stride - first);
        for (std::size_t r = 0; r < rows; r += kTileRows) {
          if (tile + 1 < end) fetch_tiles(w, (first + r) / kTileRows, tile + 1, tile + 2, true);
          kernels.decode(w, (first + r) / kTileRows, tile, tile + 1, block.get() + r * kTileK,
                         kTileK);
        }
        round_to(type, block.get(), rows * kTileK);
        kernels.grad_product(
            GradTask{block.get(), rows, staged.get() + first, m, stride, sums.get(), kTileK});
      }
      for (std::size_t row = 0; row < m; row++) {
        for (std::size_t p = 0; p < kTileK; p++) {
          const std::size_t column = columns[tile * kTileK + p];
          if (column == layout.k) continue;
          write(grad_x, row * layout.k + column, type, sums.get()[row * kTileK + p]);
        }
      }
    }
  });
}

}  // namespace

void linear(const PackedWeight& weight, Activation activation, const void* x, std::size_t m,
            const void* bias, void* y, std::size_t threads) {
  const Layout& layout = weight.layout;
  const Kernels& kernels = kernels_for(current_isa(), activation);
  const Weight w = weight_of(weight, activation);
  const std::size_t limit = kernels.gemv_limit == nullptr ? kGemvLimit : kernels.gemv_limit(w);
  threads = usable_threads(threads);
  for (std::size_t row = 0; row < m; row += kMaxRows) {
    const std::size_t rows = std::min(kMaxRows, m - row);
    const auto product = rows <= limit ? linear_gemv : linear_panels;
    product(weight, w, kernels, activation, offset(x, row * layout.k, activation), rows, bias,
            offset(y, row * layout.n, activation), threads);
  }
}

void linear_grad_x(const PackedWeight& weight, Activation activation, const void* grad_y,
                   std::size_t m, void* grad_x, std::size_t threads) {
  const Layout& layout = weight.layout;
  const Kernels& kernels = float_kernels_for(current_isa());
  const Kernels& own = kernels_for(current_isa(), activation);
  const Weight w = weight_of(weight, activation);
  threads = usable_threads(threads);
  for (std::size_t row = 0; row < m; row += kMaxRows) {
    const std::size_t rows = std::min(kMaxRows, m - row);
    if (own.grad_panels != nullptr) {
      grad_panels(weight, w, own, offset(grad_y, row * layout.n, activation), rows,
                  offset(grad_x, row * layout.k, activation), threads);
      continue;
    }
    grad_rows(weight, w, kernels, activation, offset(grad_y, row * layout.n, activation), rows,
              offset(grad_x, row * layout.k, activation), threads);
  }
}

}  // namespace fdk
