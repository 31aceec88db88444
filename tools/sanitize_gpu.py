"""Run every family of GPU kernels directly, each answer checked, for compute-sanitizer.

    python tools/sanitize_gpu.py --compile       first, without the tool
    python tools/sanitize_gpu.py --only triton   likewise
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1      so that the tool sees where each tensor ends
    compute-sanitizer --tool memcheck --report-api-errors no python tools/sanitize_gpu.py
    compute-sanitizer --tool racecheck python tools/sanitize_gpu.py --only small_m,hopper -k custom4

Families: small_m (GEMV and small m, dequantising), repack, hopper (many rows, both directions) and
triton. Under the tool each kernel of torch takes seconds to load, so torch only allocates and
copies on the GPU: weights are made, and answers checked, on the CPU. --compile fills
$FDK_CUDA_CACHE, also without a GPU; Triton's kernels are compiled by a run without the tool.
"""

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from fdk_cuda.marlin import MARLIN, MARLIN_LUT, dgrad, repack, runtime
from fdk_cuda.marlin import instantiations as programs
from fdk_cuda.marlin.heuristics_hopper import HopperPlan, hopper_plans
from fdk_cuda.marlin.heuristics_small_m import Device, SmallPlan, small_plans
from fdk_cuda.marlin.layout import Geometry, pack_layout, unpack_layout
from fdk_cuda.marlin.ops import dequantise
from fdk_cuda.marlin.testing import multiplied_weight
from fdk_cuda.nvrtc import Program, architecture, cached_cubin
from fdk_formats.codebooks import named_codebook
from fdk_formats.format import BITS, Format
from fdk_formats.packing import packed_width
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.testing import nrmse, random_quantised

if importlib.util.find_spec("triton") is not None:
    from fdk_cuda.triton import TritonLayout, launch
    from fdk_cuda.triton.configs import DgradWgmmaConfig, GemmConfig, GemmWgmmaConfig
    from fdk_cuda.triton.configs.dgrad import dgrad_config
    from fdk_cuda.triton.configs.gemm import fit
    from fdk_cuda.triton.configs.gemv import gemv_config

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ARCH = "sm_90a"  # target of --compile where there is no GPU
# Plans for a GPU of few processors give several tiles to a block of threads.
FEW = Device(sm_count=6, shared_bytes=232448, has_clusters=True, is_hopper=True)
MANY = replace(FEW, sm_count=132)  # a tile to a cluster

# Tiles that are not full. 448 rows of 64 are seven tiles for six SMs: short ones. The 1-bit
# GEMV by bit planes has tiles of 96 rows and stages of 192 to 768 columns. Last, tiles of 256 rows.
SIZES, BITPLANE_SIZES, TALL_SIZES = (448, 512), (192, 768), (768, 512)
SMALL = (
    *((f"custom{bits}-g64", BF16, m, SIZES) for bits in BITS for m in (1, 16)),
    *((f"custom{bits}-g64", BF16, bits, SIZES) for bits in (3, 8)),
    *(("custom1-g64", BF16, 3, SIZES), ("custom1-g32-fp16", FP16, 16, SIZES)),
    *(("binary1-g64", BF16, 9, SIZES), ("custom1-g64-fp16", BF16, 16, SIZES)),
    *((f"affine{bits}-g64", BF16, 1, SIZES) for bits in (1, 3, 4, 7)),
    *(("affine1-g64-zint", BF16, 3, SIZES), ("affine2-g64-fp16", FP16, 1, SIZES)),
    *(("affine3-g64", BF16, 16, SIZES), ("affine5-g64-zint", BF16, 4, SIZES)),
    *((f"affine{bits}-g32", FP16, 9, SIZES) for bits in (4, 6)),
    ("affine8-g64-zint", BF16, 16, SIZES),
    *(("custom1-g64", BF16, 1, BITPLANE_SIZES), ("affine1-g64-zint", FP16, 1, BITPLANE_SIZES)),
    *((f"custom{bits}-g64", BF16, 16, TALL_SIZES) for bits in (1, 5, 6)),
)
# n, k and group size, with one scale in 64 columns or two: rows of an odd number of bytes, groups
# that end inside 64 columns, more than a block of threads side by side.
REPACKED = {
    1: ((70, 192, 64), (33, 13, 13), (129, 1152, 128)),
    2: ((70, 192, 96), (100, 288, 32), (1, 128, 32)),
}
# Partial tiles of rows, columns and rows of x; every tile of the first formats, two of the others.
HOPPER_SIZES, HOPPER_M = (568, 1088), 70
EVERY_TILE = (*(f"custom{bits}-g64" for bits in (4, 1, 3, 8, 2, 5, 6, 7)), "binary1-g64")
TWO_TILES = (
    *("affine4-g32", "affine8-g64-zint", "affine3-g64-fp16-zint", "affine1-g32"),
    *("affine2-g32-fp16-zint", "int8-g64-signmax", "affine5-g32", "affine6-g64-zint"),
)


class WrongAnswerError(Exception):
    """A kernel's answer is not what it should be."""


class Case(NamedTuple):
    """A launch to run under the tool; ``run`` raises WrongAnswerError."""

    name: str
    run: Callable[[], None]
    programs: tuple[Program, ...] = ()  # those that NVRTC compiles
    hopper: bool = False  # needs compute capability 9.x


def check(y: Tensor, oracle: Tensor, limit: float | None = None) -> None:
    """Raise unless y is as close to float64 as ``limit``, or nearly as rounding once would be."""
    limit = limit or 1.2 * nrmse(oracle.to(y.dtype), oracle) + 1e-5
    if not (error := nrmse(y.cpu(), oracle)) <= limit:
        raise WrongAnswerError(f"error {error:.2e}, more than {limit:.2e}")


def check_same(got: Tensor | None, wanted: Tensor | None) -> None:
    """Raise unless both are equal, bit for bit."""
    if got is not None and wanted is not None and not torch.equal(got.cpu(), wanted):
        raise WrongAnswerError(f"{int((got.cpu() != wanted).sum())} of {wanted.numel()} differ")


def normal(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Draw random values on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def nan_on_gpu(*shape: int, dtype: torch.dtype) -> Tensor:
    """Make NaNs on the GPU, by a copy."""
    return torch.full(shape, torch.nan, dtype=dtype).cuda()


def random_weight(format: str, n: int, k: int) -> QuantisedTensor:
    """Make a random weight on the CPU; that of a named grid has the grid's codebook."""
    q = random_quantised(Format.parse(format), n, k)
    if q.format.codebook in ("int", "binary"):
        return replace(q, codebook=named_codebook(q.format, k).tensor(q.device))
    return q


@cache
def marlin_weight(
    format: str, n: int, k: int, dtype: torch.dtype
) -> tuple[QuantisedTensor, Geometry, Tensor, Tensor]:
    """Pack a weight on the CPU; return it, its geometry, and bytes and codebook on the GPU."""
    q = random_weight(format, n, k)
    layout: Any = (MARLIN if q.format.is_affine else MARLIN_LUT).pack(q, dtype=dtype)
    return q, layout.geometry, layout.packed.cuda(), layout.codebook.cuda()


def various(plans: list[Any], traits: Callable[[Any], tuple[Hashable, ...]]) -> Iterator[Any]:
    """Yield a few plans that together have every value of every trait."""
    missing = {trait for plan in plans for trait in enumerate(traits(plan))}
    while missing:
        best = max(plans, key=lambda plan: len(missing & set(enumerate(traits(plan)))))
        missing -= set(enumerate(traits(best)))
        yield best


def _small_traits(plan: SmallPlan) -> tuple[Hashable, ...]:
    s, limbs, lone = plan.shape, plan.shape.limb_rows > 0, plan.whole_passes == 0
    tile = s.fragments, s.k_blocks, s.n_groups, limbs, s.is_bitplane
    short = s.short_blocks > 0, plan.cluster > 1
    cluster = plan.cluster, limbs
    return tile, (lone, plan.cluster, s.is_bitplane), s.warps, cluster, short, plan.sum_buffers


def small_m_cases() -> Iterator[Case]:
    """Yield plans for up to 16 rows of x, and dequantising."""
    for format, dtype, m, (n, k) in SMALL:
        geometry = Geometry.of(Format.parse(format), n, k)
        variant = programs.Variant.of(geometry, dtype)
        plans = list(small_plans(geometry, variant, m, FEW))
        if (n, k) == BITPLANE_SIZES:
            plans = [plan for plan in plans if plan.shape.is_bitplane]
        if (n, k) == TALL_SIZES:
            plans = [plan for plan in plans if plan.shape.tile_n == 256]
        for plan in various(plans, _small_traits):
            program = programs.small_m_program(variant, plan.shape)
            name = f"{format} {str(dtype)[6:]} m{m}, {program.name}, {plan}"
            yield Case(name, partial(_run_small, format, dtype, m, plan, n, k), (program,))
    for bits, (kind, dtype) in product(BITS, (("custom{}-g64", BF16), ("affine{}-g32-fp32", FP16))):
        format = kind.format(bits)
        variant = programs.Variant.of(Geometry.of(Format.parse(format), *SIZES), dtype)
        run = partial(_run_dequantise, format, dtype)
        yield Case(f"{format} dequantise", run, (programs.dequantise_program(variant),))


def _run_small(format: str, dtype: torch.dtype, m: int, plan: SmallPlan, n: int, k: int) -> None:
    q, geometry, packed, codebook = marlin_weight(format, n, k, dtype)
    variant = programs.Variant.of(geometry, dtype)
    x, bias = normal(m, k, dtype=dtype), normal(n, dtype=dtype, seed=2)
    given = packed, codebook, x.cuda(), bias.cuda(), nan_on_gpu(m, n, dtype=dtype)
    fields = runtime.small_fields(variant, plan, geometry, m)
    runtime.small_launch(variant, plan, 0)(*(tensor.data_ptr() for tensor in given), *fields)
    check(given[-1], x.double() @ multiplied_weight(q, dtype, plan.shape).T + bias.double())


def _run_dequantise(format: str, dtype: torch.dtype) -> None:
    q, _, packed, codebook = marlin_weight(format, *SIZES, dtype)
    check_same(dequantise(packed, codebook, format, *SIZES), q.dequantise(dtype))


def repack_cases() -> Iterator[Case]:
    """Yield every program that packs and unpacks the Marlin layout."""
    for bits, per_row, dtype, has_zero in product(BITS, REPACKED, (BF16, FP32), (False, True)):
        for sizes in REPACKED[per_row]:
            g = Geometry(bits, *sizes, dtype, has_zero)
            yield Case(f"repack {g}", partial(_run_repack, g), (programs.repack_program(g),))


def _run_repack(g: Geometry) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = g.n, packed_width(g.bits, g.k)
    packed = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    groups = g.n, g.k // g.group_size
    scale, zero = (normal(*groups, dtype=g.scale_dtype, seed=seed) for seed in (1, 2))
    own_zero = zero if g.has_zero_point else None
    wanted = pack_layout(g, packed, scale, own_zero)
    unaligned = torch.cat([packed.new_zeros(1), packed.flatten()]).cuda()[1:].view(shape)
    for given in (packed.cuda(), unaligned):
        zero_on_gpu = None if own_zero is None else own_zero.cuda()
        check_same(repack.pack(g, given, scale.cuda(), zero_on_gpu), wanted)
    for parts in zip(repack.unpack(g, wanted.cuda()), unpack_layout(g, wanted), strict=True):
        check_same(*parts)


def _hopper_traits(plan: HopperPlan) -> tuple[Hashable, ...]:
    s, tile = plan.shape, (plan.shape.tile_m, plan.shape.consumers, plan.shape.k_groups)
    cluster, whole = (s.cluster, s.k_groups, s.tile_m > 64), plan.whole_tiles > plan.grid
    return tile, cluster, s.k_blocks, min(plan.splits, 3), (plan.splits > 1, whole)


def hopper_cases() -> Iterator[Case]:
    """Yield plans for many rows of x or dy on Hopper."""
    directions = (
        (False, hopper_plans, programs.hopper_program),
        (True, dgrad.dgrad_plans, programs.hopper_dgrad_program),
    )
    for format, (dy, plans_of, program) in product((*EVERY_TILE, *TWO_TILES), directions):
        geometry = Geometry.of(Format.parse(format), *HOPPER_SIZES)
        variant = programs.Variant.of(geometry, BF16)
        plans = [plan for gpu in (FEW, MANY) for plan in plans_of(geometry, HOPPER_M, gpu)]
        chosen = list(various(plans, _hopper_traits))
        for plan in chosen if format in EVERY_TILE else chosen[:2]:
            needed = [program(variant, plan.shape)]
            if plan.partial_tiles > 0:
                needed.append(programs.split_k_reduce_program(BF16, plan.shape))
            run = partial(_run_hopper, format, dy, plan)
            yield Case(f"{format} {'dx' if dy else 'y'}, {plan}", run, tuple(needed), hopper=True)


def _run_hopper(format: str, dy: bool, plan: HopperPlan) -> None:
    n, k = HOPPER_SIZES
    q, geometry, packed, codebook = marlin_weight(format, n, k, BF16)
    W_hat = q.dequantise(BF16).double()
    x, bias = normal(HOPPER_M, n if dy else k, dtype=BF16), normal(n, dtype=BF16, seed=2)
    if dy:
        runner = dgrad.dgrad_runner(geometry, BF16, HOPPER_M, plan, 0)
        check(dgrad.run_dgrad(runner, x.cuda(), packed, codebook, k), x.double() @ W_hat)
    else:
        runner = runtime.hopper_runner(geometry, BF16, HOPPER_M, plan, 0)
        y = runtime.run_hopper(runner, x.cuda(), packed, codebook, bias.cuda(), n)
        check(y, x.double() @ W_hat.T + bias.double())


def triton_cases() -> Iterator[Case]:
    """Yield every kernel of Triton; sizes end within a tile of rows, outputs and columns."""
    gemm, many, grad = GemmConfig, GemmWgmmaConfig, DgradWgmmaConfig
    # Kernel, format, dtype, m, n, k and, where the backend does not choose it, the configuration.
    cases: list[tuple[Any, ...]] = [
        *(("gemv", f"custom{b}-g64", BF16, (3, 16)[b % 2], 333, 64 * 67) for b in BITS),
        *(("gemv", f"affine{b}-g128", FP16, (16, 1)[b % 2], 333, 1152) for b in (1, 2, 3, 4, 7)),
        ("gemv", "custom4-g64", BF16, 1, 8117, 256),
        ("gemm", "custom3-g16", FP16, 77, 137, 16 * 9, gemm(1, 4, 32)),
        ("gemm", "custom4-g64", BF16, 77, 137, 64 * 9, gemm(1, 8, 64, split_k=2)),
        ("gemm", "affine8-g24", FP16, 200, 137, 24 * 9, gemm(1, 8, 128, split_k=3)),
        ("gemm_wgmma", "custom4-g64", BF16, 200, 328, 64 * 41, many(256, 2, 2)),
        ("gemm_wgmma", "custom3-g128", FP16, 77, 136, 128 * 9, many(128)),
        ("gemm_wgmma", "affine2-row", FP16, 130, 264, 1000, many(256)),
        ("gemm_wgmma", "custom5-g64", BF16, 65, 136, 64 * 9, many(64, 4, 2)),
        # The last round is of few programs, in pairs, on a GPU of 132 processors.
        ("gemm_wgmma", "custom4-g64", BF16, 300, 8776, 64 * 9, many(256)),
        ("gemm_wgmma", "affine4-g64", BF16, 300, 8776, 64 * 9, many(256)),
        *(("dgrad", f"custom{b}-g64", BF16, 7, 333, 64 * 9) for b in (1, 2, 3)),
        *(("dgrad", f"custom{b}-g64", FP16, 16, 333, 64 * 9) for b in (4, 8)),
        ("dgrad", "affine4-g24", FP16, 37, 333, 24 * 9),
        # The configurations of an H200 for 8192 x 8192: programs of 16 and 32 positions.
        *(("wide dgrad", f"custom{b}-g64", BF16, 7, 333, 1152) for b in (1, 5)),
        ("wide dgrad", "custom3-g64", FP16, 1, 333, 1152),
        ("wide dgrad", "affine5-g128", FP16, 1, 333, 1152),
        ("dgrad_wgmma", "custom4-g64", BF16, 100, 328, 64 * 41, grad(split_n=2)),
        ("dgrad_wgmma", "affine2-g128", FP16, 77, 136, 128 * 9, grad()),
        ("dgrad_wgmma", "custom8-row", FP16, 40, 1208, 2000, grad(split_n=4)),
        ("dgrad_wgmma", "affine1-g64", BF16, 130, 328, 64 * 41, grad(128, 2, n_tiles=2)),
        ("dgrad_wgmma", "custom2-g128", BF16, 100, 136, 128 * 9, grad(128)),
        ("dgrad_wgmma", "custom8-row", FP16, 300, 328, 1000, grad(256, 2, n_tiles=2)),
        ("dgrad_wgmma", "affine4-g192", BF16, 77, 1208, 192 * 5, grad(256, n_tiles=2)),
        *(("dequantise", f"custom{b}-g64", FP16, 0, 37, 64 * 9) for b in (6, 7, 8)),
        *(("dequantise", f, BF16, 0, 37, 144) for f in ("custom1-g16", "affine3-g24")),
        ("dequantise", "affine8-row", BF16, 0, 37, 270),
    ]
    for kernel, format, dtype, m, n, k, *config in cases:
        name = f"{kernel} {format} {str(dtype)[6:]} m{m} n{n} k{k} {config}"
        run = partial(_run_triton, kernel, format, dtype, m, n, k, *config)
        yield Case(name, run, hopper="wgmma" in kernel)


def _run_triton(
    kernel: str, format: str, dtype: torch.dtype, m: int, n: int, k: int, config: Any = None
) -> None:
    q = random_weight(format, n, k)
    layout, gpu, affine = TritonLayout(q).cuda(), launch.gpu_at(0), q.format.is_affine
    w, W_hat, exact = layout._weight(), q.dequantise(dtype), q.dequantise(torch.float64)
    if kernel == "dequantise":
        return check_same(launch.dequantise(w, dtype), W_hat)
    if "dgrad" in kernel:
        x = normal(m, n, dtype=dtype)
        if config is None:
            wide = kernel == "wide dgrad"
            sizes = replace(w.layout, n=8192, k=8192) if wide else w.layout
            config = dgrad_config(sizes, m, gpu, affine=affine)
            config = replace(config, split_n=2) if wide else config
        y, torch_y = launch.linear_dgrad(x.cuda(), w, config), x @ W_hat
        return check(y, x.double() @ exact, 2 * nrmse(torch_y, x.double() @ exact))
    x, bias = normal(m, k, dtype=dtype), normal(n, dtype=dtype, seed=2)
    config = config or gemv_config(w.layout, m, gpu, affine=affine)
    config = fit(config, w.layout.bits, gpu.shared_bytes) if kernel == "gemm" else config
    oracle = linear(x.double(), exact, bias.double())
    y = launch.linear(x.cuda(), w, bias.cuda(), config)
    return check(y, oracle, 2 * nrmse(linear(x, W_hat, bias), oracle))


FAMILIES = {
    "small_m": small_m_cases,
    "repack": repack_cases,
    "hopper": hopper_cases,
    "triton": triton_cases,
}


def main(arguments: list[str] | None = None) -> int:
    """Run, compile or list the cases; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(FAMILIES), help="families")
    parser.add_argument("-k", dest="word", default="", help="only cases whose names contain it")
    parser.add_argument("--compile", action="store_true", help="compile the cases, run none")
    args = parser.parse_args(arguments)
    if unknown := sorted(set(args.only.split(",")) - set(FAMILIES)):
        parser.error(f"--only: no {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    cases = [
        case for name in args.only.split(",") for case in FAMILIES[name]() if args.word in case.name
    ]
    if not cases:
        parser.error(f"-k {args.word}: no case of {args.only} has that in its name")
    has_gpu = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if has_gpu else None
    if args.compile:
        arch = architecture(capability) if capability else ARCH
        needed = dict.fromkeys(program for case in cases for program in case.programs)
        with ProcessPoolExecutor() as executor:
            compiled = list(executor.map(partial(cached_cubin, arch=arch), needed))
        print(f"{len(compiled)} kernels for {len(cases)} cases")
    elif capability is None:
        print("no GPU: only --compile works without one")
        return 2
    else:
        run_all([case for case in cases if not case.hopper or capability[0] == 9])
    return 0


def run_all(cases: list[Case]) -> None:
    """Run cases, each named first, so that what the tool prints follows its name.

    Raises:
        WrongAnswerError: a kernel's answer is wrong.
    """
    # Where Triton cannot make a kernel of Gluon, the backend dequantises and warns.
    warnings.filterwarnings("error", message=".*cannot make")
    for i, case in enumerate(cases, 1):
        print(f"{i} of {len(cases)}: {case.name}", flush=True)
        case.run()
        torch.cuda.synchronize()
    print(f"all {len(cases)} answers are right, on {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    sys.exit(main())
