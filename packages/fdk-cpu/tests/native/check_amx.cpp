// Runs gemm_panels_amx-inl.h on tiles of plain memory.
#include "x86/gemm_panels_amx-inl.h"

#include <cstring>
#include <string>
#include <vector>

#include "checks.h"

namespace {

// Does what tiles do, and fails where a processor would fault.
struct PlainTiles {
  static constexpr int kTiles = 8, kRowBytes = 64;
  static inline std::uint8_t rows[kTiles];
  static inline std::uint8_t bytes[kTiles][fdk::kAmxRows][kRowBytes];
  static inline bool configured;

  static void configure(const std::uint8_t (&of)[kTiles]) {
    for (const std::uint8_t count : of) {
      if (count < 1 || count > fdk::kAmxRows) fail("a tile of " + std::to_string(count) + " rows");
    }
    std::memcpy(rows, of, sizeof(rows));
    std::memset(bytes, 0, sizeof(bytes));
    configured = true;
  }
  template <int kTile>
  static void load(const void* from, std::size_t stride) {
    expect_configured();
    for (std::size_t r = 0; r < rows[kTile]; r++) {
      std::memcpy(bytes[kTile][r], static_cast<const std::uint8_t*>(from) + r * stride, kRowBytes);
    }
  }
  template <int kTile>
  static void store(void* to, std::size_t stride) {
    expect_configured();
    for (std::size_t r = 0; r < rows[kTile]; r++) {
      std::memcpy(static_cast<std::uint8_t*>(to) + r * stride, bytes[kTile][r], kRowBytes);
    }
  }
  template <int kSum, int kRows, int kLanes>
  static void product() {
    static_assert(kSum != kRows && kSum != kLanes && kRows != kLanes);
    expect_configured();
    if (rows[kSum] != rows[kRows] || rows[kLanes] != kRowBytes / 4) {
      fail("a product of tiles of " + std::to_string(rows[kRows]) + " and " +
           std::to_string(rows[kLanes]) + " rows into " + std::to_string(rows[kSum]));
    }
    for (std::size_t r = 0; r < rows[kSum]; r++) {
      for (std::size_t lane = 0; lane < fdk::kAmxLanes; lane++) {
        float sum;
        std::memcpy(&sum, &bytes[kSum][r][4 * lane], 4);
        for (std::size_t i = 0; i < fdk::kAmxDepth; i++) {
          sum += half(bytes[kRows][r], i) * half(bytes[kLanes][i / 2], 2 * lane + i % 2);
        }
        std::memcpy(&bytes[kSum][r][4 * lane], &sum, 4);
      }
    }
  }
  static void release() { configured = false; }

 private:
  static void expect_configured() {
    if (!configured) fail("a tile is used that has no shape");
  }
  static float half(const std::uint8_t* row, std::size_t i) {
    std::uint16_t bits;
    std::memcpy(&bits, row + 2 * i, 2);
    return from_bf16(bits);
  }
};

}  // namespace

// Blocks of any number of rows and both widths of a panel. y is accumulated, and memory after it is
// not touched. Values are small integers, so sums are exact.
void check_tiles(Random& random) {
  constexpr std::size_t kDepth = 2 * fdk::kAmxDepth, kStride = kDepth + 32;
  const auto integer = [&] { return float(random.upto(16)) - 8; };
  for (const std::size_t panel : {fdk::kAmxLanes, 2 * fdk::kAmxLanes}) {
    for (std::size_t rows = 1; rows <= 2 * fdk::AmxPanel<PlainTiles, false>::kStep + 1; rows++) {
      Bytes w(rows * kStride * 2), x(kDepth * panel * 2);
      for (std::size_t i = 0; i < rows * kStride; i++) put(w, i, 0, integer());
      for (std::size_t i = 0; i < kDepth * panel; i++) put(x, i, 0, integer());
      std::vector<float> y((rows + 1) * panel), wanted;
      for (auto& value : y) value = integer();
      wanted = y;
      for (std::size_t i = 0; i < rows * panel; i++) {
        for (std::size_t p = 0; p < kDepth; p++) {
          wanted[i] += get(w, i / panel * kStride + p, 0) *
                       get(x, (p / 2 * panel + i % panel) * 2 + p % 2, 0);
        }
      }
      fdk::GemmPanelTask task{w.data(), rows, kStride, kDepth, x.data(), panel, y.data()};
      if (random.upto(1) == 0) {  // a next panel; only its address is used
        task.next = x.data();
        task.parts = fdk::ceil_div(rows, fdk::kTileRows);
        task.part_bytes = task.part_stride = x.size() / task.parts;
      }
      fdk::gemm_panel_tiles<PlainTiles>(task);
      if (PlainTiles::configured) fail("tiles are not released");
      if (y != wanted) {
        fail("tiles: " + std::to_string(rows) + " rows by " + std::to_string(panel) + " lanes");
      }
    }
  }
}
