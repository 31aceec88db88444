// Which product takes how many rows of x on AVX-512 BF16, by what products cost on this machine.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "x86/linear_avx512bf16.h"
#include "common/kernels.h"

namespace fdk {
namespace {

constexpr int kProducts = 6144, kChains = 16;

// Ticks of kProducts products of 512 bits, as many chains at once as hide their latency.
std::uint64_t ticks_of_products() {
  const std::uint64_t start = __rdtsc();
  for (int i = 0; i < kProducts / kChains; i++) {
    asm volatile(
        "vdpbf16ps %%zmm0, %%zmm0, %%zmm1\n\tvdpbf16ps %%zmm0, %%zmm0, %%zmm2\n\t"
        "vdpbf16ps %%zmm0, %%zmm0, %%zmm3\n\tvdpbf16ps %%zmm0, %%zmm0, %%zmm4\n\t"
        "vdpbf16ps %%zmm0, %%zmm0, %%zmm5\n\tvdpbf16ps %%zmm0, %%zmm0, %%zmm6\n\t"
        "vdpbf16ps %%zmm0, %%zmm0, %%zmm7\n\tvdpbf16ps %%zmm0, %%zmm0, %%zmm8\n\t"
        "vdpbf16ps %%zmm0, %%zmm0, %%zmm9\n\tvdpbf16ps %%zmm0, %%zmm0, %%zmm10\n\t"
        "vdpbf16ps %%zmm0, %%zmm0, %%zmm11\n\tvdpbf16ps %%zmm0, %%zmm0, %%zmm12\n\t"
        "vdpbf16ps %%zmm0, %%zmm0, %%zmm13\n\tvdpbf16ps %%zmm0, %%zmm0, %%zmm14\n\t"
        "vdpbf16ps %%zmm0, %%zmm0, %%zmm15\n\tvdpbf16ps %%zmm0, %%zmm0, %%zmm16"
        :
        :
        : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
          "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16");
  }
  return __rdtsc() - start;
}

// Ticks of kProducts cycles: integer products that wait for each other, three cycles each on every
// such processor.
std::uint64_t ticks_of_cycles() {
  constexpr int kAtOnce = 16;
  std::uint64_t value = 3;
  const std::uint64_t start = __rdtsc();
  for (int i = 0; i < kProducts / 3 / kAtOnce; i++) {
    asm volatile(
        "imul %0, %0\n\timul %0, %0\n\timul %0, %0\n\timul %0, %0\n\t"
        "imul %0, %0\n\timul %0, %0\n\timul %0, %0\n\timul %0, %0\n\t"
        "imul %0, %0\n\timul %0, %0\n\timul %0, %0\n\timul %0, %0\n\t"
        "imul %0, %0\n\timul %0, %0\n\timul %0, %0\n\timul %0, %0"
        : "+r"(value));
  }
  return __rdtsc() - start;
}

bool has_tables(const Weight& w) { return w.bits <= 5 && w.groups_per_tile < 8; }

// Whether five and six rows meet a decoded code without tables. With zero points they do not fit
// the registers (8 bits, m = 9: 2.9 ms where panels take 2.4).
bool takes_six(const Weight& w) {
  return w.groups_per_tile <= 2 && w.zeros == nullptr && is_wide_avx512bf16();
}

// Rows of x up to which a wide machine decodes the weight anew for every few of them.
std::size_t few_rows(const Weight& w) {
  const bool large_groups = w.groups_per_tile <= 2;  // 64 positions and more
  if (has_tables(w)) return kAvx512Bf16Rows;
  if (w.zeros != nullptr) return large_groups ? 2 : 1;
  if (!large_groups) return 4;
  return w.bits == 6 ? 10 : kAvx512Bf16Rows;
}

}  // namespace

double cycles_of_products_avx512bf16() {
  constexpr int kTurns = 8;
  std::uint64_t products = std::numeric_limits<std::uint64_t>::max(), cycles = products;
  for (int turn = 0; turn < kTurns; turn++) {
    products = std::min(products, ticks_of_products());
    cycles = std::min(cycles, ticks_of_cycles());
  }
  return double(products) / double(std::max<std::uint64_t>(1, cycles));
}

// Whether two products of 512 bits begin in a cycle, measured once (30 us): the least of some turns
// of each, for other work only adds. Where they do (0.52 to 0.53 cycles each on Zen 5) everything
// else that a product needs counts twice as much beside it as where one does (Zen 4). CPUID tells
// as much of AMD's processors (Fn8000_001A, FP512), but a virtual machine may hide it, as one did.
bool is_wide_avx512bf16() {
  static const bool wide = 4 * cycles_of_products_avx512bf16() < 3;
  return wide;
}

std::size_t most_rows_avx512bf16(const Weight& w) {
  return has_tables(w) || takes_six(w) ? kAvx512Bf16Rows : 4;
}

// By measurement, 4096 x 4096, one thread: on a wide machine m from 2 to 64 and groups of 16, 32
// and 64, on another m from 5 to 16 and groups of 64.
RowLimits limits_avx512bf16(const Weight& w) {
  RowLimits limits;
  if (is_wide_avx512bf16()) {
    limits.gemv = few_rows(w);
    limits.stripes = limits.rest = 24;
    // 4096 x 4096, m = 512: 37.9 ms, fetched 38.0; 4096 x 14336: 139, fetched 134 (Zen 5). Where
    // one product begins in a cycle the fetches cost more than they gain.
    limits.near_panels = std::size_t(4) << 20;
  } else if (!has_tables(w)) {
    // Groups of 16 without tables keep the usual limit.
    if (w.bits > 5) limits.gemv = w.bits == 7 ? 6 : 8;
  } else if (w.bits == 5) {
    limits.gemv = 6;
  }
  return limits;
}

}  // namespace fdk
