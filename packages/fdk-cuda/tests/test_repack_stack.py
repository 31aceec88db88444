"""repack_stack.cu on the host: the bytes of the Marlin layout, from the Triton layout."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from host_cuda import build, needs_gxx, run
from marlin_compile import BF16, FP32, VARIANTS, check_spills, geometry_of, variant_id

from fdk_cuda.marlin.instantiations import Variant, repack_stack_program
from fdk_cuda.marlin.layout import Geometry, pack_layout
from fdk_cuda.triton.expert_layout import TritonExpertLayout
from fdk_cuda.triton.expert_wgmma import (
    repack_fields,
    stack_geometry,
)
from fdk_formats import Format, QuantisedStack
from fdk_formats.scales import decode_scale
from fdk_formats.testing import random_quantised

EXPERTS, BITS = 3, range(1, 9)
MAIN = """
#include "repack_stack.cu"
template <class T>
std::vector<T> read(long count) {
  std::vector<T> values(count);
  if ((long)fread(values.data(), sizeof(T), count, stdin) != count) throw "short input";
  return values;
}
int main(int, char** text) {
  long sizes[12];
  for (int i = 0; i < 12; i++) sizes[i] = atol(text[1 + i]);
  const auto words = read<uint32>(sizes[0]);
  const auto scale = read<Scale>(sizes[1]), zero_point = read<Scale>(sizes[2]);
  std::vector<uint8> packed(sizes[3], 0xAA);
  int fields[8];
  for (int i = 0; i < 8; i++) fields[i] = sizes[4 + i];
  Params p{words.data(), scale.data(), zero_point.data(), packed.data()};
  memcpy(&p.warps, fields, sizeof fields);
  for (blockIdx.x = 0; blockIdx.x * WARPS < p.warps; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < THREADS; threadIdx.x++) repack_stack(p);
  fwrite(packed.data(), 1, packed.size(), stdout);
}
"""


def stack_of(format: Format, n: int, k: int) -> QuantisedStack:
    return QuantisedStack.of([random_quantised(format, n, k, seed=i) for i in range(EXPERTS)])


def wanted_bytes(stack: QuantisedStack, geometry: Geometry, order: torch.Tensor) -> torch.Tensor:
    """Packs the rows of each expert, in an order, as for one weight."""
    packed = []
    for q in stack.matrices():
        scale = q.scale
        if scale.dtype == torch.uint8:
            scale = decode_scale(scale).to(BF16)
        zero = None if q.zero_point is None else q.zero_point.to(scale.dtype)[order]
        packed.append(pack_layout(geometry, q.packed[order], scale[order], zero))
    return torch.stack(packed)


# Every width with short and long groups, rows and columns that fill no block, and gates.
@needs_gxx
@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("codebook", ["custom", "affine"])
@pytest.mark.parametrize("bits", BITS)
def test_bytes(tmp_path, bits, codebook, gates):
    group, scale = ((64, "bf16"), (32, "fp32"), (None, "e8m0"), (96, "fp16"))[bits % 4]
    kinds = {"scale_dtype": scale}
    if codebook == "affine":
        kinds["zero_point"] = "float" if bits % 2 and scale != "e8m0" else "int"
    format = Format(codebook, bits, group, **kinds)
    program, made_with = None, ()
    for n, k in ((80, 576), (64, 192), (144, 1152)) if gates else ((37, 576), (130, 192)):
        k = k + 5 if group is None else k
        stack = stack_of(format, n, k)
        w = TritonExpertLayout(stack)._weight()
        geometry = stack_geometry(w)
        order = torch.arange(n)
        if gates:  # rows g of a fragment are gates of its rows g + 8
            order = order.view(2, -1, 8).transpose(0, 1).flatten()
        wanted = wanted_bytes(stack, geometry, order)
        options = repack_stack_program(geometry).options
        assert options == made_with or program is None
        program, made_with = program or build(tmp_path, MAIN, options), options
        scales = decode_scale(w.scale).to(BF16) if scale == "e8m0" else w.scale
        zeros = scales[:0] if w.zero_point is None else w.zero_point.to(scales.dtype)
        tensors = w.words, scales, zeros
        data = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
        sizes = *(t.numel() for t in tensors), wanted.numel()
        got = run(program, data, *sizes, *repack_fields(w, geometry, gates=gates))
        got = torch.frombuffer(bytearray(got), dtype=torch.uint8).view(wanted.shape)
        assert torch.equal(got, wanted), (n, k)


def test_groups_that_marlin_does_not_have():
    w = TritonExpertLayout(stack_of(Format("custom", 4, 24), 16, 96))._weight()
    assert stack_geometry(w) is None


@pytest.mark.parametrize("variant", [*VARIANTS, Variant(3, BF16, FP32, 1, True)], ids=variant_id)
def test_spills_nothing(variant):
    check_spills(repack_stack_program(geometry_of(variant)))


def test_fields():
    w = TritonExpertLayout(stack_of(Format("custom", 4, 64), 16, 128))._weight()
    geometry = stack_geometry(w)
    assert geometry == Geometry(4, 16, 128, 64, BF16, False)
    # Two blocks of rows after padding, one tile of two blocks along k.
    assert repack_fields(w, geometry, gates=False) == (EXPERTS * 2, 1, 1, 2, 1, 2, 2, 0)
    assert repack_fields(w, geometry, gates=True)[-1] == 1
