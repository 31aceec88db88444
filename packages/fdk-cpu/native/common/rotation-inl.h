// The kernel of rotation.h over vectors of kVectorBytes. Included once per instruction set, which
// defines kVectorBytes before.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/float_convert.h"
#include "common/rotation.h"

namespace fdk {
namespace {

// The sign of each input of a block: the lowest bit of MurmurHash3's finaliser of its index + 1.
constexpr std::array<float, kMaxRotationBlock> signs_of_block() {
  std::array<float, kMaxRotationBlock> signs{};
  for (std::uint32_t i = 0; i < kMaxRotationBlock; i++) {
    std::uint32_t word = i + 1;
    word = (word ^ word >> 16) * 0x85EBCA6Bu;
    word = (word ^ word >> 13) * 0xC2B2AE35u;
    signs[i] = ((word ^ word >> 16) & 1) != 0 ? -1.0f : 1.0f;
  }
  return signs;
}
constexpr std::array<float, kMaxRotationBlock> kSigns = signs_of_block();

using Floats = float __attribute__((vector_size(kVectorBytes)));
constexpr std::size_t kLanes = kVectorBytes / sizeof(float);

inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

// Sums and differences of neighbours 1, 2, ... apart, within vectors.
template <std::size_t kBlock>
void within_vectors(float* v) {
  for (std::size_t i = 0; i < kBlock; i += 4) {
    const float sum = v[i] + v[i + 1], difference = v[i] - v[i + 1];
    const float next_sum = v[i + 2] + v[i + 3], next_difference = v[i + 2] - v[i + 3];
    v[i] = sum + next_sum;
    v[i + 1] = difference + next_difference;
    v[i + 2] = sum - next_sum;
    v[i + 3] = difference - next_difference;
  }
  for (std::size_t distance = 4; distance < kLanes; distance *= 2) {
    for (std::size_t start = 0; start < kBlock; start += 2 * distance) {
      for (std::size_t i = start; i < start + distance; i++) {
        const float a = v[i], b = v[i + distance];
        v[i] = a + b;
        v[i + distance] = a - b;
      }
    }
  }
}

template <std::size_t kBlock>
void between_vectors(float* v) {
  for (std::size_t distance = kLanes; distance < kBlock; distance *= 2) {
    for (std::size_t start = 0; start < kBlock; start += 2 * distance) {
      float *const low = v + start, *const high = low + distance;
      for (std::size_t i = 0; i < distance; i += kLanes) {
        const Floats a = load(low + i), b = load(high + i);
        store(low + i, a + b);
        store(high + i, a - b);
      }
    }
  }
}

// `from` and `to` convert one value.
template <std::size_t kBlock, class T, class From, class To>
void rotate_values(const T* x, std::size_t count, bool inverse, T* y, From from, To to) {
  const float scale = float(1 / std::sqrt(double(kBlock)));
  alignas(64) float v[kBlock];
  for (std::size_t start = 0; start < count; start += kBlock, x += kBlock, y += kBlock) {
    T own[kBlock];
    std::memcpy(own, x, sizeof own);
    for (std::size_t i = 0; i < kBlock; i++) v[i] = from(own[i]);
    if (!inverse) {
      for (std::size_t i = 0; i < kBlock; i++) v[i] *= kSigns[i];
    }
    within_vectors<kBlock>(v);
    between_vectors<kBlock>(v);
    for (std::size_t i = 0; i < kBlock; i++) v[i] *= scale;
    if (inverse) {
      for (std::size_t i = 0; i < kBlock; i++) v[i] *= kSigns[i];
    }
    for (std::size_t i = 0; i < kBlock; i++) own[i] = to(v[i]);
    std::memcpy(y, own, sizeof own);
  }
}

template <std::size_t kBlock>
void rotate_of_type(Activation type, const void* x, std::size_t count, bool inverse, void* y) {
  const auto* bits = static_cast<const std::uint16_t*>(x);
  auto* out = static_cast<std::uint16_t*>(y);
  switch (type) {
    case Activation::bf16:
      rotate_values<kBlock>(
          bits, count, inverse, out, [](std::uint16_t value) { return from_bf16(value); },
          [](float value) { return to_bf16(value); });
      break;
    case Activation::fp16:
      rotate_values<kBlock>(
          bits, count, inverse, out, [](std::uint16_t value) { return from_fp16(value); },
          [](float value) { return to_fp16(value); });
      break;
    case Activation::fp32: {
      const auto same = [](float value) { return value; };
      rotate_values<kBlock>(static_cast<const float*>(x), count, inverse, static_cast<float*>(y),
                            same, same);
      break;
    }
  }
}

void rotate_kernel(Activation type, const void* x, std::size_t count, std::size_t block,
                   bool inverse, void* y) {
  switch (block) {
    case 16:
      return rotate_of_type<16>(type, x, count, inverse, y);
    case 32:
      return rotate_of_type<32>(type, x, count, inverse, y);
    case 64:
      return rotate_of_type<64>(type, x, count, inverse, y);
    case 128:
      return rotate_of_type<128>(type, x, count, inverse, y);
    default:
      return rotate_of_type<256>(type, x, count, inverse, y);
  }
}

}  // namespace
}  // namespace fdk
