#include "case.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "common/float_convert.h"

namespace bench {

RandomWeight::RandomWeight(const Options& options, const Case& c)
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

void RandomWeight::multiply(const Options& options, const Case& c, std::size_t i, const Bytes& x,
                            Bytes& y) const {
  const fdk::PackedWeight w = at(i);
  if (options.int8) {
    fdk::linear_int8(w, affine_ ? nullptr : &levels_, options.activation, x.data(), c.m, nullptr,
                     y.data(), c.threads);
  } else {
    fdk::linear(w, options.activation, x.data(), c.m, nullptr, y.data(), c.threads);
  }
}

fdk::PackedWeight RandomWeight::at(std::size_t i) const {
  return {layout_,
          codes_->data() + i * code_bytes_,
          scales_[i].data(),
          fdk::ScaleType::bf16,
          affine_ ? zeros_[i].data() : nullptr,
          fdk::ZeroType::bf16,
          affine_ ? nullptr : codebook_.data()};
}

Bytes RandomWeight::laid_out(const std::vector<std::uint16_t>& groups) const {
  Bytes out(layout_.scales() * 2);
  fdk::pack_groups(layout_, reinterpret_cast<const std::uint8_t*>(groups.data()), out.data(), 2);
  return out;
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

}  // namespace bench
