// Conversions between bf16, fp16, e8m0 and float32, in plain C++.
//
// They have internal linkage: the linker must not use a copy that was compiled for AVX-512 in code
// that runs on any machine.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/layout.h"

namespace {

[[maybe_unused]] inline float float_of_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

[[maybe_unused]] inline std::uint32_t bits_of_float(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The binary exponent; valid for normal numbers.
[[maybe_unused]] inline int exponent_of(float value) {
  return int(bits_of_float(value) >> 23 & 0xFF) - 127;
}

[[maybe_unused]] inline float power_of_two(int exponent) {
  return float_of_bits(std::uint32_t(exponent + 127) << 23);
}

[[maybe_unused]] inline float from_bf16(std::uint16_t v) {
  return float_of_bits(std::uint32_t(v) << 16);
}

// Rounds to nearest, ties to even; NaN stays NaN.
[[maybe_unused]] inline std::uint16_t to_bf16(float value) {
  const std::uint32_t bits = bits_of_float(value);
  const std::uint32_t rounded = bits + 0x7FFF + (bits >> 16 & 1);
  const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  return std::uint16_t(nan ? bits >> 16 | 0x40 : rounded >> 16);
}

[[maybe_unused]] inline float from_fp16(std::uint16_t v) {
  const std::uint32_t sign = std::uint32_t(v & 0x8000) << 16, magnitude = v & 0x7FFF;
  if (magnitude >= 0x7C00) return float_of_bits(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
  if (magnitude >= 0x400) return float_of_bits(sign | ((magnitude << 13) + (112u << 23)));
  const float value = float(magnitude) * 0x1p-24f;  // a subnormal fp16
  return sign != 0 ? -value : value;
}

[[maybe_unused]] inline std::uint16_t to_fp16(float value) {
  const std::uint32_t bits = bits_of_float(value), magnitude = bits & 0x7FFFFFFF;
  const std::uint16_t sign = std::uint16_t(bits >> 16 & 0x8000);
  if (magnitude > 0x7F800000) return std::uint16_t(sign | 0x7E00);
  if (magnitude >= 0x477FF000) return std::uint16_t(sign | 0x7C00);  // 65520 or more: infinity
  if (magnitude < 0x38800000) {  // below 2^-14: adding 1/2 rounds to a multiple of 2^-24
    const float shifted = float_of_bits(magnitude) + 0.5f;
    return std::uint16_t(sign | (bits_of_float(shifted) - 0x3F000000));
  }
  const std::uint32_t rounded = magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1);
  return std::uint16_t(sign | rounded >> 13);
}

[[maybe_unused]] inline float from_e8m0(std::uint8_t v) {
  return float_of_bits(std::uint32_t(v) << 23);
}

// Value i of p as float32.
[[maybe_unused]] inline float read(const void* p, std::size_t i, fdk::Activation type) {
  switch (type) {
    case fdk::Activation::bf16:
      return from_bf16(static_cast<const std::uint16_t*>(p)[i]);
    case fdk::Activation::fp16:
      return from_fp16(static_cast<const std::uint16_t*>(p)[i]);
    case fdk::Activation::fp32:
      return static_cast<const float*>(p)[i];
  }
  return 0;
}

[[maybe_unused]] inline void write(void* p, std::size_t i, fdk::Activation type, float value) {
  switch (type) {
    case fdk::Activation::bf16:
      static_cast<std::uint16_t*>(p)[i] = to_bf16(value);
      break;
    case fdk::Activation::fp16:
      static_cast<std::uint16_t*>(p)[i] = to_fp16(value);
      break;
    case fdk::Activation::fp32:
      static_cast<float*>(p)[i] = value;
      break;
  }
}

}  // namespace
