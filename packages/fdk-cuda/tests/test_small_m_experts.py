"""small_m_experts.cu on the host, thread by thread, against plain products: exact."""

from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from host_block import BLOCK
from host_cuda import build, needs_gxx, run

from fdk_cuda.marlin.expert_layout import MarlinExpertLayout
from fdk_cuda.marlin.expert_ops import ExpertStack, few_rows_fields, is_interleaved
from fdk_cuda.marlin.heuristics_experts import ExpertPlan, shared_bytes
from fdk_cuda.marlin.instantiations import TileShape, Variant, small_m_experts_program
from fdk_formats import Format, QuantisedStack
from fdk_formats.format import BITS
from fdk_formats.testing import random_quantised

MAIN = (
    BLOCK
    + r"""
#include "small_m_experts.cu"
uint8 shared[232448] __attribute__((aligned(1024)));
static Params p;
static std::vector<uint8> read_bytes(long count) {
  std::vector<uint8> bytes(count);
  if ((long)fread(bytes.data(), 1, count, stdin) != count) throw "short input";
  return bytes;
}
template <class T>
static T* pointer(std::vector<uint8>& bytes) {
  return bytes.empty() ? nullptr : reinterpret_cast<T*>(bytes.data());
}
int main(int, char** text) {
  long given[8];
  for (int i = 0; i < 8; i++) given[i] = atol(text[1 + i]);
  std::vector<uint8> bytes[5];
  for (int i = 0; i < 5; i++) bytes[i] = read_bytes(given[i]);
  std::vector<uint8> y(given[5], 0xFF);
  p = Params{pointer<uint8>(bytes[0]), pointer<uint16>(bytes[1]), pointer<uint16>(bytes[2]),
             pointer<uint16>(bytes[3]), y.data(), pointer<int>(bytes[4])};
  for (int i = 0; i < 21; i++) (&p.n)[i] = (int)atol(text[9 + i]);
  const SharedMemory memory(shared);
  const auto* end = memory.sums + p.buffers * WARPS * p.rows * SUM_STRIDE;
  if (reinterpret_cast<const uint8*>(end) > shared + given[7]) throw "too little shared memory";
  run_blocks(given[6], THREADS, [] { small_m_experts(p); }, shared, given[7]);
  fwrite(y.data(), 1, y.size(), stdout);
}
"""
)
WARPS = 4
# Fragments, blocks of a stage, rows of a tile.
CUTS = [(2, 2, 1), (4, 1, 1), (2, 2, 8), (4, 1, 8)]


@dataclass(frozen=True)
class Case:
    """A call: experts of its pairs, and how it is computed."""

    format: str
    n: int
    k: int
    ids: tuple[tuple[int, ...], ...]
    experts: int = 3
    cut: tuple[int, int, int] = CUTS[2]
    split: int = 1
    buffers: int = 1
    grid: int = 2
    dtype: torch.dtype = torch.bfloat16
    shared_codebook: bool = False
    bias: bool = True
    swiglu: bool = False
    wide: bool = True
    zeros: bool = True
    own_rows: bool = False  # x has a row of each pair


def whole_stack(case: Case) -> QuantisedStack:
    """Makes experts whose values are whole numbers and scales powers of two: sums are exact."""
    format = Format.parse(case.format)
    made = []
    for expert in range(case.experts):
        q = random_quantised(format, case.n, case.k, seed=expert)
        generator = torch.Generator().manual_seed(expert)
        if q.scale.is_floating_point():
            powers = torch.randint(-1, 2, q.scale.shape, generator=generator)
            q = replace(q, scale=torch.exp2(powers.float()).to(q.scale.dtype))
        if q.zero_point is not None:
            q = replace(q, zero_point=q.zero_point.float().round().to(q.zero_point.dtype))
        if q.codebook is not None:
            levels = len(q.codebook)
            values = torch.arange(levels).float() - levels // 2
            seed = 0 if case.shared_codebook else expert % 100  # exact in bfloat16
            q = replace(q, codebook=values.roll(seed) + (seed if levels < 128 else 0))
        made.append(q)
    return QuantisedStack.of(made)


def plan_of(case: Case, geometry) -> ExpertPlan:
    fragments, k_blocks, rows = case.cut
    shape = TileShape(fragments, k_blocks, 1, 1, WARPS, is_spread=rows == 1)
    n_units = geometry.padded_n // shape.tile_n
    shared = shared_bytes(geometry, shape, rows, case.buffers)
    return ExpertPlan(shape, rows, case.split, case.buffers, n_units, shared)


def program_of(case: Case, folder):
    """Compiles the kernel for a case."""
    geometry = MarlinExpertLayout(whole_stack(replace(case, experts=1)), case.dtype).geometry
    shape = plan_of(case, geometry).shape
    program = small_m_experts_program(Variant.of(geometry, case.dtype), shape)
    return build(folder, MAIN, program.options)


def check(program, case: Case) -> None:
    """Compares every output with the plain product; rows without a tile stay unwritten."""
    stack = whole_stack(case)
    layout = MarlinExpertLayout(stack, case.dtype)
    plan = plan_of(case, layout.geometry)
    generator = torch.Generator().manual_seed(1)
    ids = torch.tensor(case.ids)
    tokens, top_k = ids.shape
    pairs = tokens * top_k
    rows = pairs if case.own_rows else tokens
    x = torch.randint(-2, 3, (rows, case.k), generator=generator).to(case.dtype)
    bias = torch.randint(-9, 9, (case.experts, case.n), generator=generator).to(case.dtype)
    is_sorted = plan.rows > 1
    long_ids = bool(case.split % 2)
    listed = ids.to(torch.int64 if long_ids else torch.int32)
    padded_x = torch.nn.functional.pad(x, (0, layout.geometry.padded_k - case.k))
    w = ExpertStack(layout.packed, layout.codebook, layout._format, case.n, case.k)
    width = case.n // 2 if case.swiglu else case.n
    y = torch.empty(pairs, width, dtype=torch.float32 if case.wide else case.dtype)
    tensors = [w.packed, w.codebook, padded_x, bias if case.bias else bias[:0], listed]
    data = [t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]
    options = {"long_ids": long_ids, "swiglu": case.swiglu, "wide": case.wide}
    options |= {"zeros": case.zeros, "early": bool(case.split % 2)}
    fields = few_rows_fields(w, plan, case.dtype, pairs, pairs // rows, **options)
    out = run(
        program, b"".join(data), *map(len, data), y.nbytes, case.grid, plan.shared_bytes, *fields
    )
    got = torch.frombuffer(bytearray(out), dtype=y.dtype).view(y.shape)

    weights = stack.dequantise(torch.float32).double()
    wanted = torch.full((pairs, case.n), torch.nan, dtype=torch.float64)
    for pair, expert in enumerate(ids.flatten().tolist()):
        if not 0 <= expert < case.experts:
            if case.zeros or not is_sorted:
                wanted[pair] = 0
            continue
        row = x[pair if case.own_rows else pair // top_k].double()
        wanted[pair] = weights[expert] @ row + (bias[expert].double() if case.bias else 0)
    if case.swiglu:
        gate, up = wanted.chunk(2, 1)
        wanted = torch.nn.functional.silu(gate) * up
        close = torch.isclose(got.double(), wanted, rtol=1e-2, atol=1e-3, equal_nan=True)
        assert close.all(), case
    else:
        same = (got == wanted.to(y.dtype)) | (got.isnan() & wanted.isnan())
        assert same.all(), (case, (~same).nonzero()[:5].tolist())


IDS = ((0, 2), (2, 1), (2, -1), (0, 2), (2, 0))


@needs_gxx
@pytest.mark.parametrize(
    ("kind", "bits"),
    [*(("custom", bits) for bits in BITS), *(("affine", bits) for bits in (1, 4, 5, 8))],
)
def test_widths(tmp_path, kind, bits):
    """Every width: groups of 64, 32 and a row, scales of every dtype, both dtypes of x."""
    group, scale = (("64", ""), ("32", "-fp32"), ("row", "-fp16"))[bits % 3]
    zeros = "" if kind == "custom" else "-zint" if bits % 2 else ""
    dtype = torch.float16 if bits % 4 == 2 else torch.bfloat16
    suffix = f"g{group}" if group != "row" else group
    case = Case(f"{kind}{bits}-{suffix}{scale}{zeros}", 48, 192, IDS, dtype=dtype)
    case = replace(case, cut=CUTS[bits % 4])
    program = program_of(case, tmp_path)
    for split, buffers, grid in ((1, 1, 2), (2, 2, 3), (4, 1, 1)):
        if case.cut[1] == 2 and split == 4:
            continue  # two stages
        check(program, replace(case, split=split, buffers=buffers, grid=grid))
    check(program, replace(case, n=37, k=256, shared_codebook=True))  # not interleaved


@needs_gxx
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_routing(tmp_path, cut):
    """Empty experts, one with all rows, none, top_k from 1 to 8, and orders of codebooks."""
    case = Case("custom4-g64", 96, 256, IDS, experts=5, cut=cut)
    program = program_of(case, tmp_path)
    generator = torch.Generator().manual_seed(0)
    one = ((3,),) * 19
    nobody = ((-1, 7),) * 3
    every = tuple(map(tuple, torch.randint(-1, 6, (6, 8), generator=generator).tolist()))
    # More pairs than threads, most of no expert.
    many = tuple(map(tuple, torch.randint(-9, 9, (29, 8), generator=generator).tolist()))
    routings = ((2, 0, 4, 4),), one, nobody, every, ((4, 3, 2, 1, 0),) * 2, many
    for turn, ids in enumerate(routings):
        split, grid = 1 + turn % 2, (4, 1, 40)[turn % 3]  # also more thread blocks than units
        own = replace(case, ids=ids, split=split, buffers=split, grid=grid)
        check(program, replace(own, zeros=turn % 2 == 0, own_rows=turn % 2 == 1))
        check(program, replace(own, shared_codebook=True, wide=False, bias=False, grid=5))
        check(program, replace(own, swiglu=True, n=64, grid=4))


@needs_gxx
def test_many_experts(tmp_path):
    """Bins of several warps, in fewer and in more steps than there are warps."""
    case = Case("custom2-row", 16, 64, IDS, cut=(2, 1, 8), grid=3)
    program = program_of(case, tmp_path)
    generator = torch.Generator().manual_seed(0)
    for experts in (31, 32, 127, 300):
        ids = torch.randint(-1, experts + 2, (40, 4), generator=generator)
        check(program, replace(case, experts=experts, ids=tuple(map(tuple, ids.tolist()))))


def test_interleaving():
    assert [n for n in range(1, 49) if is_interleaved(n)] == [16, 32, 48]
