// The dispatch thresholds of AVX-512 BF16, which depend on the throughput of products: a cost
// model.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "x86/linear_avx512bf16.h"
#include "common/kernels.h"

namespace fdk {
namespace {

constexpr int kProducts = 6144, kChains = 16;

// TSC ticks of kProducts 512-bit products, in enough chains to hide their latency.
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

// TSC ticks of kProducts cycles, by dependent integer products of three cycles each.
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

// True if five and six rows of x can share one decoding without scaled codebooks. With zero points
// they do not fit the registers (8 bits, m = 9: 2.9 ms, with panels 2.4).
bool six_rows_fit(const Weight& w) {
  return w.groups_per_tile <= 2 && w.zeros == nullptr && is_wide_avx512bf16();
}

// The largest m for which a wide machine decodes the weight again for every few rows.
std::size_t max_gemv_m(const Weight& w) {
  const bool large_groups = w.groups_per_tile <= 2;  // 64 or more positions
  if (has_tables(w)) return kAvx512Bf16GemvRows;
  if (w.zeros != nullptr) return large_groups ? 2 : 1;
  if (!large_groups) return 4;
  return w.bits == 6 ? 10 : kAvx512Bf16GemvRows;
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

// True if two 512-bit products start per cycle (Zen 5: 0.52 cycles each; Zen 4: 1). If so, all
// other instructions cost twice as much relative to a product. Measured once, in 30 us,
// because a virtual machine may hide the CPUID bit (Fn8000_001A, FP512). The least of several
// turns is used.
bool is_wide_avx512bf16() {
  static const bool wide = 4 * cycles_of_products_avx512bf16() < 3;
  return wide;
}

std::size_t rows_per_pass_avx512bf16(const Weight& w) {
  return has_tables(w) || six_rows_fit(w) ? kAvx512Bf16GemvRows : 4;
}

// Measured with 4096 x 4096 and one thread: on a wide machine for m from 2 to 64 and groups of 16,
// 32 and 64, on others for m from 5 to 16 and groups of 64.
DispatchThresholds dispatch_thresholds_avx512bf16(const Weight& w) {
  DispatchThresholds thresholds;
  if (is_wide_avx512bf16()) {
    thresholds.max_gemv_m = max_gemv_m(w);
    thresholds.max_stripes_m = thresholds.max_rest = 24;
    // Zen 5, 4096 x 14336, m = 512: 139 -> 134 ms with prefetching. On machines that are not wide
    // it costs more than it gains.
    thresholds.near_panel_bytes = std::size_t(4) << 20;
  } else if (!has_tables(w)) {
    // Groups of 16 without scaled codebooks keep the default.
    if (w.bits > 5) thresholds.max_gemv_m = w.bits == 7 ? 6 : 8;
  } else if (w.bits == 5) {
    thresholds.max_gemv_m = 6;
  }
  return thresholds;
}

}  // namespace fdk
