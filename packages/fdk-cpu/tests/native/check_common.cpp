// The thread pool, dense products, sizes and conversions.
#include <atomic>
#include <cmath>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/dense.h"
#include "common/float_convert.h"
#include "common/linear.h"
#include "common/thread_pool.h"
#include "checks.h"
#include "zero_column.h"

static_assert(fdk::usable_threads(0) == 1, "none counts as one");

// Any number of threads gives the same result; too many count as 256. The weight has more than two
// pieces of a two-pass GEMV and more than a block of dgrad in both directions. Large m is tested
// with one width, which saves half of the time under emulation.
void check_thread_counts(Random& random) {
  constexpr std::size_t kRows = 300, kDepth = 1152;
  for (const std::size_t m : {1, 3, 20}) {
    for (int bits = m < 20 ? 1 : 2; bits <= 2; bits++) {
      const ZeroColumn w(bits, m, 0, random, kRows, kDepth);
      Bytes x(m * w.c.k * 2), grad(m * w.c.n * 2);
      for (std::size_t i = 0; i < m * w.c.k; i++) put(x, i, 0, random.normal());
      for (std::size_t i = 0; i < m * w.c.n; i++) put(grad, i, 0, random.normal());
      for (const char* name : tested_isas()) {
        fdk::set_isa(name);
        Bytes wanted_y(grad.size(), 0xAA), wanted_dx(x.size(), 0xAA);
        fdk::linear(w.packed(), Activation::bf16, x.data(), m, nullptr, wanted_y.data(), 1);
        fdk::linear_grad_x(w.packed(), Activation::bf16, grad.data(), m, wanted_dx.data(), 1);
        for (const std::size_t threads : {std::size_t(3), std::size_t(1) << 63}) {
          Bytes y(grad.size(), 0xFF), dx(x.size(), 0xFF);
          fdk::linear(w.packed(), Activation::bf16, x.data(), m, nullptr, y.data(), threads);
          fdk::linear_grad_x(w.packed(), Activation::bf16, grad.data(), m, dx.data(), threads);
          if (y != wanted_y || dx != wanted_dx) {
            fail(w.c.text() + " " + name + ": " + std::to_string(threads) +
                 " threads change the result");
          }
        }
      }
    }
  }
}

// An exception of a piece reaches the caller, on one thread and on many, and the pool works
// afterwards.
void check_pool_errors() {
  constexpr std::size_t kTotal = 64;
  for (const std::size_t threads : {1, 4}) {
    for (std::size_t bad = 0; bad < kTotal; bad += 9) {
      bool thrown = false;
      try {
        fdk::parallel_for(kTotal, 1, threads, [&](std::size_t begin, std::size_t end) {
          if (begin <= bad && bad < end) throw std::bad_alloc();
        });
      } catch (const std::bad_alloc&) {
        thrown = true;
      }
      if (!thrown) fail("the pool keeps what a piece throws");
      std::atomic<std::size_t> sum{0}, pieces{0};
      fdk::parallel_for(kTotal, 1, threads, [&](std::size_t begin, std::size_t end) {
        pieces++;
        for (std::size_t i = begin; i < end; i++) sum += i;
      });
      if (sum != kTotal * (kTotal - 1) / 2) fail("the pool loses pieces after an error");
      if (threads > 1 && pieces != kTotal) fail("the pool is left out after an error");
    }
  }
}

// k and m fill no vector, pair or panel. The last row of x begins with NaN, which would spread if a
// kernel read beyond a panel or a row.
void check_dense_gemm(Random& random) {
  for (const Activation type : {Activation::bf16, Activation::fp32}) {
    const Case c{50, 513, 513, 33, 16, false, ScaleType::bf16, ZeroType::none, type};
    const std::size_t item = fdk::bytes_of(type);
    Bytes x(c.m * c.k * item), w(c.n * c.k * item);
    for (std::size_t i = 0; i < c.m * c.k; i++) put(x, i, int(type), random.normal());
    for (std::size_t i = 0; i < c.n * c.k; i++) put(w, i, int(type), random.normal());
    for (std::size_t i = 0; i < 64; i++) put(x, (c.m - 1) * c.k + i, int(type), NAN);
    std::vector<double> y((c.m - 1) * c.n);
    double scale = 0;
    for (std::size_t i = 0; i < y.size(); i++) {
      double magnitude = 0;
      for (std::size_t k = 0; k < c.k; k++) {
        const double left = get(x, i / c.n * c.k + k, int(type));
        const double product = left * get(w, i % c.n * c.k + k, int(type));
        y[i] += product;
        magnitude += std::abs(product);
      }
      scale = std::max(scale, magnitude);
    }
    for (const char* name : tested_isas()) {
      fdk::set_isa(name);
      Bytes out(c.m * c.n * item, 0);
      fdk::dense_gemm(type, x.data(), c.m, w.data(), c.n, c.k, out.data(), 2);
      expect_near(c, name, "dense y", out, y, scale / 4);
      for (std::size_t i = y.size(); i < c.m * c.n; i++) {
        if (!std::isnan(get(out, i, int(type)))) fail(c.text() + " " + name + ": NaN is lost");
      }
      const std::vector<double> last(y.end() - std::ptrdiff_t(c.n), y.end());
      Bytes row(c.n * item, 0xFF);
      fdk::dense_gemv(type, x.data() + (c.m - 2) * c.k * item, w.data(), c.n, c.k, row.data(), 2);
      expect_near(c, name, "dense y of one row", row, last, scale / 4);
    }
  }
}

void check_sizes_are_refused() {
  const std::size_t bad[][3] = {
      {0, 16, 16}, {4, 0, 16}, {4, 24, 16}, {4, 16, 0}, {1ull << 40, 16, 16}};
  for (const auto& sizes : bad) {
    bool refused = false;
    try {
      fdk::layout_of(sizes[0], sizes[1], sizes[2], 4);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    if (!refused) fail("layout_of takes sizes that no weight has");
  }
}

void check_conversions() {
  for (unsigned i = 0; i < 1u << 16; i++) {
    const std::uint16_t half = std::uint16_t(i);
    const float b = from_bf16(half), f = from_fp16(half);
    if (!std::isnan(b) && to_bf16(b) != half) fail("bf16 " + std::to_string(i));
    if (!std::isnan(f) && to_fp16(f) != half) fail("fp16 " + std::to_string(i));
    if (std::isnan(f) != std::isnan(from_fp16(to_fp16(f)))) fail("fp16 NaN");
  }
  // Ties to even, overflow, and a value below half of the least subnormal.
  if (to_fp16(2049.0f) != to_fp16(2048.0f) || to_fp16(2051.0f) != to_fp16(2052.0f)) fail("ties");
  if (to_fp16(65520.0f) != 0x7C00 || to_fp16(65519.0f) != 0x7BFF || to_fp16(0x1p-26f) != 0) {
    fail("thresholds of fp16");
  }
  if (to_bf16(257.0f) != to_bf16(256.0f) || to_bf16(259.0f) != to_bf16(260.0f)) fail("bf16 ties");
}
