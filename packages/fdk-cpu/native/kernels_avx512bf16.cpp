// AVX-512 with BF16 and VBMI: bf16 activations, products of pairs summed in float32.
//
// The values before their scale are bf16 exactly (a codebook rounded to bf16, or codes below 256),
// so the dot products of a group are exact in their products; the scale is applied to the sums.
// Zero points are subtracted from the sums too: sum x (code - zero) = sum x code - zero sum x,
// lane by lane, so that a single nonzero x still gives exactly (code - zero) scale.
#include <immintrin.h>

#include "avx512bf16.h"
#include "avx512bf16_values.h"
#include "kernels.h"
#include "simd_float.h"

namespace fdk {
namespace {

template <int kBits, int kGroups, bool kAffine, int kM>
void gemv_stripes(const GemvTask& task, std::size_t begin, std::size_t end) {
  constexpr std::size_t kBytes = tile_bytes(kBits);
  constexpr int kRun = kGroups >= kSteps ? 1 : kSteps / kGroups;  // steps that share a scale
  const Weight& w = *task.weight;
  const Table16<kBits> table(w.table);
  const std::uint16_t* x[kM];  // past the last row it is repeated, and the result dropped
  const float* x_sums[kM];
  FDK_UNROLL
  for (int m = 0; m < kM; m++) {
    const std::size_t row = std::size_t(m) < task.m ? std::size_t(m) : task.m - 1;
    x[m] = static_cast<const std::uint16_t*>(task.x) + row * w.tiles * kTileK;
    if constexpr (kAffine) x_sums[m] = task.x_sums + row * w.tiles * kTileK / 2;
  }
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    __m512 sums[kTileRows][kM];
    for (std::size_t r = 0; r < kTileRows; r++) {
      FDK_UNROLL
      for (int m = 0; m < kM; m++) sums[r][m] = _mm512_setzero_ps();
    }
    for_tiles(
        w, stripe, 0, w.tiles, kBytes,
        [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
          alignas(64) float scales[kGroups * kTileRows], zeros[kGroups * kTileRows];
          load_groups<kGroups, false>(w, slot, scales);
          if constexpr (kAffine) load_groups<kGroups, true>(w, slot, zeros);
          for (std::size_t i = 0; i < kBytes; i += 64) {
            _mm_prefetch(reinterpret_cast<const char*>(codes + kPrefetch + i), _MM_HINT_T0);
          }
          const auto row = [&](std::size_t r) FDK_LAMBDA {
            const Values<kBits> values(codes, r, table);
            unroll<kSteps / kRun>([&](auto run) FDK_LAMBDA {
              __m512 part[kM];
              FDK_UNROLL
              for (int m = 0; m < kM; m++) part[m] = _mm512_setzero_ps();
              unroll<kRun>([&](auto i) FDK_LAMBDA {
                constexpr int s = run.value * kRun + i.value;
                FDK_UNROLL
                for (int m = 0; m < kM; m++) {
                  const __m512i activations = _mm512_loadu_si512(x[m] + tile * kTileK + s * kStep);
                  part[m] = _mm512_dpbf16_ps(part[m], as_bf16(activations), as_bf16(values.v[s]));
                  if constexpr (kAffine && i.value == 0) {
                    const __m512 sum = _mm512_loadu_ps(x_sums[m] + (tile * kTileK + s * kStep) / 2);
                    part[m] = _mm512_fnmadd_ps(group_at<kGroups, s>(zeros, r), sum, part[m]);
                  }
                }
              });
              const __m512 scale = group_at<kGroups, run.value * kRun>(scales, r);
              FDK_UNROLL
              for (int m = 0; m < kM; m++) sums[r][m] = _mm512_fmadd_ps(part[m], scale, sums[r][m]);
            });
          };
          if constexpr (kM == 1) {
            unroll<int(kTileRows)>([&](auto r) FDK_LAMBDA { row(std::size_t(r.value)); });
          } else {
            for (std::size_t r = 0; r < kTileRows; r++) row(r);
          }
        });
    for (std::size_t m = 0; m < task.m; m++) {
      for (std::size_t r = 0; r < kTileRows; r++) {
        task.y[m * task.y_stride + stripe * kTileRows + r] = _mm512_reduce_add_ps(sums[r][m]);
      }
    }
  }
}

template <int kBits, int kGroups, int kM>
FDK_INLINE void gemv_groups(const GemvTask& task, std::size_t begin, std::size_t end) {
  if (task.weight->zeros != nullptr) {
    gemv_stripes<kBits, kGroups, true, kM>(task, begin, end);
  } else {
    gemv_stripes<kBits, kGroups, false, kM>(task, begin, end);
  }
}

void gemv_bf16(const GemvTask& task, std::size_t begin, std::size_t end) {
  if (task.m > 1) return rows_avx512bf16(task, begin, end);
  const std::size_t groups = task.weight->groups_per_tile;
  with_bits(task.weight->bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    with_groups(groups,
                [&](auto count) FDK_LAMBDA { gemv_groups<b, count.value, 1>(task, begin, end); });
  });
}

struct Orders {
  Order natural;
};

constexpr Orders make_orders() {
  Orders orders{};
  for (std::size_t i = 0; i < kTileK; i++) orders.natural[i] = std::uint8_t(i);
  return orders;
}

constexpr Orders kOrders = make_orders();

// W_hat 256 KiB, a panel of x and the one that is fetched 128 each, of an L2 of 1 MiB and more. The
// outputs of a block are whole lines of y.
constexpr std::size_t kBlockRows = 64, kBlockBytes = 4096;

}  // namespace

extern const Kernels kAvx512Bf16 = {true,
                                    &kOrders.natural,
                                    &kOrders.natural,
                                    kAvx512Bf16PanelRows,
                                    32,
                                    8,
                                    gemv_bf16,
                                    decode_avx512bf16,
                                    panel_avx512bf16,
                                    nullptr,
                                    &kAvx512Tables,
                                    kAvx512Bf16Rows,
                                    rows_limit_avx512bf16,
                                    write_panel_avx512bf16,
                                    stage_panel_avx512bf16,
                                    kBlockRows,
                                    kBlockBytes,
                                    true,
                                    &kAvx512Bf16Grad};

}  // namespace fdk
