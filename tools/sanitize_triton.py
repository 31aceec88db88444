"""Cases of sanitize_gpu.py: the kernels that Triton compiles, each launched directly."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from sanitize_marlin import BF16, FP16, HOPPER, Case, WrongAnswerError, check_same, normal, weight
from torch import Tensor
from torch.nn.functional import linear

from fdk_cuda.triton import TritonLayout, bf16_baseline, launch
from fdk_cuda.triton.configs import DgradWgmmaConfig, GemmWgmmaConfig
from fdk_cuda.triton.configs.dgrad import dgrad_config
from fdk_cuda.triton.configs.gemm import GemmConfig, fit
from fdk_cuda.triton.configs.gemv import gemv_config
from fdk_cuda.triton.launch import dgrad_wgmma, gemm_wgmma
from fdk_cuda.triton.packed_weight import PackedWeight
from fdk_formats.testing import nrmse

GEMM_CONFIGS = (
    GemmConfig(n_tiles=1, warps=4, block_m=32),
    GemmConfig(n_tiles=1, warps=8, block_m=64),
    GemmConfig(n_tiles=1, warps=8, block_m=128),
)
DTYPES = {BF16: "bf16", FP16: "fp16"}
# Rows, outputs and columns that end within a tile. By kernel: format, dtype, m, n, k.
SMALL = (
    *((f"custom{bits}-g64", BF16, (3, 16)[bits % 2], 333, 64 * 67) for bits in range(1, 9)),
    *((f"affine{bits}-g128", FP16, (16, 1)[bits % 2], 333, 128 * 9) for bits in (1, 2, 3, 4, 7)),
    ("custom4-g64", BF16, 1, 8117, 256),
)
GEMM = (
    ("custom3-g16", FP16, 77, 137, 9 * 16),
    ("custom4-g64", BF16, 77, 137, 9 * 64),
    ("affine8-g24", FP16, 200, 137, 9 * 24),
)
MANY = (
    ("custom4-g64", BF16, 200, 328, 64 * 41, GemmWgmmaConfig(256, 2, 2)),
    ("custom3-g128", FP16, 77, 136, 128 * 9, GemmWgmmaConfig(128)),
    ("affine2-row", FP16, 130, 264, 1000, GemmWgmmaConfig(256)),
    ("custom5-g64", BF16, 65, 136, 64 * 9, GemmWgmmaConfig(64, 4, 2)),
    # A last round of few programs, in pairs, on a GPU of 132 processors.
    ("custom4-g64", BF16, 300, 8776, 64 * 9, GemmWgmmaConfig(256)),
    ("affine4-g64", BF16, 300, 8776, 64 * 9, GemmWgmmaConfig(256)),
)
TRANSPOSED = (
    *((f"custom{bits}-g64", BF16, 7, 333, 9 * 64) for bits in (1, 2, 3)),
    *((f"custom{bits}-g64", FP16, 16, 333, 9 * 64) for bits in (4, 8)),
    ("affine4-g24", FP16, 37, 333, 9 * 24),
)
# The same by what an H200 takes for 8192 x 8192: programs of 16 and 32 positions.
WIDE = (
    *(("custom1-g64", BF16, 7, 333, 1152), ("custom3-g64", FP16, 1, 333, 1152)),
    *(("custom5-g64", BF16, 7, 333, 1152), ("affine5-g128", FP16, 1, 333, 1152)),
)
MANY_TRANSPOSED = (
    ("custom4-g64", BF16, 100, 328, 64 * 41, DgradWgmmaConfig(split_n=2)),
    ("affine2-g128", FP16, 77, 136, 128 * 9, DgradWgmmaConfig()),
    ("custom8-row", FP16, 40, 1208, 2000, DgradWgmmaConfig(split_n=4)),
    ("affine1-g64", BF16, 130, 328, 64 * 41, DgradWgmmaConfig(128, 2, n_tiles=2)),
    ("custom2-g128", BF16, 100, 136, 128 * 9, DgradWgmmaConfig(128)),
    ("custom8-row", FP16, 300, 328, 1000, DgradWgmmaConfig(256, 2, n_tiles=2)),
    ("affine4-g192", BF16, 77, 1208, 192 * 5, DgradWgmmaConfig(256, n_tiles=2)),
)
DEQUANTISE = (
    *(("custom1-g16", BF16, 37, 9 * 16), ("affine3-g24", FP16, 37, 9 * 24)),
    *(("custom6-g64", FP16, 37, 9 * 64), ("affine8-row", BF16, 37, 270)),
    *(("custom7-g64", BF16, 37, 9 * 64), ("custom8-g64", FP16, 37, 9 * 64)),
)
PLAIN = ((16, 203, 1000), (130, 203, 1000))


def triton_cases() -> Iterator[Case]:
    """Every kernel, and what runs before and behind those of many rows."""
    for format, dtype, *sizes in SMALL:
        yield _case("small", _run_small, format, dtype, sizes)
    for (format, dtype, *sizes), (which, _) in zip(GEMM, enumerate(GEMM_CONFIGS), strict=True):
        yield _case("gemm", partial(_run_gemm, which=which), format, dtype, sizes)
    for format, dtype, m, n, k, cut in MANY:
        run = partial(_run_many, config=cut)
        yield replace(_case("many", run, format, dtype, [m, n, k]), capability=HOPPER)
    for format, dtype, *sizes in TRANSPOSED:
        yield _case("transposed", _run_transposed, format, dtype, sizes)
    for format, dtype, *sizes in WIDE:
        case = _case("transposed", partial(_run_transposed, wide=True), format, dtype, sizes)
        yield replace(case, name=f"{case.name}, wide")
    for format, dtype, m, n, k, config in MANY_TRANSPOSED:
        run = partial(_run_many_transposed, config=config)
        case = _case("many transposed", run, format, dtype, [m, n, k])
        yield replace(case, capability=HOPPER)
    for format, dtype, n, k in DEQUANTISE:
        yield _case("dequantise", _run_dequantise, format, dtype, [0, n, k])
    for m, n, k in PLAIN:
        yield Case(f"plain bf16, m{m} n{n} k{k}", partial(_run_plain, m, n, k))


def _case(
    kernel: str, run: Callable[..., None], format: str, dtype: torch.dtype, sizes: list[int]
) -> Case:
    m, n, k = sizes
    name = f"{kernel} {format} {DTYPES[dtype]}, m{m} n{n} k{k}"
    return Case(name, partial(run, format, dtype, m, n, k))


def _on_gpu(layout: TritonLayout) -> PackedWeight:
    tensors = (layout.words, layout.scale, layout.zero_point, layout.values, layout.lanes)
    moved = [None if tensor is None else tensor.cuda() for tensor in tensors]
    return PackedWeight._make([*moved, layout.packed_layout])


def _check_product(
    run: Callable[[Tensor, PackedWeight, Tensor], Tensor | None],
    format: str,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    *,
    backward: bool = False,
) -> None:
    """y, or dx, is at most twice as far from float64 as torch's."""
    m, n, k = sizes
    q = weight(format, n, k)
    x, bias = normal(m, n if backward else k, dtype=dtype), normal(n, dtype=dtype, seed=2)
    w_hat, exact = q.dequantise(dtype), q.dequantise(torch.float64)
    if backward:
        torch_y, oracle = x @ w_hat, x.double() @ exact
    else:
        torch_y = linear(x, w_hat, bias)
        oracle = linear(x.double(), exact, bias.double())
    y = run(x.cuda(), _on_gpu(TritonLayout(q)), bias.cuda())
    if y is None:
        raise WrongAnswerError("Triton could not make the kernel")
    error, limit = nrmse(y.cpu(), oracle), 2 * nrmse(torch_y, oracle)
    if not error <= limit:
        raise WrongAnswerError(f"error {error:.2e}, more than {limit:.2e}")


def _run_small(format: str, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    def run(x: Tensor, w: PackedWeight, bias: Tensor) -> Tensor:
        affine = w.zero_point is not None
        config = gemv_config(w.layout, m, launch.gpu_at(0), affine=affine)
        return launch.gemv(x, w, bias, config)

    _check_product(run, format, dtype, (m, n, k))


def _run_gemm(format: str, dtype: torch.dtype, m: int, n: int, k: int, which: int) -> None:
    def run(x: Tensor, w: PackedWeight, bias: Tensor) -> Tensor:
        config = replace(GEMM_CONFIGS[which], split_k=1 + which)
        config = fit(config, w.layout.bits, launch.gpu_at(0).shared_bytes)
        return launch.gemm(x, w, bias, config)

    _check_product(run, format, dtype, (m, n, k))


def _run_many(
    format: str, dtype: torch.dtype, m: int, n: int, k: int, config: GemmWgmmaConfig
) -> None:
    def run(x: Tensor, w: PackedWeight, bias: Tensor) -> Tensor | None:
        return gemm_wgmma(x, w, bias, config)

    _check_product(run, format, dtype, (m, n, k))


def _run_transposed(
    format: str, dtype: torch.dtype, m: int, n: int, k: int, wide: bool = False
) -> None:
    def run(dy: Tensor, w: PackedWeight, _: Tensor) -> Tensor:
        layout = replace(w.layout, n=8192, k=8192) if wide else w.layout
        config = dgrad_config(layout, m, launch.gpu_at(0), affine=w.zero_point is not None)
        return launch.dgrad(dy, w, replace(config, split_n=2) if wide else config)

    _check_product(run, format, dtype, (m, n, k), backward=True)


def _run_many_transposed(
    format: str, dtype: torch.dtype, m: int, n: int, k: int, config: DgradWgmmaConfig
) -> None:
    def run(dy: Tensor, w: PackedWeight, _: Tensor) -> Tensor | None:
        return dgrad_wgmma(dy, w, config)

    _check_product(run, format, dtype, (m, n, k), backward=True)


def _run_dequantise(format: str, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    q = weight(format, n, k)
    check_same(launch.dequantise(_on_gpu(TritonLayout(q)), dtype), q.dequantise(dtype))


def _run_plain(m: int, n: int, k: int) -> None:
    shapes = (m, k), (n, k), (n,)
    x, w, bias = (normal(*shape, dtype=BF16, seed=seed) for seed, shape in enumerate(shapes))
    oracle = linear(x.double(), w.double(), bias.double())
    limit = 2 * nrmse(linear(x, w, bias), oracle)
    on_gpu = x.cuda(), w.cuda(), bias.cuda()
    ys = bf16_baseline.gemm(*on_gpu), bf16_baseline.gemv(on_gpu[0][0], *on_gpu[1:])
    for y, wanted in zip(ys, (oracle, oracle[0]), strict=True):
        if not (error := nrmse(y.cpu(), wanted)) <= limit:
            raise WrongAnswerError(f"error {error:.2e}, more than {limit:.2e}")
