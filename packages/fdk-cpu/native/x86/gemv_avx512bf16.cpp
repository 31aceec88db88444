// AVX-512 with BF16 and VBMI: bf16 activations, products of pairs summed in float32.
//
// The values before their scale are bf16 exactly (a codebook rounded to bf16, or codes below 256),
// so the dot products of a group are exact in their products; the scale is applied to the sums.
// Zero points are subtracted from the sums too: sum x (code - zero) = sum x code - zero sum x,
// lane by lane, so that a single nonzero x still gives exactly (code - zero) scale.
#include <immintrin.h>

#include "x86/gemv_3bit_avx512bf16-inl.h"
#include "x86/linear_avx512bf16.h"
#include "x86/codebook_avx512bf16-inl.h"
#include "common/kernels.h"
#include "common/gemv-inl.h"

namespace fdk {
namespace {

// y = W_hat x for stripes [begin, end), which are not none, and one row of x.
template <int kBits, int kGroups, bool kAffine>
void gemv_stripes(const GemvTask& task, std::size_t begin, std::size_t end) {
  constexpr std::size_t kBytes = tile_bytes(kBits);
  constexpr int kRun = kGroups >= kSteps ? 1 : kSteps / kGroups;  // steps that share a scale
  const Weight& w = *task.weight;
  const typename TileCodes<kBits>::Table table(w.table);
  TileCodes<kBits> ahead(w.codes + begin * w.tiles * kBytes);
  const std::uint8_t* const last = w.codes + (end * w.tiles - 1) * kBytes;
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    __m512 sums[kTileRows];
    FDK_UNROLL
    for (std::size_t r = 0; r < kTileRows; r++) sums[r] = _mm512_setzero_ps();
    const std::uint16_t* x = static_cast<const std::uint16_t*>(task.x);
    const float* x_sums = task.x_sums;
    for_tiles(w, stripe, 0, w.tiles, kBytes,
              [&](std::size_t, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
                alignas(64) float scales[kGroups * kTileRows], zeros[kGroups * kTileRows];
                load_groups<kGroups, false>(w, slot, scales);
                if constexpr (kAffine) load_groups<kGroups, true>(w, slot, zeros);
                for (std::size_t i = 0; i < kBytes; i += 64) {
                  _mm_prefetch(reinterpret_cast<const char*>(codes + kPrefetch + i), _MM_HINT_T0);
                }
                // 3 bits: the next tile's codes before the products of this one, which would wait
                // for their own and hold up all that comes after (256 rows, warm: 34.2 -> 27.5 us).
                const TileCodes<kBits> of_tile = ahead;
                ahead = TileCodes<kBits>(codes == last ? codes : codes + kBytes);
                unroll<int(kTileRows)>([&](auto row) FDK_LAMBDA {
                  constexpr int r = row.value;
                  const Values<kBits> of_row = of_tile.template row<r>(table);
                  unroll<kSteps / kRun>([&](auto run) FDK_LAMBDA {
                    __m512 part = _mm512_setzero_ps();
                    unroll<kRun>([&](auto i) FDK_LAMBDA {
                      constexpr int s = run.value * kRun + i.value;
                      const __m512i activations = _mm512_loadu_si512(x + s * kStep);
                      part = _mm512_dpbf16_ps(part, as_bf16(activations), as_bf16(of_row.v[s]));
                      if constexpr (kAffine && i.value == 0) {
                        const __m512 sum = _mm512_loadu_ps(x_sums + s * kStep / 2);
                        part = _mm512_fnmadd_ps(group_at<kGroups, s>(zeros, r), sum, part);
                      }
                    });
                    const __m512 scale = group_at<kGroups, run.value * kRun>(scales, r);
                    sums[r] = _mm512_fmadd_ps(part, scale, sums[r]);
                  });
                });
                x += kTileK;
                if constexpr (kAffine) x_sums += kTileK / 2;
              });
    FDK_UNROLL
    for (std::size_t r = 0; r < kTileRows; r++) {
      task.y[stripe * kTileRows + r] = _mm512_reduce_add_ps(sums[r]);
    }
  }
}

}  // namespace

void gemv_avx512bf16(const GemvTask& task, std::size_t begin, std::size_t end) {
  if (task.m > 1) return rows_avx512bf16(task, begin, end);
  const std::size_t groups = task.weight->groups_per_tile;
  with_bits(task.weight->bits, [&](auto bits) FDK_LAMBDA {
    with_groups(groups, [&](auto count) FDK_LAMBDA {
      if (task.weight->zeros != nullptr) {
        gemv_stripes<bits.value, count.value, true>(task, begin, end);
      } else {
        gemv_stripes<bits.value, count.value, false>(task, begin, end);
      }
    });
  });
}

namespace {

constexpr Orders make_orders() {
  Orders orders{};
  for (std::size_t i = 0; i < kTileK; i++) orders.natural[i] = std::uint8_t(i);
  return orders;
}

}  // namespace

extern constinit const Orders kAvx512Bf16Orders = make_orders();

extern const Kernels kAvx512Bf16 = {
    .x_is_bf16 = true,
    .gemv_order = &kAvx512Bf16Orders.natural,
    .panel_order = &kAvx512Bf16Orders.natural,
    .rows = kAvx512Bf16PanelRows,
    .panel = 32,
    .panel_step = 8,
    .gemv = gemv_avx512bf16,
    .decode = decode_avx512bf16,
    .panel_product = panel_avx512bf16,
    .grad_product = nullptr,
    .tables = &kAvx512Tables,
    .gemv_rows = kAvx512Bf16Rows,
    .limits = limits_avx512bf16,
    .write_panel = write_panel_avx512bf16,
    .stage_panel = stage_panel_avx512bf16,
    .block_rows = kAvx512Bf16BlockRows,
    .block_bytes = kAvx512Bf16BlockBytes,
    .panel_fetches_codes = true,
    .grad_panels = &kAvx512Bf16Grad,
    .stripe_product = stripe_avx512bf16,
    .stripes = stripes_avx512bf16,
};

}  // namespace fdk
