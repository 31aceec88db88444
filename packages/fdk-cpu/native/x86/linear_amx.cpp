// The linear kernels of AMX: GEMM with large m in tiles; the other kernels are those of AVX-512
// BF16.
#include "x86/gemm_panels_amx-inl.h"
#include "x86/linear_avx512bf16.h"
#include "common/kernels.h"

namespace fdk {
namespace {

// The tile registers, as gemm_panels_amx-inl.h uses them. GCC's intrinsics accept tile numbers only
// as literals.
struct Tiles {
  static void configure(const std::uint8_t (&rows)[8]) {
    struct {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {};
      std::uint8_t rows[16] = {};
    } config;
    static_assert(sizeof(config) == 64);
    for (int i = 0; i < 8; i++) {
      config.row_bytes[i] = 64;
      config.rows[i] = rows[i];
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  template <int kTile>
  FDK_INLINE static void load(const void* from, std::size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  FDK_INLINE static void store(void* to, std::size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kSum, int kRows, int kLanes>
  FDK_INLINE static void product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kRows), "i"(kLanes));
  }
  static void release() { asm volatile("tilerelease"); }
};

DispatchThresholds dispatch_thresholds_amx(const Weight&) {
  DispatchThresholds thresholds;
  thresholds.max_gemv_m = 2;
  thresholds.near_panel_bytes = std::size_t(1) << 20;
  return thresholds;
}

}  // namespace

extern const LinearKernels kLinearAmx = {
    .x_is_bf16 = true,
    .gemv_order = &kAvx512Bf16Orders.natural,
    .panel_order = &kAvx512Bf16Orders.natural,
    .panel = 2 * kAmxLanes,
    .panel_step = kAmxLanes,
    .gemv = gemv_avx512bf16,
    .dequantise = dequantise_avx512bf16,
    .gemm_panel = gemm_panel_tiles<Tiles>,
    .dgrad = nullptr,
    .two_pass = &kLutGemvAvx512Vnni,
    .gemv_rows = kAvx512Bf16GemvRows,
    .thresholds = dispatch_thresholds_amx,
    .write_panel = write_panel_avx512bf16,
    .pack_panel = pack_panel_avx512bf16,
    .block_rows = kAvx512Bf16BlockRows,
    .block_bytes = kAvx512Bf16BlockBytes,
    .far_block_rows = 256,
    .dequantise_prefetching = dequantise_prefetching_avx512bf16,
    .dgrad_panels = &kDgradAmx,
};

}  // namespace fdk
