#include "measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "common/dispatch.h"
#include "common/kernels.h"
#include "common/memory.h"

namespace bench {
namespace {

using Clock = std::chrono::steady_clock;

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
  constexpr std::size_t kCalls = 8;  // of the kernel per read
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
