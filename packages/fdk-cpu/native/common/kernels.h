// What an instruction set brings: kernels over staged activations, in float32 or bf16.
//
// Every kernel reads the layout of layout.h. Activations are staged first: padded to whole tiles
// and, within a tile, in the kernel's own order, so that no kernel shuffles them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "common/layout.h"

namespace fdk {

// A packed weight, as kernels see it. `table` holds the 2^bits values of the codes, already rounded
// to the dtype of the activations: the codebook, or 0, 1, 2, ... for affine formats.
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

// Memory fetched into L2 bit by bit, `bytes` a step. May lie past the end of what there is.
struct Fetch {
  const std::uint8_t* from = nullptr;
  std::size_t bytes = 0;

  inline __attribute__((always_inline)) void step() {
    for (std::size_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
    from += bytes;
  }
};

// Rows of x that a gemv kernel takes at once, unless it says more.
inline constexpr std::size_t kMaxGemvRows = 4;

//   x      :: [m][tiles * kTileK]   float32 or bf16, in the kernel's order
//   x_sums :: [m][tiles][4][16]   for the zero points of bf16 kernels, null for others: sums of
//             pairs of x over each run of 32-position steps that share a group, at the run's first
//             step; a run is one step unless m = 1
//   y      :: [m][y_stride]         float32, at least 4 * stripes a row
struct GemvTask {
  const Weight* weight;
  const void* x;
  const float* x_sums;
  std::size_t m;
  float* y;
  std::size_t y_stride;
};

// Rows of x that each product takes, by measurement.
struct RowLimits {
  // Up to so many: gemv, which decodes the weight anew for every gemv_rows of them.
  std::size_t gemv = 12;
  // Up to so many beyond these: each stripe is dequantised once and meets all of them in L1.
  std::size_t stripes = 0;
  // Up to so many past the last full panel, of more: they meet stripes too, as blocks of W_hat are
  // dequantised for panels. None: kMaxRest past the last step of a panel, where there is such a
  // product.
  std::size_t rest = 0;
  // Bytes of all panels up to which each is near when it is wanted; of more, a panel is fetched
  // while the one before is multiplied.
  std::size_t near_panels = std::numeric_limits<std::size_t>::max();
};

// Lanes of x that a gemm kernel takes at once: the m of one panel.
inline constexpr std::size_t kMaxPanel = 32;

// A panel's depth is a multiple of this: kernels load so many positions of w at once.
inline constexpr std::size_t kPanelDepth = 32;

//   w :: [rows][stride]            dequantised, float32 or bf16, `depth` positions
//   x :: [depth / unit][panel][unit]   one panel; unit is 1 for float32 and 2 (a pair) for bf16
//   y :: [rows][panel]             float32, added to
// What comes after may be fetched into L2 meanwhile: the next panel of x or, after the last one,
// codes where Kernels::panel_fetches_codes:
//   next :: [parts], part_bytes each, part_stride apart; null for none. A part for each stripe, or
//           fewer
struct PanelTask {
  const void* w;
  std::size_t rows, stride, depth;
  const void* x;
  std::size_t panel;
  float* y;
  const std::uint8_t* next = nullptr;
  std::size_t parts = 0, part_bytes = 0, part_stride = 0;
};

// Rows of x past the last full step of a panel that meet W_hat by themselves, unless RowLimits says
// more.
inline constexpr std::size_t kMaxRest = 3;

//   w :: [kTileRows][stride]   tiles of a stripe, dequantised to bf16, `depth` positions
//   x :: [m][x_stride]         bf16, in panel_order
//   y :: [m][y_stride]         float32; kTileRows of each row are added to
struct StripeTask {
  const void* w;
  std::size_t stride, depth;
  const void* x;
  std::size_t m, x_stride;
  float* y;
  std::size_t y_stride;
};

//   x :: [m][x_stride]         bf16, in panel_order
//   y :: [m][y_stride]         float32, at least 4 * stripes a row
struct StripesTask {
  const Weight* weight;
  const void* x;
  std::size_t m, x_stride;
  float* y;
  std::size_t y_stride;
};

// y[lane][row] = products[row][lane] + bias[row], rounded, for a block of W_hat and one panel.
//   products :: [rows][panel]   float32; rows are `outputs` raised to a multiple of kTileRows
//   bias     :: [outputs], or null; y :: [lanes][stride], both in the dtype of the activations
struct PanelOut {
  const float* products;
  std::size_t panel, lanes, outputs;
  const void* bias;
  void* y;
  std::size_t stride;
};

// out[m][kTileK] += grad[m][rows] * w[rows][kTileK], all float32, for one column of tiles.
struct GradTask {
  const float* w;
  std::size_t rows;
  const float* grad;
  std::size_t m, grad_stride;
  float* out;
  std::size_t out_stride;
};

// Position p of a tile, in the kernel's order, is natural position order[p] of the tile.
using Order = std::uint8_t[kTileK];

//   tables :: of x, as TableKernels::build makes them
//   y      :: [4 * stripes], float32: those of stripes [begin, end) are written
struct TableTask {
  const Weight* weight;
  const void* tables;
  float* y;
  std::size_t begin, end;  // at most TableKernels::stripes of them
  std::size_t next;        // first of the stripes that come after, which are fetched meanwhile
  bool fetched;            // whether these were, by the task before; kernels may ignore both
};

// A product of one row of x by what is made of it first: tables over it, for weights of few bits,
// or integers. Optional.
struct TableKernels {
  bool (*takes)(const Weight&);
  std::size_t tile_bytes;  // that the tables of a tile of x take, aligned to 64
  // Tables of x :: [tiles * kTileK], as gemv has it. False where x has what they cannot hold, such
  // as NaN or outliers: then `next` or gemv is used. Stripes [begin, end) are what is met first:
  // kernels may fetch them meanwhile.
  bool (*build)(const Weight&, const void* x, void* tables, std::size_t begin, std::size_t end);
  std::size_t stripes;  // that a task takes at most
  void (*gemv)(const TableTask&);
  const TableKernels* next = nullptr;  // tried where these do not take the weight, or x
};

// What grad_x = grad_y @ W_hat in bf16 takes beside decode and panel_product: rows of grad_y meet
// panels of W_hat. Optional.
struct GradPanels {
  std::size_t panel;  // lanes: positions of W_hat
  // The block of W_hat that rows of grad_y meet: 512 KiB as panels of pairs. A multiple of
  // kPanelDepth.
  std::size_t block_rows, block_tiles;
  // W_hat in bf16 of stripes [first, last), tiles [begin, end), to panels
  // [positions / panel][rows / 2][panel][2], which are `step` apart; positions of a panel in an
  // order of its own.
  void (*decode_pairs)(const Weight&, std::size_t first, std::size_t last, std::size_t begin,
                       std::size_t end, std::uint16_t* panels, std::size_t step);
  // A row of products with a panel, [panel] float32, to bf16 in natural order.
  void (*round)(const float* products, std::uint16_t* out);
};

struct Kernels {
  bool x_is_bf16;
  const Order* gemv_order;
  const Order* panel_order;  // of decode and the gemm panel, and of grad
  std::size_t rows;          // of w that a panel call is best given; a multiple of kTileRows
  std::size_t panel;         // widest panel
  std::size_t panel_step;    // a panel is a multiple of this
  // y = x @ W_hat.T for stripes [begin, end), m up to gemv_rows.
  void (*gemv)(const GemvTask&, std::size_t begin, std::size_t end);
  // W_hat of kTileRows rows, tiles [begin, end) of a stripe, to out[r * stride], panel order.
  void (*decode)(const Weight&, std::size_t stripe, std::size_t begin, std::size_t end, void* out,
                 std::size_t stride);
  void (*panel_product)(const PanelTask&);
  // W_hat in float32 whatever x_is_bf16, and the product of backward. Null: use the float32 set's.
  void (*grad_product)(const GradTask&);
  const TableKernels* tables = nullptr;
  std::size_t gemv_rows = kMaxGemvRows;  // that gemv takes at once
  // Null: those that RowLimits begins with.
  RowLimits (*limits)(const Weight&) = nullptr;
  // For the dtype that x has in the kernel. Null: value by value.
  void (*write_panel)(const PanelOut&) = nullptr;
  // x :: [rows][positions], rows x_stride apart, to a panel [positions / unit][width][unit], whose
  // lanes past `rows` are zero; x in the kernel's dtype, for sets whose panel_order is natural.
  // Null: unit by unit.
  void (*stage_panel)(const void* x, std::size_t x_stride, std::size_t rows, std::size_t positions,
                      std::size_t width, void* out) = nullptr;
  // Rows of the block of W_hat that panels meet and bytes of each: 96 KiB, within the L2 of any
  // core, and one panel of x 64 KiB.
  std::size_t block_rows = 48, block_bytes = 2048;
  // Up to so many rows where panels are far (RowLimits::near_panels), all of which every block
  // meets.
  std::size_t far_block_rows = 0;
  bool panel_fetches_codes = false;  // panel_product is told of the codes that come after
  // The same as decode, and what panels decode next is fetched meanwhile. Null: it is fetched
  // before.
  void (*decode_fetching)(const Weight&, std::size_t stripe, std::size_t begin, std::size_t end,
                          void* out, std::size_t stride, const Fetch&) = nullptr;
  // For sets whose panel_order is natural. Null: backward is float32.
  const GradPanels* grad_panels = nullptr;
  // Null: rows of x past the last step are lanes of a panel.
  void (*stripe_product)(const StripeTask&) = nullptr;
  // y = x @ W_hat.T for stripes [begin, end) and any m: decode and stripe_product in turns. Needed
  // where limits says so.
  void (*stripes)(const StripesTask&, std::size_t begin, std::size_t end) = nullptr;
};

extern const Kernels kScalar;
#if defined(__aarch64__)
extern const Kernels kNeon;
extern const Kernels kNeonBf16;
extern const Kernels kSve;
extern const Kernels kSve2;
#endif
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx2Bf16;
extern const Kernels kAvx512;
extern const Kernels kAvx512Bf16;
extern const Kernels kAmx;
extern const TableKernels kAvx512Tables;
extern const GradPanels kAvx512Bf16Grad;
extern const GradPanels kAmxGrad;
extern const TableKernels kAvx2Tables;
extern const TableKernels kAvx2Fixed;
#endif

enum class Isa : int {
  scalar,
  neon,
  neondot,
  neonbf16,
  neoni8mm,
  sve,
  sve2,
  avx2,
  avx512,
  avx512bf16,
  amx
};
inline constexpr int kIsas = 11;

const char* name_of(Isa isa);
// Whether this machine has it; the system may still refuse it to this process.
bool supported(Isa isa);
// The one in use: the best, or FDK_CPU_ISA, or what set_isa chose; "auto" is the best for both.
Isa current_isa();
// Throws std::invalid_argument where the machine does not run it, or there is none of that name.
void set_isa(const char* name, const char* origin = "set_isa");
// Kernels for a kind of activations: bf16 ones where the set has them, else float32.
const Kernels& kernels_for(Isa isa, Activation activation);
const Kernels& float_kernels_for(Isa isa);

}  // namespace fdk
