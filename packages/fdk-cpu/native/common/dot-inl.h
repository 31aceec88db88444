// Dot products over the vector operations V of an instruction set.
//
// V has, for kLanes values at a time: Sum, zero, add, sum, and add_products<kType>(sum, x, w),
// where x and w are addresses of values of a dtype.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/dense.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

template <class V, int kType>
float dot(const void* x, const void* w, std::size_t k) {
  constexpr std::size_t kItem = bytes_of(Activation(kType)), kLanes = V::template kLanes<kType>;
  constexpr std::size_t kSums = 4;  // independent sums, which hide the latency of one product
  const auto* a = static_cast<const std::uint8_t*>(x);
  const auto* b = static_cast<const std::uint8_t*>(w);
  typename V::Sum sums[kSums];
  FDK_UNROLL
  for (std::size_t j = 0; j < kSums; j++) sums[j] = V::zero();
  std::size_t i = 0;
  for (; i + kSums * kLanes <= k; i += kSums * kLanes) {
    FDK_UNROLL
    for (std::size_t j = 0; j < kSums; j++) {
      const std::size_t at = (i + j * kLanes) * kItem;
      __builtin_prefetch(b + at + kPrefetchBytes);
      sums[j] = V::template add_products<kType>(sums[j], a + at, b + at);
    }
  }
  for (; i + kLanes <= k; i += kLanes) {
    sums[0] = V::template add_products<kType>(sums[0], a + i * kItem, b + i * kItem);
  }
  if (i < k) {
    std::uint8_t rest[2][kLanes * kItem] = {};
    std::memcpy(rest[0], a + i * kItem, (k - i) * kItem);
    std::memcpy(rest[1], b + i * kItem, (k - i) * kItem);
    sums[1] = V::template add_products<kType>(sums[1], rest[0], rest[1]);
  }
  return V::sum(V::add(V::add(sums[0], sums[1]), V::add(sums[2], sums[3])));
}

template <class V>
constexpr Dots dots_of() {
  return {dot<V, int(Activation::bf16)>, dot<V, int(Activation::fp32)>};
}

}  // namespace
}  // namespace fdk
