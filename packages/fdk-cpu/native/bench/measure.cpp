#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "bench.h"
#include "common/dispatch.h"
#include "common/float_convert.h"
#include "common/kernels.h"
#include "common/linear.h"
#include "common/linear_int8.h"
#include "common/memory.h"

namespace bench {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Clock = std::chrono::steady_clock;

// Copies of a weight with random codes, scales near 1 and a codebook of normal values.
class RandomWeight {
 public:
  RandomWeight(const Options& options, const Case& c)
      : layout_(fdk::layout_of(c.size.n, c.size.k, options.group, c.bits)),
        affine_(options.zero_points),
        codebook_(std::size_t(1) << c.bits) {
    std::mt19937 engine(unsigned(c.bits));
    std::normal_distribution<float> normal;
    Bytes packed(c.size.n * fdk::ceil_div(c.size.k * std::size_t(c.bits), 8));
    for (auto& byte : packed) byte = std::uint8_t(engine());
    for (auto& value : codebook_) value = normal(engine);
    std::sort(codebook_.begin(), codebook_.end());
    levels_ = fdk::int8_table_of(codebook_.data(), c.bits);
    const std::size_t groups = c.size.n * layout_.groups;
    std::vector<std::uint16_t> scales(groups), zeros(groups);
    for (auto& scale : scales) scale = to_bf16(1 + 0.1f * normal(engine));
    for (auto& zero : zeros) zero = to_bf16(float(1 << (c.bits - 1)) + normal(engine));
    Bytes codes(layout_.code_bytes());
    fdk::pack_codes(layout_, packed.data(), codes.data(), c.threads);
    const std::size_t count = 1 + options.rotate_bytes / nbytes();
    code_bytes_ = fdk::ceil_div(codes.size(), 64) * 64;
    codes_ = std::make_unique<fdk::WeightMemory>(count * code_bytes_);
    for (std::size_t i = 0; i < count; i++) {
      std::copy(codes.begin(), codes.end(), codes_->data() + i * code_bytes_);
      scales_.push_back(laid_out(scales));
      zeros_.push_back(affine_ ? laid_out(zeros) : Bytes());
    }
  }

  // Computes y = x @ W_hat.T with copy i, with x as given or rounded to 8 bits.
  void multiply(const Options& options, const Case& c, std::size_t i, const Bytes& x,
                Bytes& y) const {
    const fdk::PackedWeight w = at(i);
    if (options.int8) {
      fdk::linear_int8(w, affine_ ? nullptr : &levels_, options.activation, x.data(), c.m, nullptr,
                       y.data(), c.threads);
    } else {
      fdk::linear(w, options.activation, x.data(), c.m, nullptr, y.data(), c.threads);
    }
  }

  std::size_t copies() const { return scales_.size(); }
  std::size_t nbytes() const { return layout_.code_bytes() + layout_.scales() * (affine_ ? 4 : 2); }

 private:
  fdk::PackedWeight at(std::size_t i) const {
    return {layout_,
            codes_->data() + i * code_bytes_,
            scales_[i].data(),
            fdk::ScaleType::bf16,
            affine_ ? zeros_[i].data() : nullptr,
            fdk::ZeroType::bf16,
            affine_ ? nullptr : codebook_.data()};
  }

  Bytes laid_out(const std::vector<std::uint16_t>& groups) const {
    Bytes out(layout_.scales() * 2);
    fdk::pack_groups(layout_, reinterpret_cast<const std::uint8_t*>(groups.data()), out.data(), 2);
    return out;
  }

  fdk::Layout layout_;
  bool affine_;
  std::vector<float> codebook_;
  fdk::Int8Table levels_;
  std::size_t code_bytes_;  // distance between the codes of two copies
  std::unique_ptr<fdk::WeightMemory> codes_;
  std::vector<Bytes> scales_, zeros_;
};

// x :: [count], normal values.
Bytes random_x(std::size_t count, fdk::Activation type) {
  std::mt19937 engine(1);
  std::normal_distribution<float> normal;
  Bytes x(count * fdk::bytes_of(type));
  for (std::size_t i = 0; i < count; i++) {
    const float value = normal(engine);
    const std::uint16_t half = type == fdk::Activation::bf16 ? to_bf16(value) : to_fp16(value);
    if (type == fdk::Activation::fp32) {
      std::memcpy(&x[4 * i], &value, sizeof value);
    } else {
      std::memcpy(&x[2 * i], &half, sizeof half);
    }
  }
  return x;
}

double value_at(const Bytes& from, std::size_t i, fdk::Activation type) {
  if (type == fdk::Activation::fp32) {
    float value;
    std::memcpy(&value, &from[4 * i], sizeof value);
    return value;
  }
  std::uint16_t half;
  std::memcpy(&half, &from[2 * i], sizeof half);
  return type == fdk::Activation::bf16 ? from_bf16(half) : from_fp16(half);
}

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

template <class T>
double median(std::vector<T> values) {
  std::nth_element(values.begin(), values.begin() + long(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// The RMS of the difference over that of the reference.
double nrmse(const Bytes& got, const Bytes& wanted, std::size_t count, fdk::Activation type) {
  double error = 0, total = 0;
  for (std::size_t i = 0; i < count; i++) {
    const double reference = value_at(wanted, i, type), off = value_at(got, i, type) - reference;
    error += off * off;
    total += reference * reference;
  }
  return std::sqrt(error / total);
}

// Both outputs are rounded to the dtype; rounding alone cannot reach twice its unit.
double most_error(fdk::Activation type) {
  return type == fdk::Activation::bf16 ? 0x1p-7 : type == fdk::Activation::fp16 ? 0x1p-10 : 0x1p-18;
}

double checked(const Options& options, const Case& c, const RandomWeight& weight, const Bytes& x) {
  const fdk::Activation type = options.activation;
  const std::size_t count = c.m * c.size.n, item = fdk::bytes_of(type);
  Bytes wanted(count * item, 0xFF), got(count * item, 0xFF);
  fdk::set_isa("scalar");
  weight.multiply(options, c, 0, x, wanted);
  fdk::set_isa(c.isa.c_str());
  weight.multiply(options, c, 0, x, got);
  const double error = nrmse(got, wanted, count, type);
  if (!(error <= most_error(type))) {
    throw std::runtime_error("the answer differs from the scalar one: nrmse " +
                             std::to_string(error) + ", at most " +
                             std::to_string(most_error(type)) + "; not timed");
  }
  return error;
}

}  // namespace

// Alternates between kernels and reads of memory, so that both see the same machine.
Times measure(const Options& options, const Case& c) {
  constexpr std::size_t kCalls = 8;  // calls of the kernel per read
  const RandomWeight weight(options, c);
  const Bytes x = random_x(c.m * c.size.k, options.activation);
  Times times{checked(options, c, weight, x), 0, 0, 0, weight.nbytes(), 0};
  const fdk::WeightMemory memory(options.rotate_bytes);
  std::memset(memory.data(), 1, memory.size());
  const std::size_t quarter = memory.size() / 4;
  Bytes y(c.m * c.size.n * fdk::bytes_of(options.activation));
  std::vector<double> calls, bandwidths;
  const auto begin = Clock::now();
  for (std::size_t turn = 0; turn < 3 || since(begin) < options.seconds; turn++) {
    const auto start = Clock::now();
    const volatile std::uint64_t sum =
        fdk::read_sum(memory.data() + turn % 4 * quarter, quarter, c.threads);
    (void)sum;
    bandwidths.push_back(double(quarter) / since(start));
    for (std::size_t i = 0; i < kCalls; i++) {
      const std::size_t copy = (turn * kCalls + i) % weight.copies();
      const auto call = Clock::now();
      weight.multiply(options, c, copy, x, y);
      calls.push_back(since(call));
    }
  }
  times.min_us = *std::min_element(calls.begin(), calls.end()) * 1e6;
  times.median_us = median(calls) * 1e6;
  times.read_gb_s = median(bandwidths) / 1e9;
  times.runs = calls.size();
  return times;
}

}  // namespace bench
