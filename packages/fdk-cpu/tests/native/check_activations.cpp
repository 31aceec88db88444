// Values of x that kernels with lookup tables or integers must refuse.
#include <cmath>
#include <vector>

#include "common/linear.h"
#include "checks.h"
#include "zero_column.h"

// A row that is zero at an outlier of x has the error of bf16, as if the outlier were not there.
void check_outliers(Random& random) {
  constexpr std::size_t kColumn = 5, kOther = 70;
  enum class Kind { dense, pair, one_hot };
  for (const Kind kind : {Kind::dense, Kind::pair, Kind::one_hot}) {
    for (int bits = 1; bits <= 2; bits++) {
      for (std::size_t m = 1; m <= 2; m++) {
        const ZeroColumn w(bits, m, kColumn, random);
        const std::size_t k = w.c.k;
        Bytes x(m * k * 2), zero(w.c.n * 2);
        for (std::size_t i = 0; i < m * k; i++) {
          const float other = kind == Kind::dense ? random.normal() : i % k == kOther ? 0.75f : 0;
          put(x, i, 0, i % k == kColumn && kind != Kind::one_hot ? 1000 : other);
        }
        std::vector<double> y(m * w.c.n);
        for (std::size_t i = 0; i < y.size(); i++) {
          for (std::size_t j = 0; j < k; j++) {
            y[i] += w.value(i % w.c.n * k + j) * double(get(x, i / w.c.n * k + j, 0));
          }
        }
        for (const char* name : tested_isas()) {
          fdk::set_isa(name);
          Bytes out(y.size() * 2, 0xFF);
          fdk::linear(w.packed(), Activation::bf16, x.data(), m, zero.data(), out.data(), 1);
          // Float32 sums of 512 have an error below 2^-8 of 2^-4; those of one or two nonzeros have
          // none.
          expect_near(w.c, name, "y beside an outlier", out, y, kind == Kind::dense ? 0x1p-4 : 0);
        }
      }
    }
  }
}

// Tiles of which about half is small compared with the largest value: from half on x must not be
// rounded to units of that value; below it may be. Rows are zero where x is not small, so y depends
// on the small values alone. They are far below a unit if they must not be rounded, and some dozens
// of units (2^-6 of the largest is 15.6) if they may, so that the test sees units four times too
// large.
void check_outlier_share(Random& random) {
  constexpr std::size_t kColumn = 0, kHalf = fdk::kTileK / 2;
  constexpr float kLargest = 1000, kBelowUnit = 0.01f, kUnits = 4.3f;
  for (int bits = 1; bits <= 2; bits++) {
    // The largest product, 2^9 or more, is 2^12 units at 1 bit and 2^13 at 2 bits; a lookup of 4
    // or 2 products has an error of half a unit. Allows six standard deviations of their sum.
    const double lookups = double(fdk::kTileK) * bits / 4, unit = bits == 1 ? 0x1p-3 : 0x1p-4;
    const double most = 6 * unit * std::sqrt(lookups / 12);
    for (std::size_t small = kHalf - 8; small <= kHalf + 8; small++) {
      const float smallest = small >= kHalf ? kBelowUnit : kUnits;
      ZeroColumn w(bits, 1, kColumn, random, ZeroColumn::kRows, fdk::kTileK);
      Bytes x(w.c.k * 2), zero(w.c.n * 2);
      std::vector<double> y(w.c.n);
      for (std::size_t i = 0; i < w.c.k; i++) {
        const bool is_small = i >= w.c.k - small;
        const float sign = random.upto(1) == 0 ? 1.0f : -1.0f;
        put(x, i, 0, sign * (is_small ? smallest * float(1 + random.upto(2)) : kLargest));
        for (std::size_t n = 0; n < w.c.n; n++) {
          if (!is_small) w.codes[n * w.c.k + i] = unsigned(bits - 1);  // zero, as at kColumn
          y[n] += w.value(n * w.c.k + i) * double(get(x, i, 0));
        }
      }
      fdk::pack_codes(w.layout, pack_canonical(w.codes, w.c).data(), w.laid_out.data(), 1);
      for (const char* name : tested_isas()) {
        fdk::set_isa(name);
        Bytes out(y.size() * 2, 0xFF);
        fdk::linear(w.packed(), Activation::bf16, x.data(), 1, zero.data(), out.data(), 1);
        const double scale = small >= kHalf ? 0x1p-4 : 0x1p8 * most;
        expect_near(w.c, name, "y of a tile that is half small", out, y, scale);
      }
    }
  }
}

// The exact limit: x is rounded to units of the largest value of a tile unless half of the tile or
// more is below 2^-6 of it. Each row has one nonzero, where x is close to the limit and a quarter
// or half of a unit off, so that a result is inexact exactly if x was rounded.
void check_outlier_limit(Random& random) {
  constexpr std::size_t kHalf = fdk::kTileK / 2;
  constexpr float kLargest = 1024, kBelow = 15.9375f,
                  kAbove = 16.125f;  // bf16 values next to 2^-6 of it
  for (int bits = 1; bits <= 2; bits++) {
    for (const std::size_t small : {kHalf - 1, kHalf}) {
      for (const float value : {kBelow, kAbove}) {
        ZeroColumn w(bits, 1, 0, random, small, fdk::kTileK);
        const std::size_t first = w.c.k - small;
        Bytes x(w.c.k * 2), zero(w.c.n * 2);
        for (std::size_t i = 0; i < w.c.k; i++) put(x, i, 0, i < first ? kLargest : value);
        for (auto& code : w.codes) code = unsigned(bits - 1);
        for (std::size_t n = 0; n < w.c.n; n++) w.codes[n * w.c.k + first + n] = unsigned(bits);
        fdk::pack_codes(w.layout, pack_canonical(w.codes, w.c).data(), w.laid_out.data(), 1);
        for (const char* name : tested_isas()) {
          fdk::set_isa(name);
          Bytes out(w.c.n * 2, 0xFF);
          fdk::linear(w.packed(), Activation::bf16, x.data(), 1, zero.data(), out.data(), 1);
          const bool rounds =
              fdk::linear_kernels_for(fdk::current_isa(), Activation::bf16).two_pass != nullptr;
          const bool refused = small >= kHalf && value < kLargest * 0x1p-6f;
          for (std::size_t n = 0; n < w.c.n; n++) {
            const double exact = w.value(n * w.c.k + first + n) * double(value);
            if ((get(out, n, 0) == exact) != (refused || !rounds)) {
              fail(w.c.text() + " " + name + ": " + std::to_string(small) + " values of " +
                   std::to_string(value) + " beside " + std::to_string(kLargest) + " are " +
                   (refused ? "rounded" : "not rounded") + " to units");
            }
          }
        }
      }
    }
  }
}

namespace {

// One row of x with an unusual value, and a weight with scales of 1.
struct ExtremeCase {
  Case c;
  fdk::Layout layout;
  std::vector<float> codebook;
  std::vector<unsigned> codes;
  Bytes laid_out, scales, zeros;

  ExtremeCase(int bits, std::size_t group, bool affine, Random& random)
      : c{21,
          4 * group,
          group,
          1,
          bits,
          affine,
          ScaleType::fp32,
          affine ? ZeroType::fp32 : ZeroType::none,
          Activation::bf16},
        layout(fdk::layout_of(c.n, c.k, c.group, bits)),
        codebook(std::size_t(1) << bits),
        codes(c.n * c.k),
        laid_out(layout.code_bytes()),
        scales(layout.scales() * 4),
        zeros(affine ? layout.scales() * 4 : 0) {
    for (auto& value : codebook) value = from_bf16(to_bf16(random.normal()));
    for (auto& code : codes) code = unsigned(random.upto((1u << bits) - 1));
    fdk::pack_codes(layout, pack_canonical(codes, c).data(), laid_out.data(), 1);
    for (std::size_t i = 0; i < layout.scales(); i++) put(scales, i, 2, 1);
    for (std::size_t i = 0; i < zeros.size() / 4; i++) put(zeros, i, 2, float(1 << bits) / 2);
  }
  double value(std::size_t i) const {
    return c.affine ? codes[i] - double(1u << c.bits) / 2 : double(codebook[codes[i]]);
  }
  fdk::PackedWeight packed() const {
    return {layout,
            laid_out.data(),
            scales.data(),
            ScaleType::fp32,
            c.affine ? zeros.data() : nullptr,
            c.zero_type,
            c.affine ? nullptr : codebook.data()};
  }
};

}  // namespace

// Infinity and NaN reach y. Magnitudes near the ends of float32, and tiles of zeros or subnormals,
// give the sums of products.
void check_extreme_x(Random& random) {
  constexpr float kValues[] = {INFINITY, -INFINITY, NAN, 1e30f, 1e-30f, 1e-40f, 0};
  for (int bits = 1; bits <= fdk::kMaxBits; bits++) {
    for (const std::size_t group : {16, 24, 64, 200}) {
      const ExtremeCase w(bits, group, random.upto(1) == 0, random);
      for (const float extreme : kValues) {
        const bool finite = std::isfinite(extreme), alone = std::abs(extreme) < 1e-20f;
        Bytes x(w.c.k * 2);
        // Small values fill the first group, others are one value of it.
        for (std::size_t i = 0; i < w.c.k; i++) {
          const float other = from_bf16(to_bf16(random.normal()));
          put(x, i, 0, alone && i < group ? extreme * other : i == 3 ? extreme : other);
        }
        std::vector<double> y(w.c.n);
        double scale = 0;
        for (std::size_t n = 0; n < w.c.n; n++) {
          double magnitude = 0;
          for (std::size_t k = 0; k < w.c.k; k++) {
            const double product = w.value(n * w.c.k + k) * double(get(x, k, 0));
            y[n] += product;
            magnitude += std::abs(product);
          }
          if (finite) scale = std::max(scale, magnitude);
        }
        for (const char* name : tested_isas()) {
          fdk::set_isa(name);
          Bytes out(w.c.n * 2, 0xAA);
          fdk::linear(w.packed(), Activation::bf16, x.data(), 1, nullptr, out.data(), 1);
          if (finite) {
            expect_near(w.c, name, "y of extreme x", out, y, scale);
            continue;
          }
          for (std::size_t n = 0; n < w.c.n; n++) {
            if (std::isfinite(get(out, n, 0))) {
              fail(w.c.text() + " " + name + ": " + std::to_string(extreme) + " in x is lost");
            }
          }
        }
      }
    }
  }
}
