"""MarlinExpertLayout: its bytes, and where hopper_gemm.cu puts interleaved outputs."""

import copy

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from host_cuda import build, needs_gxx, run
from marlin_compile import BF16

from fdk_cuda.marlin.expert_layout import MarlinExpertLayout
from fdk_cuda.marlin.instantiations import HopperShape, Variant, hopper_program
from fdk_cuda.marlin.layout import pack_layout
from fdk_cuda.triton import TritonBackend
from fdk_cuda.triton.expert_layout import TritonExpertLayout
from fdk_formats import Format, QuantisedStack
from fdk_formats.format import BITS
from fdk_formats.scales import decode_scale
from fdk_formats.testing import random_quantised

FORMATS = [
    *(f"custom{bits}-g64" for bits in BITS),
    *(f"affine{bits}-g32" for bits in BITS),
    "affine4-g64-zint",
    "custom4-row-fp32",
    "custom2-g64-e8m0",
    "int8-g64",
    "binary1-g64",
]


def stack_of(format: str, n: int, k: int, experts: int = 3) -> QuantisedStack:
    made = [random_quantised(Format.parse(format), n, k, seed=i) for i in range(experts)]
    return QuantisedStack.of(made)


@pytest.mark.parametrize("n", [48, 37])
@pytest.mark.parametrize("format", FORMATS)
def test_comes_back(format, n):
    """Byte for byte, with and without interleaving, after a copy too."""
    stack = stack_of(format, n, 192)
    layout = MarlinExpertLayout(stack, BF16)
    for own in (layout, copy.deepcopy(layout)):
        unpacked = own.unpack()
        assert (unpacked.format, unpacked.shape) == (stack.format, stack.shape)
        for name, tensor in stack.tensors().items():
            assert torch.equal(unpacked.tensors()[name], tensor), name


@pytest.mark.parametrize("format", ["custom4-g64", "custom2-g128-e8m0", "affine3-g64-zint"])
def test_bytes(format):
    """An expert is packed as one weight with octets of its halves in turns."""
    stack = stack_of(format, 96, 256)
    layout = MarlinExpertLayout(stack, BF16)
    rows = [8 * (half * 6 + octet) + g for octet in range(6) for half in (0, 1) for g in range(8)]
    for own, q in zip(layout.packed, stack.matrices(), strict=True):
        scale = q.scale
        if scale.dtype == torch.uint8:
            scale = decode_scale(scale).to(BF16)
        zero = None if q.zero_point is None else q.zero_point.to(scale.dtype)[rows]
        wanted = pack_layout(layout.geometry, q.packed[rows], scale[rows], zero)
        assert torch.equal(own, wanted)


def test_codebooks():
    shared = MarlinExpertLayout(stack_of("affine4-g64", 32, 128), BF16).codebook
    assert shared.tolist() == [list(range(16))]
    own = MarlinExpertLayout(stack_of("custom4-g64", 32, 128), BF16).codebook
    assert own.shape == (3, 16)
    assert own.dtype == BF16


def test_grids_and_signs_are_looked_up():
    for format in ("int8-g64", "binary1-g64"):
        geometry = MarlinExpertLayout(stack_of(format, 32, 128), BF16).geometry
        assert geometry.has_table
        assert not geometry.has_signs


def test_not_chosen_without_a_gpu():
    layout = TritonBackend().pack_stack(stack_of("custom4-g64", 32, 128), dtype=BF16)
    assert isinstance(layout, TritonExpertLayout)


STORE = """
#define __shared__
#define __align__(n)
struct float4 { float x, y, z, w; };
void __syncthreads();  // these are not called
unsigned __shfl_sync(unsigned, unsigned, int);
struct Params { int n; uint16_t* y; const int* tiles; const int* order; int max_tiles, n_tiles,
  group_m_tiles, splits, whole_tiles, steps, m_tiles; };
inline uint16_t* out_of(const Params& p) { return p.y; }
inline int width_of(const Params& p) { return p.n; }
inline int row_of(const Params&, int row, int) { return row; }
#include "common/hopper_mainloop.cuh"
int main(int, char** text) {
  const int n = atoi(text[1]), rows = atoi(text[2]);
  std::vector<uint16_t> y(rows * n, 0xFFFF);
  const int tiles[] = {0, 0, rows, 1};
  const Params p{n, y.data(), tiles, nullptr, 1, (n + TILE_N - 1) / TILE_N, 1, 1, 1 << 20, 1, 1};
  for (int index = 0; index < p.n_tiles; index++) {
    const WorkUnit unit(p, index);
    for (int group = 0; group < N_GROUPS; group++) {
      // A piece holds the numbers of the packed rows; rows of x are in the upper bits.
      std::vector<uint16_t> piece(PIECE_BYTES / 2);
      const int first_row = TILE_N * unit.tile.n + GROUP_N * group;
      for (int column = 0; column < PIECE_M; column++)
        for (int i = 0; i < GROUP_N; i++)
          piece[column * PIECE_STRIDE / 2 + ((i / 8 ^ column % 8) << 3) + i % 8] =
              column << 10 | (first_row + i);
      for (int thread = 0; thread < GROUP_THREADS; thread++) {
        const OutputPlace at(p, unit, group, thread / 32, thread % 32, thread);
        store_tile_piece(p, reinterpret_cast<uint8*>(piece.data()), at, 0, 0, p.n % 8 == 0);
      }
    }
  }
  fwrite(y.data(), 2, y.size(), stdout);
}
"""


@needs_gxx
@pytest.mark.parametrize("interleaved", [False, True])
def test_places_of_outputs(tmp_path, interleaved):
    """Each output of a packed row is stored once, where the row came from."""
    shape = HopperShape(32, 2, 2, 4, 1, has_table=True)
    program = hopper_program(
        Variant(4, BF16, BF16, 1, False), shape, experts=True, interleaved=interleaved
    )
    built = build(tmp_path, STORE, program.options)
    for n, rows in ((176, 32), (256, 5), (16, 1)):
        y = torch.frombuffer(bytearray(run(built, b"", n, rows)), dtype=torch.int16).view(rows, n)
        order = torch.arange(n)
        if interleaved:
            order = order.view(2, -1, 8).transpose(0, 1).flatten()
        for row in range(rows):
            assert torch.equal(y[row][order].long() & 0xFFFF, torch.arange(n) | row << 10), n
