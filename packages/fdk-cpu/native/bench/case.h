// A case of the benchmark, and the weight that it multiplies by.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/linear_int8.h"
#include "common/linear.h"
#include "common/memory.h"
#include "options.h"

namespace bench {

using Bytes = std::vector<std::uint8_t>;

// One weight and activations, and how they are multiplied.
struct Case {
  Size size;
  int bits;
  std::size_t m, threads;
  std::string isa;
};

// A weight of random codes, scales around 1 and a codebook of normal values, in `copies` copies.
class RandomWeight {
 public:
  RandomWeight(const Options& options, const Case& c);

  // y = x @ W_hat.T with copy i, of x as it is or rounded to 8 bits.
  void multiply(const Options& options, const Case& c, std::size_t i, const Bytes& x,
                Bytes& y) const;

  std::size_t copies() const { return scales_.size(); }
  std::size_t nbytes() const { return layout_.code_bytes() + layout_.scales() * (affine_ ? 4 : 2); }

 private:
  fdk::PackedWeight at(std::size_t i) const;
  Bytes laid_out(const std::vector<std::uint16_t>& groups) const;

  fdk::Layout layout_;
  bool affine_;
  std::vector<float> codebook_;
  fdk::Int8Table levels_;
  std::size_t code_bytes_;  // from one copy's codes to the next's
  std::unique_ptr<fdk::WeightMemory> codes_;
  std::vector<Bytes> scales_, zeros_;
};

// x :: [count] of normal values.
Bytes random_x(std::size_t count, fdk::Activation type);

double value_at(const Bytes& from, std::size_t i, fdk::Activation type);

}  // namespace bench
