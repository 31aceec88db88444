// A product of a few rows of x whose stripes the members of a team (run_team) take in turn.
//
// It uses the kernels that linear() and linear_int8() use for a few rows, without their parallel
// loops: each member packs x for itself, which costs less than a barrier, and then multiplies the
// stripes that it takes. What depends on the weight alone is computed once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "common/kernels.h"
#include "common/linear.h"
#include "common/linear_int8.h"

namespace fdk {

// The order of the columns of x in a kernel, shared by weights of one shape.
struct ColumnOrder {
  std::size_t k, group;
  const Order* order;
  std::vector<std::uint32_t> columns;  // k for padding
};
using ColumnOrders = std::vector<std::shared_ptr<const ColumnOrder>>;

class SharedGemv {
 public:
  // The memory of one member. Packing for one weight and multiplying another is an error.
  class Scratch {
   public:
    Scratch();
    ~Scratch();
    Scratch(Scratch&&) noexcept;

   private:
    friend class SharedGemv;
    struct Memory;
    std::unique_ptr<Memory> memory_;
  };

  // table: of linear_int8, null for affine formats; int8: whether to round x to 8 bits.
  // orders: those of other weights; this one's is added.
  SharedGemv(const PackedWeight& packed, Activation type, bool int8, const Int8Table* table,
             ColumnOrders& orders);

  std::size_t n() const { return packed_.layout.n; }
  std::size_t k() const { return packed_.layout.k; }

  // Packs x :: [m, k]. wide :: [m][k + 1] is x as float32 with a zero after each row.
  // again: x is that of the last call with this scratch memory.
  void prepare(const void* x, const float* wide, std::size_t m, bool again, Scratch& scratch) const;
  // Computes `count` outputs of each row: those of stripes [begin, end), or fewer. y has the first
  // one at y[row * y_stride], and bias at bias[0]; it may be null.
  void multiply(const void* x, std::size_t m, std::size_t begin, std::size_t end, std::size_t count,
                const void* bias, void* y, std::size_t y_stride, Scratch& scratch) const;

 private:
  void multiply_float(std::size_t m, std::size_t begin, std::size_t end, Scratch::Memory&) const;
  void multiply_int8(std::size_t m, std::size_t begin, std::size_t end, Scratch::Memory&) const;
  void repair(const void* x, std::size_t row, std::size_t begin, const float* products,
              std::size_t count, const void* bias, void* y) const;

  PackedWeight packed_;
  Activation type_;
  Weight w_;
  const LinearKernels* kernels_;
  std::shared_ptr<const ColumnOrder> order_;
  bool int8_;
  std::optional<Int8Table> table_;
};

}  // namespace fdk
