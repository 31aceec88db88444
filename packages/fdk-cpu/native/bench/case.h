// A case of the benchmark and its random weight.
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

// The sizes of a product and how it is run.
struct Case {
  Size size;
  int bits;
  std::size_t m, threads;
  std::string isa;
};

// Copies of a weight with random codes, scales near 1 and a codebook of normal values.
class RandomWeight {
 public:
  RandomWeight(const Options& options, const Case& c);

  // Computes y = x @ W_hat.T with copy i, with x as given or rounded to 8 bits.
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
  std::size_t code_bytes_;  // distance between the codes of two copies
  std::unique_ptr<fdk::WeightMemory> codes_;
  std::vector<Bytes> scales_, zeros_;
};

// x :: [count], normal values.
Bytes random_x(std::size_t count, fdk::Activation type);

double value_at(const Bytes& from, std::size_t i, fdk::Activation type);

}  // namespace bench
