// Compares every instruction set with plain loops, and packs random shapes and bytes.
//
// run_limit.h has the arguments; FDK_TEST_ISAS limits the instruction sets. Each tensor is a heap
// block of its exact size, so that AddressSanitizer sees any access beyond it.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "common/linear_int8.h"
#include "common/dispatch.h"
#include "common/kernels.h"
#include "common/linear.h"
#include "common/linear_internal.h"
#include "checks.h"
#include "run_limit.h"

namespace {

constexpr std::size_t kAll = 1024;   // the most rows of x that a product is given
constexpr std::size_t kShared = 12;  // and that a shared product is given

// Several of the largest blocks of W_hat of any set, for panels beyond the cache and for dgrad, and
// a last one that is not full. One thread, because more threads use smaller blocks.
Case large_case(Random& random) {
  Case c{};
  c.group = 64;
  c.k = 640;
  c.n = 1043;
  c.m = 33 + random.upto(10);
  c.bits = 1 + int(random.upto(7));
  return c;
}

Case random_case(Random& random) {
  constexpr std::size_t kGroups[] = {16, 17, 24, 32, 48, 64, 96, 128, 200, 256};
  Case c{};
  c.group = kGroups[random.upto(9)];
  c.k = c.group * (1 + random.upto(4));
  if (random.upto(5) == 0) c.group = c.k = 1 + random.upto(300);  // a whole row
  c.n = 1 + random.upto(60);
  c.m = 1 + random.upto(random.upto(3) == 0 ? 40 : 5);
  if (c.group < c.k) {
    switch (random.upto(15)) {
      case 0:  // panels, and more than a block of W_hat in both directions
        c.k = c.group * (1 + 2048 / c.group + random.upto(4));
        c.n = 65 + random.upto(10);
        c.m = 13 + random.upto(60);
        break;
      case 1:  // the same for dgrad
        c.k = c.group * (1 + 128 / c.group + random.upto(2));
        c.n = 2049 + random.upto(30);
        break;
      case 2:  // more than a piece of a two-pass GEMV
        c.n = 129 + random.upto(200);
        c.m = 1;
        break;
      default:
        break;
    }
  }
  c.bits = 1 + int(random.upto(7));
  c.affine = random.upto(1) == 0;
  c.scale_type = ScaleType(random.upto(3));
  c.zero_type = c.affine ? ZeroType(1 + random.upto(3)) : ZeroType::none;
  c.activation = Activation(random.upto(2));
  c.threads = 1 + random.upto(2);
  return c;
}

// The tile of each column of the weight, which shares a scale of x.
std::vector<std::size_t> tiles_of(const fdk::Layout& layout) {
  std::vector<std::size_t> tiles(layout.k);
  for (std::size_t i = 0; i < layout.k; i++) tiles[i] = layout.position(i) / fdk::kTileK;
  return tiles;
}

// Rounds x :: [m, k] to 8 bits and back, in plain loops.
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

// Batch-invariant: a row alone, and the last rows on more threads, give the bits of the batch.
template <class Linear>
void check_invariant(const Case& c, Linear linear, const Bytes& x) {
  const std::size_t in = x.size() / c.m, out = c.n * fdk::bytes_of(c.activation);
  for (const char* name : tested_isas()) {
    fdk::set_isa(name);
    Bytes all(c.m * out, 0xFF), alone(out, 0xFF), last((c.m - c.m / 2) * out, 0xFF);
    linear(x.data(), c.m, all.data(), c.threads);
    const std::size_t first = c.m / 2;
    linear(x.data() + first * in, 1, alone.data(), c.threads);
    linear(x.data() + first * in, c.m - first, last.data(), c.threads + 1);
    if (std::memcmp(alone.data(), all.data() + first * out, out) != 0 ||
        std::memcmp(last.data(), all.data() + first * out, last.size()) != 0) {
      fail(c.text() + " " + name + ": a row depends on the batch");
    }
  }
}

// y with x rounded to 8 bits: kernels differ from plain loops only by float32 sums.
void check_int8(const Case& c, const fdk::PackedWeight& w, const std::vector<unsigned>& codes,
                const std::vector<double>& weight, const Bytes& x, const Bytes& bias) {
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
  check_invariant(
      c,
      [&](const std::uint8_t* from, std::size_t m, std::uint8_t* to, std::size_t threads) {
        fdk::linear_int8(w, c.affine ? nullptr : &table, c.activation, from, m, bias.data(), to,
                         threads, true);
      },
      x);
  for (const char* name : tested_isas()) {
    fdk::set_isa(name);
    Bytes out(y.size() * fdk::bytes_of(c.activation), 0xFF);
    fdk::linear_int8(w, c.affine ? nullptr : &table, c.activation, x.data(), c.m, bias.data(),
                     out.data(), c.threads);
    // Unsigned levels and zero points cancel: their sums are up to 3 times those of the products.
    expect_near(c, name, "int8 y", out, y, 4 * scale);
    if (c.m > kShared) continue;
    check_shared_gemv(c, name, w, c.affine ? nullptr : &table, true, x, bias, y, 4 * scale);
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
  for (const char* name : tested_isas()) {
    fdk::set_isa(name);
    Bytes out(y.size() * item, 0xFF), dx_out(dx.size() * item, 0xFF);
    fdk::linear(w, c.activation, x.data(), c.m, bias.data(), out.data(), c.threads);
    expect_near(c, name, "y", out, y, y_scale);
    if (c.m <= kShared) check_shared_gemv(c, name, w, nullptr, false, x, bias, y, y_scale);
    // Each kernel multiplies all rows, whatever the thresholds of this machine, and panels with and
    // without prefetching the next one.
    const fdk::LinearKernels& kernels = fdk::linear_kernels_for(fdk::current_isa(), c.activation);
    std::vector<fdk::DispatchThresholds> thresholds;
    if (kernels.gemm_stripes != nullptr) thresholds = {{kAll, 0, 0}, {0, kAll, 0}};
    if (kernels.x_is_bf16) {
      thresholds.push_back({0, 0, random.upto(32)});
      thresholds.push_back({0, 0, random.upto(32), 0});
    }
    for (const fdk::DispatchThresholds& of : thresholds) {
      out.assign(out.size(), 0xFF);
      fdk::linear_with_thresholds(&of, w, c.activation, x.data(), c.m, bias.data(), out.data(),
                                  c.threads);
      expect_near(c, name, "y by one product", out, y, y_scale);
    }
    fdk::linear_grad_x(w, c.activation, grad.data(), c.m, dx_out.data(), c.threads);
    expect_near(c, name, "dx", dx_out, dx, dx_scale);
  }
  check_invariant(
      c,
      [&](const std::uint8_t* from, std::size_t m, std::uint8_t* to, std::size_t threads) {
        fdk::linear(w, c.activation, from, m, bias.data(), to, threads, true);
      },
      x);
  check_int8(c, w, codes, weight, x, bias);
}

}  // namespace

int main(int argc, char** argv) {
  Limit limit(argc, argv);
  Random random(limit.seed());
  check_conversions();
  check_sizes_are_refused();
  check_pool_errors();
  check_teams();
  check_decode(random);
  check_tiles(random);
  check_thread_counts(random);
  check_outliers(random);
  check_outlier_share(random);
  check_outlier_limit(random);
  check_extreme_x(random);
  check_dense_gemm(random);
  check(large_case(random), random);
  int cases = 0;
  for (; !limit.reached(cases); cases++) check(random_case(random), random);
  std::printf("%d cases passed on", cases);
  for (const char* name : tested_isas()) std::printf(" %s", name);
  std::printf("\n");
}
