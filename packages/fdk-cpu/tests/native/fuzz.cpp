// The fuzz target: takes any bytes as sizes and contents for packing and the blockwise kernels.
// libFuzzer calls it, or fuzz_random.cpp.
//
// Each tensor is a heap block of its exact size, so that AddressSanitizer sees any access beyond
// it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "blockwise/blockwise.h"
#include "common/dispatch.h"
#include "common/layout.h"
#include "checks.h"

namespace {

// The input, read again from its start, slightly changed, when it ends.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  std::uint8_t byte() {
    if (size_ == 0) return 0;
    const std::size_t round = next_ / size_, at = next_++ % size_;
    return std::uint8_t(data_[at] + 37 * round);
  }
  std::size_t upto(std::size_t top) { return (std::size_t(byte()) << 8 | byte()) % (top + 1); }
  Bytes bytes(std::size_t count) {
    Bytes out(count);
    for (auto& b : out) b = byte();
    return out;
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_, next_ = 0;
};

// Clears the bits after the last code of each row, as canonical tensors have them.
void clear_padding(Bytes& packed, std::size_t row_bits) {
  const std::size_t row = fdk::ceil_div(row_bits, 8);
  if (row_bits % 8 == 0) return;
  for (std::size_t end = row; end <= packed.size(); end += row) {
    packed[end - 1] &= std::uint8_t(0xFF << (8 - row_bits % 8));
  }
}

void fuzz_layout(Input& in) {
  const std::size_t n = in.upto(40), groups = in.upto(9), group = in.upto(300);
  const std::size_t k = groups * group + (in.upto(15) == 0 ? 1 : 0);
  const int bits = int(in.upto(9));
  fdk::Layout layout;
  try {
    layout = fdk::layout_of(n, k, group, bits);
  } catch (const std::invalid_argument&) {
    return;
  }
  const std::size_t threads = 1 + in.upto(2), row_bits = k * std::size_t(bits);
  Bytes packed = in.bytes(n * fdk::ceil_div(row_bits, 8));
  clear_padding(packed, row_bits);
  Bytes codes(layout.code_bytes(), 0xAA), back(packed.size(), 0x55);
  fdk::pack_codes(layout, packed.data(), codes.data(), threads);
  fdk::unpack_codes(layout, codes.data(), back.data(), threads);
  if (back != packed) fail("codes come back changed");
  // Any bytes can be unpacked, even with padding bits set, and the result is canonical.
  codes = in.bytes(codes.size());
  fdk::unpack_codes(layout, codes.data(), packed.data(), threads);
  fdk::pack_codes(layout, packed.data(), codes.data(), threads);
  fdk::unpack_codes(layout, codes.data(), back.data(), threads);
  if (back != packed) fail("unpacked codes are not canonical");

  const std::size_t item = std::size_t(1) << in.upto(2);
  const Bytes flat = in.bytes(n * layout.groups * item);
  Bytes stored(layout.scales() * item, 0xAA), flat_back(flat.size(), 0x55);
  fdk::pack_groups(layout, flat.data(), stored.data(), item);
  fdk::unpack_groups(layout, stored.data(), flat_back.data(), item);
  if (flat_back != flat) fail("groups come back changed");
}

struct Blocks {
  Activation type;
  std::size_t n, block, threads;
  std::vector<float> code;
  Bytes order, values;

  std::size_t entries() const { return code.size(); }
  std::size_t packed_bytes() const { return entries() == 16 ? fdk::ceil_div(n, 2) : n; }
  std::string text() const {
    return std::to_string(entries()) + " codes, n " + std::to_string(n) + ", block " +
           std::to_string(block) + ", type " + std::to_string(int(type));
  }
};

Blocks random_blocks(Input& in) {
  Blocks b;
  b.type = Activation(in.upto(2));
  b.threads = in.upto(31) == 0 ? std::size_t(1) << 63 : 1 + in.upto(2);
  const bool four_bits = in.upto(1) == 0;
  b.n = in.upto(in.upto(7) == 0 ? 40000 : 700);
  b.block = four_bits ? std::size_t(32) << in.upto(7) : 1 + in.upto(in.upto(3) == 0 ? 9000 : 300);
  if (!four_bits && in.upto(15) == 0) b.block = ~std::size_t(0) - in.upto(3);
  b.code.resize(four_bits ? 16 : 256);
  const bool raw = in.upto(1) == 0;  // any finite floats, or a few even steps
  for (std::size_t i = 0; i < b.entries(); i++) {
    const Bytes bits = in.bytes(4);
    std::memcpy(&b.code[i], bits.data(), 4);
    if (!raw) b.code[i] = float(int(bits[0]) - 128) / 128;
    if (!std::isfinite(b.code[i])) b.code[i] = 0;
  }
  std::sort(b.code.begin(), b.code.end());
  b.order.resize(b.entries());
  std::iota(b.order.begin(), b.order.end(), std::uint8_t(0));
  b.values = in.bytes(b.n * fdk::bytes_of(b.type));
  if (in.upto(3) != 0) {  // mostly finite, so that codes are compared
    for (std::size_t i = 0; i < b.n; i++) {
      if (std::isfinite(get(b.values, i, int(b.type)))) continue;
      std::memset(&b.values[i * fdk::bytes_of(b.type)], 0x3A, fdk::bytes_of(b.type));
    }
  }
  if (b.type == Activation::fp32 && in.upto(1) == 0) {  // ties, in blocks with an absmax of 1
    for (std::size_t i = 0; i < b.n; i++) {
      const std::size_t entry = in.byte() % (b.entries() - 1);
      const float middle = (b.code[entry] + b.code[entry + 1]) / 2;
      const float value = i % b.block == 0 || !(std::fabs(middle) <= 1) ? 1 : middle;
      std::memcpy(&b.values[4 * i], &value, 4);
    }
  }
  return b;
}

struct Quantised {
  Bytes packed;
  std::vector<float> absmax;
};

Quantised quantise(const Blocks& b, const fdk::NearestCode& nearest) {
  Quantised q{Bytes(b.packed_bytes(), 0xAA), std::vector<float>(fdk::ceil_div(b.n, b.block), -1)};
  fdk::quantise_blocks(nearest, b.type, b.values.data(), b.n, b.block, q.packed.data(),
                       q.absmax.data(), b.threads);
  return q;
}

unsigned code_at(const Blocks& b, const Quantised& q, std::size_t i) {
  if (b.entries() == 256) return q.packed[i];
  return i % 2 == 0 ? q.packed[i / 2] >> 4 : q.packed[i / 2] & 15;
}

// The definition, by counting midpoints.
void check_by_counting(const Blocks& b, const Quantised& q) {
  std::vector<float> midpoints;
  for (std::size_t i = 0; i + 1 < b.entries(); i++) {
    const float middle = (b.code[i] + b.code[i + 1]) / 2;
    midpoints.push_back(middle >= 1 ? INFINITY : middle < -1 ? -INFINITY : middle);
  }
  for (std::size_t block = 0; block < q.absmax.size(); block++) {
    const std::size_t first = block * b.block, count = std::min(b.block, b.n - first);
    float absmax = 0;
    bool finite = true;
    for (std::size_t i = first; i < first + count; i++) {
      const float value = get(b.values, i, int(b.type));
      finite = finite && std::isfinite(value);
      absmax = std::max(absmax, std::fabs(value));
    }
    if (finite != std::isfinite(q.absmax[block])) fail(b.text() + ": a NaN or infinity is lost");
    if (!finite) continue;
    const float least = float(1e-38), raised = std::max(absmax, least);
    const bool is_short = count < b.block;
    if (q.absmax[block] != (is_short ? raised : absmax)) fail(b.text() + ": absmax");
    for (std::size_t i = first; i < first + count; i++) {
      const float value = get(b.values, i, int(b.type)), inverse = 1.0f / raised;
      const float scaled = is_short ? value / raised : value * inverse;
      const auto below = [&](float midpoint) { return midpoint < scaled; };
      const auto wanted = std::count_if(midpoints.begin(), midpoints.end(), below);
      if (code_at(b, q, i) != std::size_t(wanted)) {
        fail(b.text() + ": code " + std::to_string(i));
      }
    }
  }
}

bool same_but_nan(float a, float b) {
  return bits_of_float(a) == bits_of_float(b) || (std::isnan(a) && std::isnan(b));
}

void expect_same(const Blocks& b, const Quantised& got, const Quantised& wanted) {
  for (std::size_t i = 0; i < got.absmax.size(); i++) {
    if (!same_but_nan(got.absmax[i], wanted.absmax[i])) fail(b.text() + ": absmax differs");
  }
  for (std::size_t i = 0; i < b.n; i++) {
    if (!std::isfinite(wanted.absmax[i / b.block])) continue;
    if (code_at(b, got, i) != code_at(b, wanted, i)) {
      fail(b.text() + ": code " + std::to_string(i) + " differs");
    }
  }
  if (b.entries() == 16 && b.n % 2 != 0 && std::isfinite(wanted.absmax.back()) &&
      got.packed.back() != wanted.packed.back()) {
    fail(b.text() + ": the last low bits differ");
  }
}

void check_dequantised(const Blocks& b, const Bytes& packed, const std::vector<float>& absmax) {
  const int bits = b.entries() == 16 ? 4 : 8;
  Bytes out(b.values.size(), 0xAA);
  fdk::dequantise_blocks(bits, b.code.data(), b.type, packed.data(), absmax.data(), b.n, b.block,
                         out.data(), b.threads);
  for (std::size_t i = 0; i < b.n; i++) {
    const unsigned pair = packed[bits == 8 ? i : i / 2];
    const unsigned code = bits == 8 ? pair : i % 2 == 0 ? pair >> 4 : pair & 15;
    float wanted = b.code[code] * absmax[i / b.block];
    if (b.type == Activation::bf16) wanted = from_bf16(to_bf16(wanted));
    if (b.type == Activation::fp16) wanted = from_fp16(to_fp16(wanted));
    if (!same_but_nan(get(out, i, int(b.type)), wanted)) {
      fail(b.text() + ": value " + std::to_string(i));
    }
  }
}

void fuzz_blockwise(Input& in) {
  const Blocks b = random_blocks(in);
  const fdk::NearestCode nearest = fdk::nearest_code_of(b.code.data(), b.order.data(), b.entries());
  fdk::set_isa("scalar");
  const Quantised wanted = quantise(b, nearest);
  check_by_counting(b, wanted);
  const Bytes any = in.bytes(b.packed_bytes());
  std::vector<float> scales(wanted.absmax.size());
  for (auto& scale : scales) {
    const Bytes bits = in.bytes(4);
    std::memcpy(&scale, bits.data(), 4);
  }
  for (int isa = 0; isa < fdk::kIsas; isa++) {
    if (!fdk::supported(fdk::Isa(isa))) continue;
    fdk::set_isa(fdk::name_of(fdk::Isa(isa)));
    expect_same(b, quantise(b, nearest), wanted);
    check_dequantised(b, any, scales);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input in(data, size);
  if (in.upto(2) == 0) {
    fuzz_layout(in);
  } else {
    fuzz_blockwise(in);
  }
  return 0;
}
