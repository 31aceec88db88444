// decode_ops.h over the vector operations V of an instruction set.
//
// V has: Float, kLanes, load and store of a dtype (store rounds), set1, add, sub, mul, div, fma,
// max (b where it is NaN), round (to nearest), round_to (a dtype), power_of_two (of integers in
// float lanes) and sum.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "common/decode_ops.h"
#include "common/float_convert.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

// One value at a time, for the rest of a row.
struct ScalarOps {
  using Float = float;
  static constexpr std::size_t kLanes = 1;

  template <Activation kType>
  static Float load(const void* p, std::size_t i) {
    return read(p, i, kType);
  }
  template <Activation kType>
  static void store(void* p, std::size_t i, Float v) {
    write(p, i, kType, v);
  }
  static Float set1(float v) { return v; }
  static Float add(Float a, Float b) { return a + b; }
  static Float sub(Float a, Float b) { return a - b; }
  static Float mul(Float a, Float b) { return a * b; }
  static Float div(Float a, Float b) { return a / b; }
  static Float fma(Float a, Float b, Float c) { return a * b + c; }
  static Float max(Float a, Float b) { return a > b ? a : b; }
  static Float round(Float v) { return std::nearbyint(v); }
  static Float power_of_two(Float v) { return ::power_of_two(int(v)); }
  static float sum(Float v) { return v; }
  template <Activation kType>
  static Float round_to(Float v) {
    std::uint32_t memory;
    write(&memory, 0, kType, v);
    return read(&memory, 0, kType);
  }
};

// The largest exponent of `exp`.
constexpr float kMostExponent = 88;

// e^x for x <= kMostExponent, at least e^-87.3. With n = round(x / ln 2), the rest x - n ln 2 is at
// most ln(2) / 2, for which the Taylor polynomial of degree 6 is exact to 2^-22.
template <class V>
FDK_INLINE typename V::Float exp(typename V::Float x) {
  using Float = typename V::Float;
  constexpr float kLeast = -87.3f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  const Float bounded = V::max(V::set1(kLeast), x);
  const Float n = V::round(V::mul(bounded, V::set1(1.44269504f)));
  Float rest = V::fma(n, V::set1(-kLn2High), bounded);
  rest = V::fma(n, V::set1(-kLn2Low), rest);
  constexpr float kTerms[] = {1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f};
  Float sum = V::set1(1.f / 720);
  FDK_UNROLL
  for (const float term : kTerms) sum = V::fma(sum, rest, V::set1(term));
  return V::mul(sum, V::power_of_two(n));
}

// Calls f<V>(i) for whole vectors, then f<ScalarOps>(i) for the rest.
template <class V, class F>
FDK_INLINE void for_each(std::size_t n, F f) {
  std::size_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) f(V{}, i);
  for (; i < n; i++) f(ScalarOps{}, i);
}

template <class V, Activation kType>
struct TypedOps {
  using Float = typename V::Float;
  static constexpr Activation kFloat = Activation::fp32;

  static void widen(const void* x, std::size_t n, float* out) {
    for_each<V>(n, [&](auto v, std::size_t i) FDK_LAMBDA {
      using U = decltype(v);
      U::template store<kFloat>(out, i, U::template load<kType>(x, i));
    });
  }

  static float dot(const float* x, const void* w, std::size_t n) {
    constexpr std::size_t kSums = 4, kLanes = V::kLanes;  // four hide the latency of an FMA
    Float sums[kSums];
    FDK_UNROLL
    for (std::size_t j = 0; j < kSums; j++) sums[j] = V::set1(0);
    std::size_t i = 0;
    for (; i + kSums * kLanes <= n; i += kSums * kLanes) {
      FDK_UNROLL
      for (std::size_t j = 0; j < kSums; j++) {
        const std::size_t at = i + j * kLanes;
        sums[j] = V::fma(V::template load<kFloat>(x, at), V::template load<kType>(w, at), sums[j]);
      }
    }
    for (; i + kLanes <= n; i += kLanes) {
      sums[0] = V::fma(V::template load<kFloat>(x, i), V::template load<kType>(w, i), sums[0]);
    }
    float sum = V::sum(V::add(V::add(sums[0], sums[1]), V::add(sums[2], sums[3])));
    for (; i < n; i++) sum += x[i] * read(w, i, kType);
    return sum;
  }

  static void add(void* x, const void* y, std::size_t n) {
    for_each<V>(n, [&](auto v, std::size_t i) FDK_LAMBDA {
      using U = decltype(v);
      U::template store<kType>(
          x, i, U::add(U::template load<kType>(x, i), U::template load<kType>(y, i)));
    });
  }

  static void rms_norm(const void* x, const void* weight, std::size_t n, float eps, void* out) {
    Float sums = V::set1(0);
    std::size_t i = 0;
    for (; i + V::kLanes <= n; i += V::kLanes) {
      const Float value = V::template load<kType>(x, i);
      sums = V::fma(value, value, sums);
    }
    float sum = V::sum(sums);
    for (; i < n; i++) sum += read(x, i, kType) * read(x, i, kType);
    const float factor = 1 / std::sqrt(sum / float(n) + eps);
    for_each<V>(n, [&](auto v, std::size_t at) FDK_LAMBDA {
      using U = decltype(v);
      const auto scaled =
          U::template round_to<kType>(U::mul(U::template load<kType>(x, at), U::set1(factor)));
      U::template store<kType>(out, at, U::mul(scaled, U::template load<kType>(weight, at)));
    });
  }

  static void rotary(const void* x, const void* cos, const void* sin, std::size_t d, void* out) {
    const std::size_t half = d / 2;
    for_each<V>(half, [&](auto v, std::size_t i) FDK_LAMBDA {
      using U = decltype(v);
      const auto first = U::template load<kType>(x, i);
      const auto second = U::template load<kType>(x, half + i);
      const auto product = [&](auto value, const void* factors, std::size_t at) FDK_LAMBDA {
        return U::template round_to<kType>(U::mul(value, U::template load<kType>(factors, at)));
      };
      U::template store<kType>(out, i, U::sub(product(first, cos, i), product(second, sin, i)));
      U::template store<kType>(
          out, half + i, U::add(product(second, cos, half + i), product(first, sin, half + i)));
    });
  }

  static void swiglu(const void* gate, const void* up, std::size_t n, void* out) {
    for_each<V>(n, [&](auto v, std::size_t i) FDK_LAMBDA {
      using U = decltype(v);
      const auto x = U::template load<kType>(gate, i);
      const auto power = exp<U>(U::sub(U::set1(0), U::max(U::set1(-kMostExponent), x)));
      const auto silu = U::div(x, U::add(U::set1(1), power));
      U::template store<kType>(
          out, i, U::mul(U::template round_to<kType>(silu), U::template load<kType>(up, i)));
    });
  }

  static void attend(const AttentionTask& task) {
    const std::size_t d = task.d, cached = task.length - 1;
    float *const scores = task.scores, *const q = task.sums, *const sums = task.sums + d;
    widen(task.q, d, q);
    constexpr std::size_t kItem = bytes_of(kType);
    const auto row = [&](const void* rows, std::size_t i) {
      return static_cast<const std::uint8_t*>(rows) + i * d * kItem;
    };
    for (std::size_t i = 0; i < cached; i++) scores[i] = task.scale * dot(q, row(task.keys, i), d);
    scores[cached] = task.scale * dot(q, task.last_key, d);
    float most = scores[0];
    for (std::size_t i = 1; i < task.length; i++) most = std::max(most, scores[i]);
    Float totals = V::set1(0);
    std::size_t i = 0;
    for (; i + V::kLanes <= task.length; i += V::kLanes) {
      const Float power = exp<V>(V::sub(V::template load<kFloat>(scores, i), V::set1(most)));
      V::template store<kFloat>(scores, i, power);
      totals = V::add(totals, power);
    }
    float total = V::sum(totals);
    for (; i < task.length; i++) total += scores[i] = exp<ScalarOps>(scores[i] - most);
    for_each<V>(d, [&](auto v, std::size_t at) FDK_LAMBDA {
      using U = decltype(v);
      U::template store<kFloat>(
          sums, at, U::mul(U::set1(scores[cached]), U::template load<kType>(task.last_value, at)));
    });
    add_values(scores, task.values, cached, d, sums);
    for_each<V>(d, [&](auto v, std::size_t at) FDK_LAMBDA {
      using U = decltype(v);
      U::template store<kType>(task.out, at,
                               U::mul(U::template load<kFloat>(sums, at), U::set1(1 / total)));
    });
  }

 private:
  // sums[d] += weights[count] @ values[count, d], eight vectors of sums in registers at a time.
  static void add_values(const float* weights, const void* values, std::size_t count, std::size_t d,
                         float* sums) {
    constexpr std::size_t kVectors = 8, kLanes = V::kLanes;
    std::size_t at = 0;
    for (; at + kVectors * kLanes <= d; at += kVectors * kLanes) {
      Float of[kVectors];
      FDK_UNROLL
      for (std::size_t j = 0; j < kVectors; j++) {
        of[j] = V::template load<kFloat>(sums, at + j * kLanes);
      }
      for (std::size_t i = 0; i < count; i++) {
        const Float weight = V::set1(weights[i]);
        FDK_UNROLL
        for (std::size_t j = 0; j < kVectors; j++) {
          of[j] = V::fma(weight, V::template load<kType>(values, i * d + at + j * kLanes), of[j]);
        }
      }
      FDK_UNROLL
      for (std::size_t j = 0; j < kVectors; j++) {
        V::template store<kFloat>(sums, at + j * kLanes, of[j]);
      }
    }
    if (at == d) return;
    for (std::size_t i = 0; i < count; i++) {
      for_each<V>(d - at, [&](auto v, std::size_t rest) FDK_LAMBDA {
        using U = decltype(v);
        const auto value = U::template load<kType>(values, i * d + at + rest);
        U::template store<kFloat>(
            sums, at + rest,
            U::fma(U::set1(weights[i]), value, U::template load<kFloat>(sums, at + rest)));
      });
    }
  }
};

template <class V>
struct OpsOf {
  template <class F>
  static auto with_type(Activation type, F f) {
    switch (type) {
      case Activation::bf16:
        return f(TypedOps<V, Activation::bf16>());
      case Activation::fp16:
        return f(TypedOps<V, Activation::fp16>());
      default:
        return f(TypedOps<V, Activation::fp32>());
    }
  }

  static void widen(Activation type, const void* x, std::size_t n, float* out) {
    with_type(type, [&](auto ops) { ops.widen(x, n, out); });
  }
  static float dot(Activation type, const float* x, const void* w, std::size_t n) {
    return with_type(type, [&](auto ops) { return ops.dot(x, w, n); });
  }
  static void add(Activation type, void* x, const void* y, std::size_t n) {
    with_type(type, [&](auto ops) { ops.add(x, y, n); });
  }
  static void rms_norm(Activation type, const void* x, const void* weight, std::size_t n, float eps,
                       void* out) {
    with_type(type, [&](auto ops) { ops.rms_norm(x, weight, n, eps, out); });
  }
  static void rotary(Activation type, const void* x, const void* cos, const void* sin,
                     std::size_t d, void* out) {
    with_type(type, [&](auto ops) { ops.rotary(x, cos, sin, d, out); });
  }
  static void swiglu(Activation type, const void* gate, const void* up, std::size_t n, void* out) {
    with_type(type, [&](auto ops) { ops.swiglu(gate, up, n, out); });
  }
  static void attend(Activation type, const AttentionTask& task) {
    with_type(type, [&](auto ops) { ops.attend(task); });
  }
};

template <class V>
constexpr DecodeOps decode_ops_of() {
  using Ops = OpsOf<V>;
  return {Ops::widen, Ops::dot, Ops::add, Ops::rms_norm, Ops::rotary, Ops::swiglu, Ops::attend};
}

}  // namespace
}  // namespace fdk
