#include "common/shared_gemv.h"

#include <algorithm>
#include <cmath>

#include "common/buffers.h"
#include "common/dispatch.h"
#include "common/linear_internal.h"
#include "common/pack_activations.h"
#include "common/quantised_x.h"

namespace fdk {
namespace {

// Memory that grows and is not initialised, aligned to a cache line.
class Growing {
 public:
  template <class T>
  T* of(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
    if (!buffer_ || bytes > size_) {
      buffer_.emplace(bytes);
      size_ = bytes;
    }
    return reinterpret_cast<T*>(buffer_->get());
  }

 private:
  std::optional<Buffer<std::uint8_t>> buffer_;
  std::size_t size_ = 0;
};

std::shared_ptr<const ColumnOrder> order_of(const Layout& layout, const Order* order,
                                            ColumnOrders& orders) {
  for (const auto& known : orders) {
    if (known->k == layout.k && known->group == layout.group && known->order == order) return known;
  }
  orders.push_back(std::make_shared<const ColumnOrder>(
      ColumnOrder{layout.k, layout.group, order, columns_of(layout, *order)}));
  return orders.back();
}

}  // namespace

struct SharedGemv::Scratch::Memory {
  Growing packed, prepared, sums, products;
  const ColumnOrder* order = nullptr;  // of `packed`
  const void* x = nullptr;             // `packed`, or x where it needs no packing
  const TwoPassGemv* two_pass = nullptr;
  std::optional<QuantisedX> quantised;
  const float* x_sums = nullptr;
};

SharedGemv::Scratch::Scratch() : memory_(std::make_unique<Memory>()) {}
SharedGemv::Scratch::~Scratch() = default;
SharedGemv::Scratch::Scratch(Scratch&&) noexcept = default;

SharedGemv::SharedGemv(const PackedWeight& packed, Activation type, bool int8,
                       const Int8Table* table, ColumnOrders& orders)
    : packed_(packed),
      type_(type),
      w_(int8 ? weight_without_table(packed) : weight_of(packed, type)),
      kernels_(&linear_kernels_for(current_isa(), type)),
      order_(order_of(packed.layout, kernels_->gemv_order, orders)),
      int8_(int8) {
  if (table != nullptr) table_ = *table;
}

void SharedGemv::prepare(const void* x, const float* wide, std::size_t m, bool again,
                         Scratch& scratch) const {
  Scratch::Memory& memory = *scratch.memory_;
  const Layout& layout = packed_.layout;
  if (int8_) {
    const Int8Kernels& kernels = int8_kernels_for(current_isa(), layout, m);
    memory.quantised.emplace(layout, kernels, m);
    const float step = table_ ? table_->step : 1;
    for (std::size_t row = 0; row < m; row++) {
      memory.quantised->quantise_row(layout, kernels, offset(x, row * layout.k, type_), type_, step,
                                     row);
    }
    return;
  }
  const std::size_t positions = layout.positions();
  const std::uint32_t* columns = order_->columns.data();
  if (again && memory.order == order_.get()) {
    // packed for the weight before
  } else if (!kernels_->x_is_bf16) {
    float* to = memory.packed.of<float>(m * positions);
    memory.x = to;
    for (std::size_t row = 0; row < m; row++, wide += layout.k + 1) {
      for (std::size_t p = 0; p < positions; p++) *to++ = wide[columns[p]];
    }
  } else if (layout.dense()) {
    memory.x = x;  // aligned by the step
  } else {
    auto* to = memory.packed.of<std::uint16_t>(m * positions);
    memory.x = to;
    const auto* from = static_cast<const std::uint16_t*>(x);
    for (std::size_t row = 0; row < m; row++, from += layout.k) {
      for (std::size_t p = 0; p < positions; p++) {
        *to++ = columns[p] < layout.k ? from[columns[p]] : std::uint16_t(0);
      }
    }
  }
  memory.order = order_.get();
  memory.two_pass = nullptr;
  for (const TwoPassGemv* pass = kernels_->two_pass; m == 1 && pass != nullptr;
       pass = pass->fallback) {
    if (!pass->supports(w_)) continue;
    auto* prepared = memory.prepared.of<std::uint8_t>(w_.tiles * pass->tile_bytes);
    if (!pass->prepare(w_, memory.x, prepared, w_.stripes, w_.stripes)) continue;
    memory.two_pass = pass;
    return;
  }
  memory.x_sums = nullptr;
  if (!kernels_->x_is_bf16 || w_.zeros == nullptr) return;
  float* sums = memory.sums.of<float>(m * positions / 2);
  sum_x_pairs(w_, static_cast<const std::uint16_t*>(memory.x), m, sums);
  memory.x_sums = sums;
}

void SharedGemv::multiply(const void* x, std::size_t m, std::size_t begin, std::size_t end,
                          std::size_t count, const void* bias, void* y, std::size_t y_stride,
                          Scratch& scratch) const {
  Scratch::Memory& memory = *scratch.memory_;
  if (int8_) {
    multiply_int8(m, begin, end, memory);
  } else {
    multiply_float(m, begin, end, memory);
  }
  const std::size_t first = begin * kTileRows;
  for (std::size_t row = 0; row < m; row++) {
    const float* products =
        memory.products.of<float>(0) + row * packed_.layout.stripes * kTileRows + first;
    void* const to = offset(y, row * y_stride, type_);
    write_row(products, 1, bias, type_, count, to);
    if (!is_finite(products, count)) repair(x, row, first, products, count, bias, to);
  }
}

void SharedGemv::multiply_float(std::size_t m, std::size_t begin, std::size_t end,
                                Scratch::Memory& memory) const {
  const std::size_t y_stride = packed_.layout.stripes * kTileRows;
  float* products = memory.products.of<float>(m * y_stride);
  if (memory.two_pass != nullptr) {
    const std::size_t most = memory.two_pass->stripes;
    bool prefetched = false;
    for (std::size_t at = begin; at < end; at += most, prefetched = true) {
      const std::size_t stop = std::min(end, at + most);
      memory.two_pass->gemv(
          {&w_, memory.prepared.of<std::uint8_t>(0), products, at, stop, stop, prefetched});
    }
    return;
  }
  const std::size_t positions = packed_.layout.positions(), item = kernels_->x_is_bf16 ? 2 : 4;
  const std::size_t passes = ceil_div(m, kernels_->gemv_rows);
  for (std::size_t pass = 0; pass < passes; pass++) {
    const std::size_t row = pass * m / passes, rows = (pass + 1) * m / passes - row;
    const auto* from = static_cast<const std::uint8_t*>(memory.x) + row * positions * item;
    const float* sums = memory.x_sums == nullptr ? nullptr : memory.x_sums + row * positions / 2;
    kernels_->gemv(GemvTask{&w_, from, sums, rows, products + row * y_stride, y_stride}, begin,
                   end);
  }
}

void SharedGemv::multiply_int8(std::size_t m, std::size_t begin, std::size_t end,
                               Scratch::Memory& memory) const {
  const Layout& layout = packed_.layout;
  const std::size_t y_stride = layout.stripes * kTileRows;
  float* products = memory.products.of<float>(m * y_stride) + begin * kTileRows;
  const Int8Kernels& kernels = int8_kernels_for(current_isa(), layout, m);
  const Levels levels(layout, table_ ? &*table_ : nullptr, kernels.unsigned_levels);
  const QuantisedX& x = *memory.quantised;
  for (std::size_t row = 0; row < m; row += kernels.rows) {
    const std::size_t first = row * layout.tiles;
    kernels.gemv(
        Int8Task{&w_, levels.bytes, levels.centre, x.codes.get() + row * layout.positions(),
                 x.scales.get() + first, x.sums.get() + first * layout.groups_per_tile,
                 std::min(kernels.rows, m - row), products + row * y_stride, y_stride},
        begin, end);
  }
}

// Computes the outputs whose products are not finite again by the product that checks for it: sums
// of codebook values times x may overflow where no weight and no output does.
void SharedGemv::repair(const void* x, std::size_t row, std::size_t begin, const float* products,
                        std::size_t count, const void* bias, void* y) const {
  const void* const of_row = offset(x, row * k(), type_);
  const Buffer<std::uint8_t> again(n() * bytes_of(type_));
  if (int8_) {
    linear_int8(packed_, table_ ? &*table_ : nullptr, type_, of_row, 1, nullptr, again.get(), 1);
  } else {
    linear(packed_, type_, of_row, 1, nullptr, again.get(), 1);
  }
  for (std::size_t i = 0; i < count; i++) {
    if (std::isfinite(products[i])) continue;
    const float sum = read(again.get(), begin + i, type_);
    write_row(&sum, 1, offset(bias, i, type_), type_, 1, offset(y, i, type_));
  }
}

}  // namespace fdk
