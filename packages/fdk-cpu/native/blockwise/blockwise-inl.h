// The blockwise kernels over the vector operations V of an instruction set.
//
// V has kLanes float32 lanes: Float; Codes, as many 32-bit integers; Table16, 16 floats that are
// looked up by the low 4 bits of Codes; and the functions used below.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "blockwise/block_scale.h"
#include "common/float_convert.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

// Calls f with the type of the values as a constant.
template <class F>
FDK_INLINE void with_type(Activation type, F f) {
  switch (type) {
    case Activation::bf16:
      return f(Int<int(Activation::bf16)>{});
    case Activation::fp16:
      return f(Int<int(Activation::fp16)>{});
    case Activation::fp32:
      return f(Int<int(Activation::fp32)>{});
  }
}

template <int kType>
FDK_INLINE const std::uint8_t* at(const void* values, std::size_t i) {
  return static_cast<const std::uint8_t*>(values) + i * bytes_of(Activation(kType));
}

template <int kType>
FDK_INLINE std::uint8_t* at(void* values, std::size_t i) {
  return static_cast<std::uint8_t*>(values) + i * bytes_of(Activation(kType));
}

// Calls f(i, values) for each vector of values [begin, end); the last one is padded with zeros.
template <class V, int kType, class F>
FDK_INLINE void each_vector(const void* values, std::size_t begin, std::size_t end, F f) {
  std::size_t i = begin;
  for (; i + V::kLanes <= end; i += V::kLanes) f(i, V::template load<kType>(at<kType>(values, i)));
  if (i == end) return;
  std::uint8_t rest[4 * V::kLanes] = {};
  std::memcpy(rest, at<kType>(values, i), (end - i) * bytes_of(Activation(kType)));
  f(i, V::template load<kType>(rest));
}

template <class V, int kType>
FDK_INLINE float absmax_of(const void* values, std::size_t begin, std::size_t end) {
  auto largest = V::no_magnitude();
  each_vector<V, kType>(values, begin, end, [&](std::size_t, typename V::Float x) FDK_LAMBDA {
    largest = V::larger_magnitude(largest, x);
  });
  return V::largest(largest);
}

template <class V>
struct Nearest8 {
  static constexpr std::size_t kPerByte = 1;
  const std::uint32_t* keys;

  FDK_INLINE explicit Nearest8(const NearestCode& nearest) : keys(nearest.keys.data()) {}
  FDK_INLINE void store(std::uint8_t* to, typename V::Float x) const {
    V::store_bytes(to, V::codes_by_key(keys, x));
  }
};

// A binary search among 15 midpoints in registers. Level l has 2^l of them, from left to right.
template <class V>
struct Nearest4 {
  static constexpr std::size_t kPerByte = 2;
  typename V::Table levels[4];
  typename V::Codes16 codes;

  FDK_INLINE explicit Nearest4(const NearestCode& nearest) {
    FDK_UNROLL
    for (int level = 0; level < 4; level++) {
      float entries[16] = {};
      const int width = 16 >> level;
      for (int i = 0; i < 1 << level; i++) {
        entries[i] = nearest.midpoints[i * width + width / 2 - 1];
      }
      levels[level] = V::table(entries);
    }
    codes = V::codes16(nearest.codes);
  }

  FDK_INLINE void store(std::uint8_t* to, typename V::Float x) const {
    typename V::Codes rank = V::no_codes();
    FDK_UNROLL
    for (int level = 0; level < 4; level++) {
      rank = V::twice_and_above(rank, x, V::look_up(levels[level], rank));
    }
    V::store_pairs(to, V::look_up_codes(codes, rank));
  }
};

template <class V, int kType, class Nearest>
FDK_INLINE void encode_block(const QuantiseTask& task, const Nearest& nearest, std::size_t begin,
                             std::size_t end) {
  using Float = typename V::Float;
  constexpr std::size_t kBytes = V::kLanes / Nearest::kPerByte;
  const BlockScale scale = scale_of(task, begin);
  const auto factor = V::set1(scale.factor);
  const auto store = [&](std::size_t i, Float scaled) FDK_LAMBDA {
    std::uint8_t* to = task.packed + i / Nearest::kPerByte;
    if (i + V::kLanes <= end) return nearest.store(to, scaled);
    std::uint8_t rest[kBytes];
    nearest.store(rest, scaled);
    std::memcpy(to, rest, ceil_div(end - i, Nearest::kPerByte));
  };
  if (scale.divides) {
    each_vector<V, kType>(task.values, begin, end,
                          [&](std::size_t i, Float x) FDK_LAMBDA { store(i, V::div(x, factor)); });
  } else {
    each_vector<V, kType>(task.values, begin, end,
                          [&](std::size_t i, Float x) FDK_LAMBDA { store(i, V::mul(x, factor)); });
  }
}

// Calls f(type, nearest) with both as constants.
template <class V, class F>
FDK_INLINE void with_nearest(const QuantiseTask& task, F f) {
  with_type(task.type, [&](auto type) FDK_LAMBDA {
    if (task.nearest->entries > 16) return f(type, Nearest8<V>(*task.nearest));
    return f(type, Nearest4<V>(*task.nearest));
  });
}

template <class V>
float absmax(const QuantiseTask& task, std::size_t begin, std::size_t end) {
  float found = 0;
  with_type(task.type, [&](auto type) FDK_LAMBDA {
    found = absmax_of<V, type.value>(task.values, begin, end);
  });
  return found;
}

template <class V>
void encode(const QuantiseTask& task, std::size_t begin, std::size_t end) {
  with_nearest<V>(task, [&](auto type, const auto& nearest)
                            FDK_LAMBDA { encode_block<V, type.value>(task, nearest, begin, end); });
}

template <class V>
void quantise(const QuantiseTask& task, std::size_t begin, std::size_t end) {
  with_nearest<V>(task, [&](auto type, const auto& nearest) FDK_LAMBDA {
    const auto absmax =
        [&](const QuantiseTask& t, std::size_t first, std::size_t last)
            FDK_LAMBDA -> float { return absmax_of<V, type.value>(t.values, first, last); };
    quantise_each(task, begin, end, absmax,
                  [&](const QuantiseTask& t, std::size_t first, std::size_t last)
                      FDK_LAMBDA { encode_block<V, type.value>(t, nearest, first, last); });
  });
}

// Writes values [begin, end) of a block, one vector of value(codes) at a time.
template <class V, int kType, std::size_t kPerByte, class Value>
FDK_INLINE void write_values(const DequantiseTask& task, std::size_t begin, std::size_t end,
                             Value value) {
  std::size_t i = begin;
  for (; i + V::kLanes <= end; i += V::kLanes) {
    V::template store<kType>(at<kType>(task.values, i), value(task.packed + i / kPerByte));
  }
  if (i == end) return;
  std::uint8_t codes[V::kLanes / kPerByte] = {}, values[4 * V::kLanes];
  std::memcpy(codes, task.packed + i / kPerByte, ceil_div(end - i, kPerByte));
  V::template store<kType>(values, value(codes));
  std::memcpy(at<kType>(task.values, i), values, (end - i) * bytes_of(Activation(kType)));
}

template <class V>
void dequantise_8bit(const DequantiseTask& task, std::size_t begin, std::size_t end) {
  using Float = typename V::Float;
  with_type(task.type, [&](auto type) FDK_LAMBDA {
    each_block(task.block, begin, end,
               [&](std::size_t block, std::size_t first, std::size_t last) FDK_LAMBDA {
                 const auto absmax = V::set1(task.absmax[block]);
                 write_values<V, type.value, 1>(
                     task, first, last, [&](const std::uint8_t* codes) FDK_LAMBDA -> Float {
                       return V::mul(V::gather(task.code, V::load_bytes(codes)), absmax);
                     });
               });
  });
}

// Rounds the 16 products of a block once and looks up 32 values of two bytes at a time (1024 x 4096
// to bf16, one thread: 0.64 -> 0.36 ms).
template <class V, int kType>
FDK_INLINE void write_halves(const DequantiseTask& task, float absmax, std::size_t begin,
                             std::size_t end) {
  constexpr std::size_t kStep = 32, kItem = sizeof(std::uint16_t);
  alignas(64) std::uint16_t products[16];
  const auto scaled = V::table16(task.code, absmax);
  FDK_UNROLL
  for (std::size_t i = 0; i < 16; i += V::kLanes) {
    V::template store<kType>(at<kType>(products, i), V::part_of(scaled, i));
  }
  const auto table = V::half_table(products);
  std::size_t i = begin;
  for (; i + kStep <= end; i += kStep) {
    V::store_halves(at<kType>(task.values, i), table, task.packed + i / 2);
  }
  if (i == end) return;
  std::uint8_t codes[kStep / 2] = {}, values[kStep * kItem];
  std::memcpy(codes, task.packed + i / 2, ceil_div(end - i, 2));
  V::store_halves(values, table, codes);
  std::memcpy(at<kType>(task.values, i), values, (end - i) * kItem);
}

template <class V>
void dequantise_4bit(const DequantiseTask& task, std::size_t begin, std::size_t end) {
  using Float = typename V::Float;
  with_type(task.type, [&](auto type) FDK_LAMBDA {
    each_block(task.block, begin, end,
               [&](std::size_t block, std::size_t first, std::size_t last) FDK_LAMBDA {
                 if constexpr (Activation(type.value) != Activation::fp32) {
                   write_halves<V, type.value>(task, task.absmax[block], first, last);
                 } else {
                   const auto table = V::table16(task.code, task.absmax[block]);
                   write_values<V, type.value, 2>(
                       task, first, last, [&](const std::uint8_t* codes) FDK_LAMBDA -> Float {
                         return V::look_up16(table, V::load_nibbles(codes));
                       });
                 }
               });
  });
}

template <class V>
constexpr BlockKernels block_kernels_of() {
  return {absmax<V>, encode<V>, quantise<V>, dequantise_8bit<V>, dequantise_4bit<V>};
}

}  // namespace
}  // namespace fdk
