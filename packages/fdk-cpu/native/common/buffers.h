// Buffers of the linear products: aligned memory, offsets into x and y, and rounding of y.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>

#include "common/float_convert.h"
#include "common/kernels.h"
#include "common/linear.h"

namespace fdk {
namespace {

// Rows of x or grad_y per call of a product, which bounds the temporaries.
constexpr std::size_t kMaxRows = 1024;
// Pieces per thread of a loop: enough to balance a thread that starts late.
constexpr std::size_t kPieces = 16;

[[maybe_unused]] std::size_t chunk_for(std::size_t total, std::size_t threads) {
  return threads <= 1 ? total : std::max<std::size_t>(1, total / (threads * kPieces));
}

// Uninitialised memory, aligned to a cache line.
template <class T>
class Buffer {
 public:
  explicit Buffer(std::size_t count)
      : data_(static_cast<T*>(::operator new(count * sizeof(T) + 1, kAlignment))) {}
  T* get() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Delete {
    void operator()(T* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<T, Delete> data_;
};

// Converts from[i * stride] + bias[i].
template <class Convert>
void write_all(const float* from, std::size_t stride, const void* bias, Activation type,
               std::size_t count, Convert convert) {
  for (std::size_t i = 0; i < count; i++) {
    convert(i, bias == nullptr ? from[i * stride] : from[i * stride] + read(bias, i, type));
  }
}

[[maybe_unused]] void write_row(const float* from, std::size_t stride, const void* bias,
                                Activation type, std::size_t count, void* to) {
  const auto half = static_cast<std::uint16_t*>(to);
  switch (type) {
    case Activation::bf16:
      return write_all(from, stride, bias, type, count,
                       [=](std::size_t i, float value) { half[i] = to_bf16(value); });
    case Activation::fp16:
      return write_all(from, stride, bias, type, count,
                       [=](std::size_t i, float value) { half[i] = to_fp16(value); });
    case Activation::fp32:
      return write_all(from, stride, bias, type, count,
                       [=](std::size_t i, float value) { static_cast<float*>(to)[i] = value; });
  }
}

template <class T>
T* offset(T* p, std::size_t items, Activation type) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::uint8_t, std::uint8_t>;
  return p == nullptr ? p : static_cast<Byte*>(p) + items * bytes_of(type);
}

// The weight as kernels see it, without its table.
[[maybe_unused]] Weight weight_without_table(const PackedWeight& packed) {
  const Layout& layout = packed.layout;
  Weight w{};
  w.codes = packed.codes;
  w.scales = packed.scales;
  w.zeros = packed.zeros;
  w.scale_type = packed.scale_type;
  w.zero_type = packed.zeros == nullptr ? ZeroType::none : packed.zero_type;
  w.bits = layout.bits;
  w.stripes = layout.stripes;
  w.tiles = layout.tiles;
  w.groups_per_tile = layout.groups_per_tile;
  w.tiles_per_group = layout.tiles_per_group;
  w.stored_groups = layout.stored_groups;
  return w;
}

}  // namespace
}  // namespace fdk
