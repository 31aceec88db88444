// Products with 8-bit x in plain C++: the reference for the other instruction sets.
#include <cmath>
#include <limits>

#include "common/codes_scalar.h"
#include "common/linear_int8.h"

namespace fdk {
namespace {

void quantise_x(const float* x, std::size_t groups, const Int8Tile& out) {
  float largest = 0;
  bool finite = true;
  for (std::size_t i = 0; i < kTileK; i++) {
    finite = finite && std::isfinite(x[i]);
    largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
  }
  const float unbounded = std::numeric_limits<float>::infinity();
  const TileRounding rounding = rounding_of(finite ? largest : unbounded);
  *out.scale = rounding.scale;
  for (std::size_t g = 0; g < groups; g++) out.sums[g] = 0;
  for (std::size_t i = 0; i < kTileK; i++) {
    const auto code =
        rounding.is_zero ? std::int8_t(0) : std::int8_t(std::nearbyint(x[i] * rounding.inverse));
    out.codes[i] = code;
    out.sums[i * groups / kTileK] += code;
  }
}

void gemv(const Int8Task& task, std::size_t begin, std::size_t end) {
  const Weight& w = *task.weight;
  const Planes planes = planes_of(w.bits);
  const std::size_t groups = w.groups_per_tile, size = kTileK / groups;
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    for (std::size_t r = 0; r < kTileRows; r++) {
      double sums[kMaxInt8Rows] = {};
      for (std::size_t tile = 0; tile < w.tiles; tile++) {
        const std::uint8_t* codes = w.codes + (stripe * w.tiles + tile) * tile_bytes(w.bits);
        const std::size_t first = stripe * w.stored_groups + tile / w.tiles_per_group * groups;
        for (std::size_t g = 0; g < groups; g++) {
          std::int32_t dots[kMaxInt8Rows] = {};
          for (std::size_t i = g * size; i < (g + 1) * size; i++) {
            const auto level = std::int8_t(task.levels[code_at(codes, planes, r, i)]);
            for (std::size_t m = 0; m < task.m; m++) {
              dots[m] += level * task.x[(m * w.tiles + tile) * kTileK + i];
            }
          }
          const std::size_t slot = (first + g) * kTileRows + r;
          const double scale = scale_at(w, slot), centre = zero_at(w, slot) + task.centre;
          for (std::size_t m = 0; m < task.m; m++) {
            const std::size_t at = m * w.tiles + tile;
            sums[m] += scale * (double(task.x_scales[at]) * dots[m] -
                                centre * double(task.x_sums[at * groups + g]));
          }
        }
      }
      for (std::size_t m = 0; m < task.m; m++) {
        task.y[m * task.y_stride + (stripe - begin) * kTileRows + r] = float(sums[m]);
      }
    }
  }
}

}  // namespace

extern const Int8Kernels kInt8Scalar = {false, 4, quantise_x, gemv};

}  // namespace fdk
