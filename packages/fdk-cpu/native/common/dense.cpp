#include "common/dense.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/float_convert.h"
#include "common/dispatch.h"
#include "common/kernels.h"
#include "common/thread_pool.h"

namespace fdk {
namespace {

// Rows of w per piece of the GEMV.
constexpr std::size_t kRows = 16;
// The block of w that panels of x are multiplied with: at most 96 KiB, which fits any L2.
constexpr std::size_t kBlockRows = 48, kBlockDepth = 512;

const Dots& dots() {
  [[maybe_unused]] const Isa isa = current_isa();
#if defined(__aarch64__)
  if (isa >= Isa::neonbf16 && isa < Isa::avx2) return kDotsNeonBf16;
  if (isa == Isa::neon || isa == Isa::neondot) return kDotsNeon;
#endif
#if defined(__x86_64__)
  if (isa >= Isa::avx512bf16) return kDotsAvx512Bf16;
  if (isa == Isa::avx512) return kDotsAvx512;
  if (isa == Isa::avx2) return kDotsAvx2;
#endif
  return kDotsScalar;
}

// Value i of p as T: float, or the bits of a bf16.
template <class T>
T element(const void* p, std::size_t i, Activation type) {
  if constexpr (sizeof(T) == 2) return static_cast<const std::uint16_t*>(p)[i];
  return T(read(p, i, type));
}

// The GEMM with kernels that take T: float, or uint16_t for the bits of bf16.
template <class T>
class Product {
 public:
  Product(const LinearKernels& kernels, Activation type, const void* x, std::size_t m,
          const void* w, std::size_t n, std::size_t k, void* y)
      : kernels_(kernels), type_(type), x_(x), m_(m), w_(w), n_(n), k_(k), y_(y) {
    const std::size_t last = (m - 1) % kernels.panel + 1;
    lanes_ = (m - last) + ceil_div(last, kernels.panel_step) * kernels.panel_step;
    depth_ = ceil_div(k, kPanelDepth) * kPanelDepth;
    panels_.resize(lanes_ * depth_);
  }

  void run(std::size_t threads) {
    parallel_for(ceil_div(lanes_, kernels_.panel), 1, threads,
                 [this](std::size_t begin, std::size_t end) {
                   for (std::size_t i = begin; i < end; i++) pack_panel(i * kernels_.panel);
                 });
    parallel_for(ceil_div(n_, kBlockRows), 1, threads, [this](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; i++) multiply(i * kBlockRows);
    });
  }

 private:
  static constexpr std::size_t kUnit = sizeof(T) == 2 ? 2 : 1;

  std::size_t width(std::size_t lane) const { return std::min(kernels_.panel, lanes_ - lane); }

  // Packs rows of x from `lane` on into a panel [depth / unit][width][unit], padded with zeros.
  void pack_panel(std::size_t lane) {
    T* out = panels_.data() + lane * depth_;
    const std::size_t wide = width(lane), rows = std::min(wide, m_ - lane);
    for (std::size_t row = 0; row < rows; row++) {
      for (std::size_t i = 0; i < k_; i++) {
        out[(i / kUnit * wide + row) * kUnit + i % kUnit] =
            element<T>(x_, (lane + row) * k_ + i, type_);
      }
    }
  }

  // Copies a block of w and pads it with zeros.
  void load(std::size_t row, std::size_t rows, std::size_t first, std::size_t depth, T* out) const {
    for (std::size_t r = 0; r < rows; r++, out += kBlockDepth) {
      std::fill_n(out, kBlockDepth, T(0));
      if (row + r >= n_) continue;
      const std::size_t from = (row + r) * k_ + first, count = std::min(depth, k_ - first);
      if (bytes_of(type_) == sizeof(T)) {
        std::memcpy(out, static_cast<const T*>(w_) + from, count * sizeof(T));
      } else {
        for (std::size_t i = 0; i < count; i++) out[i] = element<T>(w_, from + i, type_);
      }
    }
  }

  void multiply(std::size_t row) const {
    const std::size_t there = std::min(kBlockRows, n_ - row);
    const std::size_t rows = ceil_div(there, kTileRows) * kTileRows;
    std::vector<T> block(rows * kBlockDepth);
    std::vector<float> sums(rows * lanes_);
    for (std::size_t first = 0; first < depth_; first += kBlockDepth) {
      const std::size_t depth = std::min(kBlockDepth, depth_ - first);
      load(row, rows, first, depth, block.data());
      for (std::size_t lane = 0; lane < lanes_; lane += kernels_.panel) {
        const std::size_t wide = width(lane);
        const T* panel = panels_.data() + lane * depth_ + first * wide;
        kernels_.gemm_panel(GemmPanelTask{block.data(), rows, kBlockDepth, depth, panel, wide,
                                          sums.data() + lane * rows});
      }
    }
    for (std::size_t i = 0; i < m_; i++) {
      const std::size_t lane = i / kernels_.panel * kernels_.panel, wide = width(lane);
      const float* sum = sums.data() + lane * rows + (i - lane);
      for (std::size_t r = 0; r < there; r++) write(y_, i * n_ + row + r, type_, sum[r * wide]);
    }
  }

  const LinearKernels& kernels_;
  Activation type_;
  const void* x_;
  std::size_t m_;
  const void* w_;
  std::size_t n_, k_;
  void* y_;
  std::size_t lanes_, depth_;
  std::vector<T> panels_;
};

template <Activation kType>
float dot(const void* x, const void* w, std::size_t k) {
  float sum = 0;
  for (std::size_t i = 0; i < k; i++) sum += read(x, i, kType) * read(w, i, kType);
  return sum;
}

}  // namespace

extern const Dots kDotsScalar = {dot<Activation::bf16>, dot<Activation::fp32>};

void dense_gemv(Activation type, const void* x, const void* w, std::size_t n, std::size_t k,
                void* y, std::size_t threads) {
  const Dot product = type == Activation::bf16 ? dots().bf16 : dots().fp32;
  const auto* rows = static_cast<const std::uint8_t*>(w);
  parallel_for(n, kRows, threads, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; i++) {
      write(y, i, type, product(x, rows + i * k * bytes_of(type), k));
    }
  });
}

void dense_gemm(Activation type, const void* x, std::size_t m, const void* w, std::size_t n,
                std::size_t k, void* y, std::size_t threads) {
  if (m == 0 || n == 0) return;
  const LinearKernels& kernels = linear_kernels_for(current_isa(), type);
  if (kernels.x_is_bf16) {
    Product<std::uint16_t>(kernels, type, x, m, w, n, k, y).run(threads);
  } else {
    Product<float>(kernels, type, x, m, w, n, k, y).run(threads);
  }
}

}  // namespace fdk
