// The interface that an instruction set implements: kernels over packed activations.
//
// Every kernel reads the layout of layout.h. Activations are packed first (pack_activations.h):
// padded to whole tiles and, within a tile, permuted to the order in which the kernel unpacks
// codes, so that no kernel shuffles them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "common/layout.h"

namespace fdk {

// The packed weight as kernels see it. `table` has the 2^bits values of the codes, rounded to the
// dtype of the activations: the codebook, or 0, 1, 2, ... for affine formats.
struct Weight {
  const std::uint8_t* codes;
  const void* scales;
  const void* zeros;  // null without zero points
  ScaleType scale_type;
  ZeroType zero_type;
  int bits;
  std::size_t stripes, tiles, groups_per_tile, tiles_per_group, stored_groups;
  float table[kMaxLevels];
};

// Prefetches memory into L2, `bytes` a step. It may run past the end of the buffer.
struct Prefetcher {
  const std::uint8_t* from = nullptr;
  std::size_t bytes = 0;

  inline __attribute__((always_inline)) void step() {
    for (std::size_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
    from += bytes;
  }
};

// Rows of x that one call of a GEMV kernel multiplies, unless LinearKernels::gemv_rows says more.
inline constexpr std::size_t kMaxGemvRows = 4;

// The operands of a GEMV:
//   x      :: [m][tiles * kTileK]   float32 or bf16, in the kernel's order
//   x_sums :: [m][tiles][4][16]     for bf16 kernels with zero points, else null: sums of pairs
//             of x over each run of 32-position steps that share a group, stored at the first step
//             of the run; a run is one step unless m = 1
//   y      :: [m][y_stride]         float32, at least 4 * stripes a row
struct GemvTask {
  const Weight* weight;
  const void* x;
  const float* x_sums;
  std::size_t m;
  float* y;
  std::size_t y_stride;
};

// The numbers of rows of x at which linear.cpp changes the kernel, measured per machine.
struct DispatchThresholds {
  // Up to this m: GEMV, which decodes the weight once for every gemv_rows rows.
  std::size_t max_gemv_m = 12;
  // Up to this m: each stripe is dequantised once and multiplied with all rows while it is in L1.
  std::size_t max_stripes_m = 0;
  // For larger m: up to this many rows after the last full panel are multiplied with stripes too,
  // while blocks of W_hat are dequantised for the panels. 0: kMaxRest rows after the last panel
  // step, if the set has gemm_stripe.
  std::size_t max_rest = 0;
  // If all panels of x take more bytes than this, each one is prefetched during the previous one.
  std::size_t near_panel_bytes = std::numeric_limits<std::size_t>::max();
  // Panels for every m, all with one order of sums: a row of y does not depend on the other rows.
  bool batch_invariant = false;
};

// The widest panel: rows of x that one call of a GEMM kernel multiplies.
inline constexpr std::size_t kMaxPanel = 32;

// The depth of a panel is a multiple of this: positions of w that a kernel loads at once.
inline constexpr std::size_t kPanelDepth = 32;

// The operands of a GEMM with one panel:
//   w :: [rows][stride]               dequantised, float32 or bf16, `depth` positions
//   x :: [depth / unit][panel][unit]  one panel; unit is 1 for float32 and 2 (a pair) for bf16
//   y :: [rows][panel]                float32, accumulated
// The next operand may be prefetched into L2: the next panel of x or, after the last one, codes
// if LinearKernels::panel_prefetches_codes:
//   next :: [parts] of part_bytes, part_stride apart; null for none. One part per stripe or fewer
struct GemmPanelTask {
  const void* w;
  std::size_t rows, stride, depth;
  const void* x;
  std::size_t panel;
  float* y;
  const std::uint8_t* next = nullptr;
  std::size_t parts = 0, part_bytes = 0, part_stride = 0;
};

// Rows of x after the last full panel step that are multiplied with stripes of W_hat instead of a
// partly empty panel, unless DispatchThresholds::max_rest says more.
inline constexpr std::size_t kMaxRest = 3;

// The operands of a GEMM of one stripe with the rest rows:
//   w :: [kTileRows][stride]   tiles of a stripe, dequantised to bf16, `depth` positions
//   x :: [m][x_stride]         bf16, in panel_order
//   y :: [m][y_stride]         float32; kTileRows values of each row are accumulated
struct GemmStripeTask {
  const void* w;
  std::size_t stride, depth;
  const void* x;
  std::size_t m, x_stride;
  float* y;
  std::size_t y_stride;
};

// The operands of a GEMM of several stripes:
//   x :: [m][x_stride]         bf16, in panel_order
//   y :: [m][y_stride]         float32, at least 4 * stripes a row
struct GemmStripesTask {
  const Weight* weight;
  const void* x;
  std::size_t m, x_stride;
  float* y;
  std::size_t y_stride;
};

// y[lane][row] = products[row][lane] + bias[row], rounded, for a block of W_hat and one panel.
//   products :: [rows][panel]   float32; rows is `outputs` rounded up to a multiple of kTileRows
//   bias     :: [outputs], or null; y :: [lanes][stride], both in the dtype of the activations
struct PanelOut {
  const float* products;
  std::size_t panel, lanes, outputs;
  const void* bias;
  void* y;
  std::size_t stride;
};

// out[m][kTileK] += grad[m][rows] * w[rows][kTileK], all float32, for one column of tiles.
struct DgradTask {
  const float* w;
  std::size_t rows;
  const float* grad;
  std::size_t m, grad_stride;
  float* out;
  std::size_t out_stride;
};

// Position p of a tile in the kernel's order is position order[p] of the tile in memory order.
using Order = std::uint8_t[kTileK];

// The operands of the second pass of a GEMV:
//   prepared :: the output of TwoPassGemv::prepare for x
//   y        :: [4 * stripes], float32; the values of stripes [begin, end) are written
struct TwoPassTask {
  const Weight* weight;
  const void* prepared;
  float* y;
  std::size_t begin, end;  // at most TwoPassGemv::stripes
  std::size_t next;        // first stripe of the next task, to be prefetched
  bool prefetched;         // whether the previous task prefetched [begin, end); a hint
};

// A GEMV for one row of x in two passes: `prepare` turns x into lookup tables or integers, `gemv`
// multiplies the weight with them. Optional.
struct TwoPassGemv {
  bool (*supports)(const Weight&);
  std::size_t tile_bytes;  // bytes that `prepare` writes per tile of x, a multiple of 64
  // Prepares x :: [tiles * kTileK], in the order of gemv. Returns false if x has values that the
  // representation cannot hold, such as NaN or outliers; `fallback` or the plain GEMV is used then.
  // Stripes [begin, end) are multiplied first: kernels may prefetch them.
  bool (*prepare)(const Weight&, const void* x, void* prepared, std::size_t begin, std::size_t end);
  std::size_t stripes;  // most stripes per task
  void (*gemv)(const TwoPassTask&);
  const TwoPassGemv* fallback = nullptr;  // tried if this one does not support the weight or x
};

// The bf16 backward product grad_x = grad_y @ W_hat: panels of W_hat, multiplied with rows of
// grad_y by gemm_panel. Optional.
struct DgradPanels {
  std::size_t panel;  // width: positions of W_hat
  // Size of a block of W_hat, 512 KiB as panels of pairs. block_rows is a multiple of kPanelDepth.
  std::size_t block_rows, block_tiles;
  // Dequantises tiles [begin, end) of stripes [first, last) to bf16 panels
  // [positions / panel][rows / 2][panel][2], `step` values apart. The kernel chooses the order of
  // the positions within a panel.
  void (*dequantise_pairs)(const Weight&, std::size_t first, std::size_t last, std::size_t begin,
                           std::size_t end, std::uint16_t* panels, std::size_t step);
  // Rounds one row of a panel's products, [panel] float32, to bf16 in memory order.
  void (*round)(const float* products, std::uint16_t* out);
};

struct LinearKernels {
  bool x_is_bf16;
  const Order* gemv_order;
  const Order* panel_order;  // order for dequantise, gemm_panel and dgrad
  std::size_t panel;         // widest panel
  std::size_t panel_step;    // a panel is a multiple of this
  // The same if batch-invariant: narrower panels add in another order. 0: panel_step.
  std::size_t invariant_panel_step = 0;
  // Computes y = x @ W_hat.T for stripes [begin, end), m up to gemv_rows.
  void (*gemv)(const GemvTask&, std::size_t begin, std::size_t end);
  // Dequantises tiles [begin, end) of a stripe to out[r * stride], in panel_order.
  void (*dequantise)(const Weight&, std::size_t stripe, std::size_t begin, std::size_t end,
                     void* out, std::size_t stride);
  void (*gemm_panel)(const GemmPanelTask&);
  // The backward product with W_hat in float32, whatever x_is_bf16 is. Null: that of the float32
  // set.
  void (*dgrad)(const DgradTask&);
  const TwoPassGemv* two_pass = nullptr;
  std::size_t gemv_rows = kMaxGemvRows;  // most rows of x per call of gemv
  // Null: the defaults of DispatchThresholds.
  DispatchThresholds (*thresholds)(const Weight&) = nullptr;
  // For activations in the dtype of the kernel. Null: value by value.
  void (*write_panel)(const PanelOut&) = nullptr;
  // Packs x :: [rows][positions], rows x_stride apart, to a panel [positions / unit][width][unit]
  // and pads lanes after `rows` with zeros; x is in the dtype of the kernel and panel_order is the
  // memory order. Null: unit by unit.
  void (*pack_panel)(const void* x, std::size_t x_stride, std::size_t rows, std::size_t positions,
                     std::size_t width, void* out) = nullptr;
  // Rows and bytes per row of the block of W_hat that panels are multiplied with: 96 KiB, which
  // fits the L2 of any core together with a panel of x of 64 KiB.
  std::size_t block_rows = 48, block_bytes = 2048;
  // Up to this many block_rows if panels exceed DispatchThresholds::near_panel_bytes: every block
  // reads all of them.
  std::size_t far_block_rows = 0;
  bool panel_prefetches_codes = false;  // GemmPanelTask::next may be codes
  // Like dequantise, and prefetches the codes of the next block. Null: they are prefetched before.
  void (*dequantise_prefetching)(const Weight&, std::size_t stripe, std::size_t begin,
                                 std::size_t end, void* out, std::size_t stride,
                                 const Prefetcher&) = nullptr;
  // For sets whose panel_order is the memory order. Null: backward is float32.
  const DgradPanels* dgrad_panels = nullptr;
  // Null: rows of x after the last panel step go into a partly empty panel.
  void (*gemm_stripe)(const GemmStripeTask&) = nullptr;
  // Computes y = x @ W_hat.T for stripes [begin, end) and any m: dequantise and gemm_stripe in
  // turns. Needed if `thresholds` sets max_stripes_m.
  void (*gemm_stripes)(const GemmStripesTask&, std::size_t begin, std::size_t end) = nullptr;
};

extern const LinearKernels kLinearScalar;
#if defined(__aarch64__)
extern const LinearKernels kLinearNeon;
extern const LinearKernels kLinearNeonBf16;
extern const LinearKernels kLinearSve;
extern const LinearKernels kLinearSve2;
#endif
#if defined(__x86_64__)
extern const LinearKernels kLinearAvx2;
extern const LinearKernels kLinearAvx2Bf16;
extern const LinearKernels kLinearAvx512;
extern const LinearKernels kLinearAvx512Bf16;
extern const LinearKernels kLinearAmx;
extern const TwoPassGemv kLutGemvAvx512Vnni;
extern const DgradPanels kDgradAvx512Bf16;
extern const DgradPanels kDgradAmx;
extern const TwoPassGemv kLutGemvAvx2;
extern const TwoPassGemv kGemvInt16Avx2;
#endif

}  // namespace fdk
