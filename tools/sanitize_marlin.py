"""Cases of sanitize_gpu.py: the kernels that NVRTC compiles.

Sizes are small, with tiles that are not full, and plans are those for a GPU of few SMs, so
that a block of threads takes several tiles.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fdk_cuda.marlin import MARLIN, MARLIN_LUT, MarlinLayout, repack
from fdk_cuda.marlin.dgrad import dgrad_plans, dgrad_runner, run_dgrad
from fdk_cuda.marlin.heuristics_hopper import NARROW_TILE_M, HopperPlan, hopper_plans
from fdk_cuda.marlin.heuristics_small_m import Device, SmallPlan, small_plans
from fdk_cuda.marlin.instantiations import (
    Variant,
    dequantise_program,
    hopper_dgrad_program,
    hopper_program,
    repack_program,
    small_m_program,
    split_k_reduce_program,
)
from fdk_cuda.marlin.layout import Geometry, pack_layout, unpack_layout
from fdk_cuda.marlin.ops import dequantise
from fdk_cuda.marlin.runtime import hopper_runner, run_hopper, small_fields, small_launch
from fdk_cuda.marlin.testing import multiplied_weight
from fdk_cuda.nvrtc import Program
from fdk_formats.codebooks import named_codebook
from fdk_formats.format import BITS, Format
from fdk_formats.packing import packed_width
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.testing import nrmse, random_quantised

BF16, FP16 = torch.bfloat16, torch.float16
FEW = Device(sm_count=6, shared_bytes=232448, has_clusters=True, is_hopper=True)
MANY = replace(FEW, sm_count=132)  # where a tile finds a cluster of its own
HOPPER = 9  # its compute capability
AnyPlan = TypeVar("AnyPlan", SmallPlan, HopperPlan)

# Format, dtype of x and rows of it. 448 rows of 64 are seven tiles for six SMs: short ones.
SMALL_N, SMALL_K = 448, 512
SMALL = (
    *(("custom1-g64", BF16, m) for m in (1, 3, 16)),
    *(("custom1-g32-fp16", FP16, 16), ("binary1-g64", BF16, 9), ("custom1-g64-fp16", BF16, 16)),
    *(
        (f"custom{bits}-g64", BF16, m)
        for bits, few in ((2, 1), (3, 3), (4, 1), (8, 5))
        for m in (few, 16)
    ),
    *(("affine1-g64", BF16, 1), ("affine1-g64-zint", BF16, 3), ("affine2-g64-fp16", FP16, 1)),
    *(("affine3-g64", BF16, 1), ("affine3-g64", BF16, 16), ("affine4-g64", BF16, 1)),
    *(("affine4-g32", FP16, 9), ("affine8-g64-zint", BF16, 16)),
    *((f"custom{bits}-g64", BF16, m) for bits in (5, 6, 7) for m in (1, 16)),
    *(("affine5-g64-zint", BF16, 4), ("affine6-g32", FP16, 9), ("affine7-g64", BF16, 1)),
)
# gemv_bitplane.cu also has tiles of 96 rows, and stages of 192, 384 and 768 columns: n, k.
BITPLANE_SIZES = 192, 768
# Two groups of warps with 128 rows each: three tiles.
TALL_SIZES = 768, 512
DEQUANTISED = tuple(
    (f"{codebook}{bits}-{more}", dtype)
    for bits in BITS
    for codebook, more, dtype in (("custom", "g64", BF16), ("affine", "g32-fp32", FP16))
)
# n, k and group size, of one scale in 64 columns and of two: rows of an odd number of bytes, groups
# that end inside 64 columns, more than a block of threads side by side.
RELAID = {
    1: ((70, 192, 64), (33, 13, 13), (129, 1152, 128)),
    2: ((70, 192, 96), (100, 288, 32), (1, 128, 32)),
}
# Partial tiles of rows, columns and rows of x. Of the first formats every tile.
HOPPER_N, HOPPER_K, HOPPER_M = 568, 1088, 70
EVERY_TILE = (*(f"custom{bits}-g64" for bits in (4, 1, 3, 8, 2, 5, 6, 7)), "binary1-g64")
SOME_TILES = (
    *("affine4-g32", "affine8-g64-zint", "affine3-g64-fp16-zint", "affine1-g32"),
    *("affine2-g32-fp16-zint", "int8-g64-signmax", "affine5-g32", "affine6-g64-zint"),
)


class WrongAnswerError(Exception):
    """A kernel's answer is not what it should be."""


@dataclass(frozen=True)
class Case:
    """Something to run under the tool.

    Attributes:
        name: says what is run.
        run: runs it on the current GPU; raises WrongAnswerError.
        programs: that it takes, of those that NVRTC compiles.
        capability: the major compute capability that it needs, if one.
    """

    name: str
    run: Callable[[], None]
    programs: tuple[Program, ...] = ()
    capability: int | None = None


class Packed(NamedTuple):
    """A weight on the CPU and what kernels take of it on the GPU."""

    q: QuantisedTensor
    layout: MarlinLayout
    packed: Tensor
    codebook: Tensor


def check(y: Tensor, oracle: Tensor) -> None:
    """y is no further from float64 than what rounding it once makes of it, nearly."""
    limit = 1.2 * nrmse(oracle.to(y.dtype), oracle) + 1e-5
    if not (error := nrmse(y.cpu(), oracle)) <= limit:
        raise WrongAnswerError(f"error {error:.2e}, more than {limit:.2e}")


def check_same(got: Tensor, wanted: Tensor) -> None:
    """Bit for bit."""
    if not torch.equal(got.cpu(), wanted):
        raise WrongAnswerError(f"{int((got.cpu() != wanted).sum())} of {wanted.numel()} differ")


def normal(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Random values, on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poison(*shape: int, dtype: torch.dtype) -> Tensor:
    """NaNs on the GPU, by a copy."""
    return torch.full(shape, torch.nan, dtype=dtype).cuda()


def weight(format: str, n: int, k: int) -> QuantisedTensor:
    """A random weight, on the CPU; that of a grid has its values."""
    q = random_quantised(Format.parse(format), n, k)
    if q.format.codebook in ("int", "binary"):
        return replace(q, codebook=named_codebook(q.format, k).tensor(q.device))
    return q


@cache
def packed_weight(format: str, n: int, k: int, dtype: torch.dtype) -> Packed:
    """The same in the Marlin layout, laid out on the CPU."""
    q = weight(format, n, k)
    layout = (MARLIN if q.format.is_affine else MARLIN_LUT).pack(q, dtype=dtype)
    assert isinstance(layout, MarlinLayout)
    return Packed(q, layout, layout.packed.cuda(), layout.codebook.cuda())


def various(
    plans: list[AnyPlan], traits: Callable[[AnyPlan], dict[str, Hashable]]
) -> Iterator[AnyPlan]:
    """A few plans that show every value of every trait."""
    missing = {trait for plan in plans for trait in traits(plan).items()}
    while missing:
        best = max(plans, key=lambda plan: len(missing & traits(plan).items()))
        missing -= traits(best).items()
        yield best


def small_traits(plan: SmallPlan) -> dict[str, Hashable]:
    """What plans of small_m.cu, gemv_int8_limbs.cu and gemv_bitplane.cu differ in."""
    shape = plan.shape
    kernel = shape.limb_rows > 0, shape.is_bitplane
    return {
        "piece": (shape.fragments, shape.k_blocks, shape.n_groups, *kernel),
        "lone": (plan.whole_passes == 0, plan.cluster, shape.is_bitplane),
        "warps": shape.warps,
        "split": (plan.cluster, shape.limb_rows > 0),
        "short": (shape.short_blocks > 0, plan.cluster > 1),
        "sum_buffers": plan.sum_buffers,
    }


def marlin_cases() -> Iterator[Case]:
    """Few rows of x, and dequantising."""
    sizes = SMALL_N, SMALL_K
    lone = (("custom1-g64", BF16, 1, BITPLANE_SIZES), ("affine1-g64-zint", FP16, 1, BITPLANE_SIZES))
    tall = ((f"custom{bits}-g64", BF16, 16, TALL_SIZES) for bits in (1, 5, 6))
    for format, dtype, m, (n, k) in (*((*case, sizes) for case in SMALL), *lone, *tall):
        geometry = Geometry.of(Format.parse(format), n, k)
        variant = Variant.of(geometry, dtype)
        plans = list(small_plans(geometry, variant, m, FEW))
        if (n, k) == BITPLANE_SIZES:
            plans = [plan for plan in plans if plan.shape.is_bitplane]
        if (n, k) == TALL_SIZES:
            plans = [plan for plan in plans if plan.shape.tile_n == 256]
        for plan in various(plans, small_traits):
            shape = plan.shape
            kind = f"digits of {shape.limb_rows}" if shape.limb_rows else "small_m"
            kind = "planes" if shape.is_bitplane else kind
            cut = f"{shape.fragments * 16 * shape.n_groups} x {shape.k_blocks * 64}"
            short = f", short {shape.short_blocks * 32}" if shape.short_blocks else ""
            short = f", lone {shape.short_blocks * 32}" if plan.whole_passes == 0 else short
            name = f"{format} {str(dtype)[6:]} m{m}, {kind}, {cut}, {shape.warps} warps{short}"
            run = partial(_run_small, format, dtype, m, plan, n, k)
            program = small_m_program(variant, shape)
            yield Case(f"{name}, cluster of {plan.cluster}", run, (program,))
    for format, dtype in DEQUANTISED:
        variant = Variant.of(Geometry.of(Format.parse(format), SMALL_N, SMALL_K), dtype)
        run = partial(_run_dequantise, format, dtype)
        yield Case(f"{format} {str(dtype)[6:]}, dequantise", run, (dequantise_program(variant),))


def _run_small(format: str, dtype: torch.dtype, m: int, plan: SmallPlan, n: int, k: int) -> None:
    w = packed_weight(format, n, k, dtype)
    geometry = w.layout.geometry
    variant = Variant.of(geometry, dtype)
    x, bias = normal(m, k, dtype=dtype), normal(n, dtype=dtype, seed=2)
    tensors = w.packed, w.codebook, x.cuda(), bias.cuda(), poison(m, n, dtype=dtype)
    pointers = (tensor.data_ptr() for tensor in tensors)
    small_launch(variant, plan, 0)(*pointers, *small_fields(variant, plan, geometry, m))
    W = multiplied_weight(w.q, dtype, plan.shape)
    check(tensors[-1], x.double() @ W.T + bias.double())


def _run_dequantise(format: str, dtype: torch.dtype) -> None:
    w = packed_weight(format, SMALL_N, SMALL_K, dtype)
    check_same(dequantise(w.packed, w.codebook, format, SMALL_N, SMALL_K), w.q.dequantise(dtype))


def layout_cases() -> Iterator[Case]:
    """Every program of repack.cu, both directions."""
    dtypes = (BF16, torch.float32)
    for bits, per_row, dtype, has_zero in product(BITS, RELAID, dtypes, (False, True)):
        for n, k, group_size in RELAID[per_row]:
            geometry = Geometry(bits, n, k, group_size, dtype, has_zero)
            assert geometry.per_row == per_row
            kind = f"{bits} bits, {n} x {k}, groups of {group_size}, {str(dtype)[6:]}"
            name = f"{kind}, {'with' if has_zero else 'no'} zero points"
            yield Case(name, partial(_run_layout, geometry), (repack_program(geometry),))


def _run_layout(g: Geometry) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = g.n, packed_width(g.bits, g.k)
    packed = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    scale, zero_point = (
        normal(g.n, g.k // g.group_size, dtype=g.scale_dtype, seed=seed) for seed in (1, 2)
    )
    kinds = scale, zero_point if g.has_zero_point else None
    laid_out = pack_layout(g, packed, *kinds)
    on_gpu = [None if kind is None else kind.cuda() for kind in kinds]
    assert on_gpu[0] is not None
    # Bytes that begin at no multiple of eight, too.
    moved = torch.cat([packed.new_zeros(1), packed.flatten()]).cuda()[1:].view(shape)
    for given in (packed.cuda(), moved):
        check_same(repack.pack(g, given, on_gpu[0], on_gpu[1]), laid_out)
    for got, wanted in zip(
        repack.unpack(g, laid_out.cuda()), unpack_layout(g, laid_out), strict=True
    ):
        if got is not None and wanted is not None:
            check_same(got, wanted)


def hopper_traits(plan: HopperPlan) -> dict[str, Hashable]:
    """What plans of hopper_gemm.cu and hopper_dgrad.cu differ in."""
    shape = plan.shape
    return {
        "tile": (shape.tile_m, shape.consumers, shape.k_groups),
        "cluster": (shape.cluster, shape.k_groups, shape.tile_m > NARROW_TILE_M),
        "k_blocks": shape.k_blocks,
        "parts": min(plan.splits, 3),
        "whole": (plan.splits > 1, plan.whole_tiles > plan.grid),
    }


def hopper_cases() -> Iterator[Case]:
    """Many rows of x or dy on Hopper."""
    for format in (*EVERY_TILE, *SOME_TILES):
        geometry = Geometry.of(Format.parse(format), HOPPER_N, HOPPER_K)
        variant = Variant.of(geometry, BF16)
        for direction, plans_of, program in (
            ("y", hopper_plans, hopper_program),
            ("dx", dgrad_plans, hopper_dgrad_program),
        ):
            plans = [plan for gpu in (FEW, MANY) for plan in plans_of(geometry, HOPPER_M, gpu)]
            chosen = list(various(plans, hopper_traits))
            for plan in chosen if format in EVERY_TILE else chosen[:2]:
                shape = plan.shape
                programs = [program(variant, shape)]
                programs += [split_k_reduce_program(BF16, shape)] if plan.partial_tiles > 0 else []
                tile = f"{shape.tile_n} x {shape.tile_m}, {shape.consumers} consumers"
                groups = " in pairs" if shape.k_groups > 1 else ""
                tiles = f"{plan.whole_tiles} whole tiles and {plan.partial_tiles} parts"
                name = f"{format} {direction}, {tile}{groups}, cluster of {shape.cluster}, {tiles}"
                run = partial(_run_hopper, format, direction, plan)
                yield Case(name, run, tuple(programs), HOPPER)


def _run_hopper(format: str, direction: str, plan: HopperPlan) -> None:
    w = packed_weight(format, HOPPER_N, HOPPER_K, BF16)
    geometry, W_hat = w.layout.geometry, w.q.dequantise(BF16).double()
    tensors = w.packed, w.codebook
    if direction == "y":
        x, bias = normal(HOPPER_M, HOPPER_K, dtype=BF16), normal(HOPPER_N, dtype=BF16, seed=2)
        runner = hopper_runner(geometry, BF16, HOPPER_M, plan, 0)
        y = run_hopper(runner, x.cuda(), *tensors, bias.cuda(), HOPPER_N)
        check(y, x.double() @ W_hat.T + bias.double())
    else:
        dy = normal(HOPPER_M, HOPPER_N, dtype=BF16)
        runner = dgrad_runner(geometry, BF16, HOPPER_M, plan, 0)
        check(run_dgrad(runner, dy.cuda(), *tensors, HOPPER_K), dy.double() @ W_hat)
