// Every instruction set against plain loops, and the layout converter on random shapes and bytes.
//
// Arguments: see limit.h. Each tensor is a heap block of exactly its size, so that AddressSanitizer
// sees any access beyond it.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../native/baseline.h"
#include "../../native/convert.h"
#include "../../native/int8.h"
#include "../../native/kernels.h"
#include "../../native/linear.h"
#include "../../native/pool.h"
#include "limit.h"

namespace {

using fdk::Activation;
using fdk::ScaleType;
using fdk::ZeroType;
using Bytes = std::vector<std::uint8_t>;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

struct Case {
  std::size_t n, k, group, m;
  int bits;
  bool affine;
  ScaleType scale_type;
  ZeroType zero_type;
  Activation activation;

  std::string text() const {
    return "m" + std::to_string(m) + "-n" + std::to_string(n) + "-k" + std::to_string(k) + "-g" +
           std::to_string(group) + "-b" + std::to_string(bits) + (affine ? "-affine" : "") +
           "-scale" + std::to_string(int(scale_type)) + "-x" + std::to_string(int(activation));
  }
};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  std::size_t upto(std::size_t top) { return engine_() % (top + 1); }
  float normal() { return normal_(engine_); }
  Bytes bytes(std::size_t count) {
    Bytes out(count);
    for (auto& byte : out) byte = std::uint8_t(engine_());
    return out;
  }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> normal_;
};

Case random_case(Random& random) {
  constexpr std::size_t kGroups[] = {16, 17, 24, 32, 48, 64, 96, 128, 200, 256};
  Case c{};
  c.group = kGroups[random.upto(9)];
  c.k = c.group * (1 + random.upto(4));
  if (random.upto(5) == 0) c.group = c.k = 1 + random.upto(300);  // a whole row
  c.n = 1 + random.upto(60);
  c.m = 1 + random.upto(random.upto(3) == 0 ? 40 : 5);
  if (c.group < c.k && random.upto(15) == 0) {  // panels, and more than a block of W_hat both ways
    c.k = c.group * (1 + 2048 / c.group + random.upto(4));
    c.n = 65 + random.upto(10);
    c.m = 13 + random.upto(30);
  }
  c.bits = 1 + int(random.upto(7));
  c.affine = random.upto(1) == 0;
  c.scale_type = ScaleType(random.upto(3));
  c.zero_type = c.affine ? ZeroType(1 + random.upto(3)) : ZeroType::none;
  c.activation = Activation(random.upto(2));
  return c;
}

void put(Bytes& to, std::size_t i, int type, float value) {  // type: of ScaleType or Activation
  if (type == 2) {
    std::memcpy(&to[4 * i], &value, 4);
  } else {
    const std::uint16_t half = type == 0 ? to_bf16(value) : to_fp16(value);
    std::memcpy(&to[2 * i], &half, 2);
  }
}

float get(const Bytes& from, std::size_t i, int type) {
  if (type == 3) return from_e8m0(from[i]);
  if (type == 2) {
    float value;
    std::memcpy(&value, &from[4 * i], 4);
    return value;
  }
  std::uint16_t half;
  std::memcpy(&half, &from[2 * i], 2);
  return type == 0 ? from_bf16(half) : from_fp16(half);
}

// Canonical bit streams, first code in the most significant bits, and zero bits at the end.
Bytes pack_canonical(const std::vector<unsigned>& codes, const Case& c) {
  const std::size_t width = fdk::ceil_div(c.k * std::size_t(c.bits), 8);
  Bytes packed(c.n * width);
  for (std::size_t i = 0; i < codes.size(); i++) {
    for (int b = 0; b < c.bits; b++) {
      if ((codes[i] >> (c.bits - 1 - b) & 1) == 0) continue;
      const std::size_t bit = i % c.k * std::size_t(c.bits) + std::size_t(b);
      packed[i / c.k * width + bit / 8] |= std::uint8_t(0x80 >> bit % 8);
    }
  }
  return packed;
}

// error: of `got` against `wanted`, relative to the largest sum of magnitudes.
void expect_near(const Case& c, const char* isa, const char* what, const Bytes& got,
                 const std::vector<double>& wanted, double scale) {
  const double unit = c.activation == Activation::bf16   ? 0x1p-8
                      : c.activation == Activation::fp16 ? 0x1p-11
                                                         : 0x1p-20;
  for (std::size_t i = 0; i < wanted.size(); i++) {
    const double value = get(got, i, int(c.activation));
    const double allowed = unit * std::abs(wanted[i]) + unit * scale;
    if (!(std::abs(value - wanted[i]) <= allowed)) {
      fail(c.text() + " " + isa + " " + what + " " + std::to_string(i) + ": wanted " +
           std::to_string(wanted[i]) + ", got " + std::to_string(value));
    }
  }
}

// The tiles that x is rounded in, as columns of the weight: those of one scale.
std::vector<std::size_t> tiles_of(const fdk::Layout& layout) {
  std::vector<std::size_t> tiles(layout.k);
  for (std::size_t i = 0; i < layout.k; i++) tiles[i] = layout.position(i) / fdk::kTileK;
  return tiles;
}

// x :: [m, k] rounded to 8 bits and back, in plain loops.
std::vector<double> rounded_x(const Case& c, const fdk::Layout& layout, const Bytes& x) {
  const std::vector<std::size_t> tiles = tiles_of(layout);
  std::vector<double> rounded(c.m * c.k);
  for (std::size_t m = 0; m < c.m; m++) {
    std::vector<float> largest(layout.tiles);
    for (std::size_t i = 0; i < c.k; i++) {
      float& of_tile = largest[tiles[i]];
      of_tile = std::max(of_tile, std::abs(get(x, m * c.k + i, int(c.activation))));
    }
    for (std::size_t i = 0; i < c.k; i++) {
      const float most = largest[tiles[i]];
      const float code = std::nearbyint(get(x, m * c.k + i, int(c.activation)) * (127 / most));
      rounded[m * c.k + i] = most == 0 ? 0 : double(code) * double(most / 127);
    }
  }
  return rounded;
}

// y with x rounded to 8 bits: kernels differ from plain loops by float32 sums alone.
void check_int8(const Case& c, const fdk::PackedWeight& w, const std::vector<unsigned>& codes,
                const std::vector<double>& weight, const Bytes& x, const Bytes& bias,
                std::size_t threads) {
  const std::vector<double> rounded = rounded_x(c, w.layout, x);
  fdk::Int8Table table{};
  if (!c.affine) table = fdk::int8_table_of(w.codebook, c.bits);
  std::vector<double> y(c.m * c.n);
  double scale = 0;
  for (std::size_t m = 0; m < c.m; m++) {
    for (std::size_t n = 0; n < c.n; n++) {
      double sum = get(bias, n, int(c.activation)), magnitude = 0;
      for (std::size_t k = 0; k < c.k; k++) {
        double value = weight[n * c.k + k];
        if (!c.affine) {
          const unsigned code = codes[n * c.k + k];
          const double level = double(table.levels[code]) - double(table.offset);
          value *= level * double(table.step) / double(w.codebook[code]);
        }
        sum += value * rounded[m * c.k + k];
        magnitude += std::abs(value * rounded[m * c.k + k]);
      }
      y[m * c.n + n] = sum;
      scale = std::max(scale, magnitude);
    }
  }
  for (int isa = 0; isa < fdk::kIsas; isa++) {
    if (!fdk::supported(fdk::Isa(isa))) continue;
    const char* name = fdk::name_of(fdk::Isa(isa));
    fdk::set_isa(name);
    Bytes out(y.size() * fdk::bytes_of(c.activation), 0xFF);
    fdk::linear_int8(w, c.affine ? nullptr : &table, c.activation, x.data(), c.m, bias.data(),
                     out.data(), threads);
    // Unsigned levels and zero points cancel: their sums are up to 3 times those of the products.
    expect_near(c, name, "int8 y", out, y, 4 * scale);
  }
}

void check(const Case& c, Random& random) {
  const fdk::Layout layout = fdk::layout_of(c.n, c.k, c.group, c.bits);
  std::vector<unsigned> codes(c.n * c.k);
  for (auto& code : codes) code = unsigned(random.upto((1u << c.bits) - 1));
  const Bytes packed = pack_canonical(codes, c);
  Bytes laid_out(layout.code_bytes(), 0xAA), back(packed.size(), 0x55);
  fdk::pack_codes(layout, packed.data(), laid_out.data(), 2);
  fdk::unpack_codes(layout, laid_out.data(), back.data(), 2);
  if (back != packed) fail(c.text() + ": codes come back changed");

  const int zero_kind = int(c.zero_type) - 1;  // as a ScaleType, or 3 for bytes
  const std::size_t scale_item = fdk::bytes_of(c.scale_type), groups = c.n * layout.groups;
  Bytes scales(groups * scale_item), zeros(groups * fdk::bytes_of(c.zero_type));
  for (std::size_t i = 0; i < groups; i++) {
    if (c.scale_type == ScaleType::e8m0) {
      scales[i] = std::uint8_t(122 + random.upto(6));
    } else {
      put(scales, i, int(c.scale_type), random.normal());
    }
    if (!c.affine) continue;
    if (c.zero_type == ZeroType::u8) {
      zeros[i] = std::uint8_t(random.upto(255));
    } else {
      put(zeros, i, zero_kind, random.normal() + float(1 << (c.bits - 1)));
    }
  }
  Bytes scales_out(layout.scales() * scale_item), scales_back(scales.size());
  fdk::pack_groups(layout, scales.data(), scales_out.data(), scale_item);
  fdk::unpack_groups(layout, scales_out.data(), scales_back.data(), scale_item);
  if (scales_back != scales) fail(c.text() + ": scales come back changed");
  Bytes zeros_out(layout.scales() * fdk::bytes_of(c.zero_type));
  if (c.affine) {
    fdk::pack_groups(layout, zeros.data(), zeros_out.data(), fdk::bytes_of(c.zero_type));
  }

  std::vector<float> codebook(std::size_t(1) << c.bits);
  for (auto& value : codebook) {
    value = random.normal();
    if (c.activation == Activation::bf16) value = from_bf16(to_bf16(value));
    if (c.activation == Activation::fp16) value = from_fp16(to_fp16(value));
  }
  std::vector<double> weight(c.n * c.k);
  for (std::size_t i = 0; i < weight.size(); i++) {
    const std::size_t slot = i / c.k * layout.groups + i % c.k / c.group;
    float value = codebook[codes[i]];
    if (c.affine) {
      const bool bytes = c.zero_type == ZeroType::u8;
      value = float(codes[i]) - (bytes ? float(zeros[slot]) : get(zeros, slot, zero_kind));
    }
    weight[i] = double(value) * double(get(scales, slot, int(c.scale_type)));
  }

  const std::size_t item = fdk::bytes_of(c.activation);
  Bytes x(c.m * c.k * item), bias(c.n * item), grad(c.m * c.n * item);
  for (std::size_t i = 0; i < c.m * c.k; i++) put(x, i, int(c.activation), random.normal());
  for (std::size_t i = 0; i < c.n; i++) put(bias, i, int(c.activation), random.normal());
  for (std::size_t i = 0; i < c.m * c.n; i++) put(grad, i, int(c.activation), random.normal());
  std::vector<double> y(c.m * c.n), dx(c.m * c.k);
  double y_scale = 0, dx_scale = 0;
  for (std::size_t m = 0; m < c.m; m++) {
    std::vector<double> dx_sums(c.k);
    for (std::size_t n = 0; n < c.n; n++) {
      double sum = get(bias, n, int(c.activation)), magnitude = 0;
      const double g = get(grad, m * c.n + n, int(c.activation));
      for (std::size_t k = 0; k < c.k; k++) {
        const double w = weight[n * c.k + k], product = w * get(x, m * c.k + k, int(c.activation));
        sum += product;
        magnitude += std::abs(product);
        dx[m * c.k + k] += g * w;
        dx_sums[k] += std::abs(g * w);
      }
      y[m * c.n + n] = sum;
      y_scale = std::max(y_scale, magnitude);
    }
    for (double sum : dx_sums) dx_scale = std::max(dx_scale, sum);
  }
  const fdk::PackedWeight w{layout,
                            laid_out.data(),
                            scales_out.data(),
                            c.scale_type,
                            c.affine ? zeros_out.data() : nullptr,
                            c.zero_type,
                            c.affine ? nullptr : codebook.data()};
  for (int isa = 0; isa < fdk::kIsas; isa++) {
    if (!fdk::supported(fdk::Isa(isa))) continue;
    const char* name = fdk::name_of(fdk::Isa(isa));
    fdk::set_isa(name);
    Bytes out(y.size() * item, 0xFF), dx_out(dx.size() * item, 0xFF);
    const std::size_t threads = 1 + random.upto(2);
    fdk::linear(w, c.activation, x.data(), c.m, bias.data(), out.data(), threads);
    expect_near(c, name, "y", out, y, y_scale);
    fdk::linear_grad_x(w, c.activation, grad.data(), c.m, dx_out.data(), threads);
    expect_near(c, name, "dx", dx_out, dx, dx_scale);
  }
  check_int8(c, w, codes, weight, x, bias, 1 + random.upto(2));
}

// A weight of 1 or 2 bits with scales of 1, whose rows all have a zero at column `column`.
struct ZeroColumn {
  static constexpr std::size_t kRows = 50, kDepth = 512;
  static constexpr float kValues[2][4] = {{0, 1, 0, 0}, {-1, 0, 0.5f, 1}};
  Case c;
  fdk::Layout layout;
  std::vector<unsigned> codes;
  Bytes laid_out, scales;

  ZeroColumn(int bits, std::size_t m, std::size_t column, Random& random)
      : c{kRows, kDepth, 64, m, bits, false, ScaleType::fp32, ZeroType::none, Activation::bf16},
        layout(fdk::layout_of(c.n, c.k, c.group, bits)),
        codes(c.n * c.k),
        laid_out(layout.code_bytes()),
        scales(layout.scales() * 4) {
    for (auto& code : codes) code = unsigned(random.upto((1u << bits) - 1));
    for (std::size_t row = 0; row < c.n; row++) codes[row * c.k + column] = unsigned(bits - 1);
    fdk::pack_codes(layout, pack_canonical(codes, c).data(), laid_out.data(), 1);
    for (std::size_t i = 0; i < layout.scales(); i++) put(scales, i, 2, 1);
  }
  double value(std::size_t i) const { return double(kValues[c.bits - 1][codes[i]]); }
  fdk::PackedWeight packed() const {
    return {layout,  laid_out.data(), scales.data(),      ScaleType::fp32,
            nullptr, ZeroType::none,  kValues[c.bits - 1]};
  }
};

// Rows that are zero at an outlier of x err by a rounding to bf16, as if it were not there.
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
        for (int isa = 0; isa < fdk::kIsas; isa++) {
          if (!fdk::supported(fdk::Isa(isa))) continue;
          const char* name = fdk::name_of(fdk::Isa(isa));
          fdk::set_isa(name);
          Bytes out(y.size() * 2, 0xFF);
          fdk::linear(w.packed(), Activation::bf16, x.data(), m, zero.data(), out.data(), 1);
          // Sums of 512 in float32 err by less than 2^-8 of 2^-4; two or one nonzero by nothing.
          expect_near(w.c, name, "y beside an outlier", out, y, kind == Kind::dense ? 0x1p-4 : 0);
        }
      }
    }
  }
}

// Any number of threads gives what one gives: none counts as one, too many as 256.
void check_thread_counts(Random& random) {
  for (const std::size_t m : {1, 3, 20}) {
    const ZeroColumn w(2, m, 0, random);
    Bytes x(m * w.c.k * 2), grad(m * w.c.n * 2);
    for (std::size_t i = 0; i < m * w.c.k; i++) put(x, i, 0, random.normal());
    for (std::size_t i = 0; i < m * w.c.n; i++) put(grad, i, 0, random.normal());
    fdk::set_isa("auto");
    Bytes wanted_y(grad.size()), wanted_dx(x.size());
    fdk::linear(w.packed(), Activation::bf16, x.data(), m, nullptr, wanted_y.data(), 1);
    fdk::linear_grad_x(w.packed(), Activation::bf16, grad.data(), m, wanted_dx.data(), 1);
    for (const std::size_t threads : {std::size_t(0), std::size_t(1) << 63}) {
      Bytes y(grad.size()), dx(x.size());
      fdk::linear(w.packed(), Activation::bf16, x.data(), m, nullptr, y.data(), threads);
      fdk::linear_grad_x(w.packed(), Activation::bf16, grad.data(), m, dx.data(), threads);
      if (y != wanted_y || dx != wanted_dx) fail(w.c.text() + ": threads change the result");
    }
  }
}

// What a piece throws comes to the caller, on one thread and on many, and the pool works on.
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

// A k and an m that fill no vector, pair or panel. The last row of x begins with NaN, which a
// kernel that reads beyond a panel, or a row, brings into the rows before it.
void check_plain_gemm(Random& random) {
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
    for (int isa = 0; isa < fdk::kIsas; isa++) {
      if (!fdk::supported(fdk::Isa(isa))) continue;
      const char* name = fdk::name_of(fdk::Isa(isa));
      fdk::set_isa(name);
      Bytes out(c.m * c.n * item, 0);
      fdk::plain_gemm(type, x.data(), c.m, w.data(), c.n, c.k, out.data(), 2);
      expect_near(c, name, "plain y", out, y, scale / 4);
      for (std::size_t i = y.size(); i < c.m * c.n; i++) {
        if (!std::isnan(get(out, i, int(type)))) fail(c.text() + " " + name + ": NaN is lost");
      }
      const std::vector<double> last(y.end() - std::ptrdiff_t(c.n), y.end());
      Bytes row(c.n * item, 0xFF);
      fdk::plain_gemv(type, x.data() + (c.m - 2) * c.k * item, w.data(), c.n, c.k, row.data(), 2);
      expect_near(c, name, "plain y of one row", row, last, scale / 4);
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
  // Ties to even, overflow, and a value below half the least subnormal.
  if (to_fp16(2049.0f) != to_fp16(2048.0f) || to_fp16(2051.0f) != to_fp16(2052.0f)) fail("ties");
  if (to_fp16(65520.0f) != 0x7C00 || to_fp16(65519.0f) != 0x7BFF || to_fp16(0x1p-26f) != 0) {
    fail("limits of fp16");
  }
  if (to_bf16(257.0f) != to_bf16(256.0f) || to_bf16(259.0f) != to_bf16(260.0f)) fail("bf16 ties");
}

}  // namespace

int main(int argc, char** argv) {
  Limit limit(argc, argv);
  Random random(limit.seed());
  check_conversions();
  check_sizes_are_refused();
  check_pool_errors();
  check_thread_counts(random);
  check_outliers(random);
  check_plain_gemm(random);
  int cases = 0;
  for (; !limit.reached(cases); cases++) check(random_case(random), random);
  std::printf("%d cases passed on", cases);
  for (int isa = 0; isa < fdk::kIsas; isa++) {
    if (fdk::supported(fdk::Isa(isa))) std::printf(" %s", fdk::name_of(fdk::Isa(isa)));
  }
  std::printf("\n");
}
