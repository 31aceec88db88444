"""The torch op over the Marlin layout: which kernel runs for which m, and the gradient."""

import sys
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.library import Library

from fdk_cuda.marlin.hopper import GROUP_TILES, HopperPlan, plan_hopper
from fdk_cuda.marlin.layout import BLOCK_COLUMNS, BLOCK_ROWS, Geometry
from fdk_cuda.marlin.plan import MAX_ROWS, Device, SmallPlan, plan_small
from fdk_cuda.marlin.programs import (
    DEQUANTISE_WARPS,
    TABLE_BYTES,
    Variant,
    dequantise_kernel,
    hopper_kernel,
    small_m_kernel,
    sum_splits_kernel,
)
from fdk_cuda.nvrtc import Launch, swizzled_map
from fdk_formats.format import Format
from fdk_formats.ops import define_linear_op

DTYPES = (torch.bfloat16, torch.float16)
# Above this many rows, dequantise and cuBLAS; up to it, the small-m kernel for 16 rows at a time.
# H200, 4 bits, 28672 x 8192: 289 us against 298 with 96 rows, 388 against 303 with 128.
MAX_FUSED_ROWS = 96
# The same on Hopper for codebooks of 256 values, whose lookups take longer than the tensor cores:
# 8192 x 8192: 208 us against 231 with 1024 rows, 449 against 438 with 2048. Smaller ones are faster
# fused up to 8192 rows at least.
MAX_HOPPER_ROWS, LARGE_CODEBOOK = 1536, 256
ALIGNMENT = 16
SMALL_FIELDS, DEQUANTISE_FIELDS = "5P9i5I", "3P4i5I"
HOPPER_FIELDS, SUM_FIELDS = "128s5P9i", "3P7i"
SUM_THREADS, SUM_VALUES = 256, 4


def marlin_linear(
    x: Tensor,  # [m, k, dtype]
    packed: Tensor,  # see layout.py
    codebook: Tensor,  # [2^bits, dtype]
    format: str,
    bias: Tensor | None,  # [n, dtype]
    n: int,
    k: int,
) -> Tensor:
    """``x @ W_hat.T + bias``, ``[m, n, dtype]``."""
    _check_dtype("x", x, codebook)
    m = x.shape[0]
    is_hopper = device_limits(x.device.index).is_hopper
    if m > _fused_rows(is_hopper, codebook):
        return torch.nn.functional.linear(x, dequantise(packed, codebook, format, n, k), bias)
    if m > MAX_ROWS and is_hopper:
        return hopper_linear(x, packed, codebook, format, bias, n, k)
    device = x.device.index
    y = x.new_empty((m, n))
    x = _padded(x, packed.shape[1] * 64)
    bias_pointer = 0 if bias is None else bias.data_ptr()
    weight = packed.data_ptr(), codebook.data_ptr()
    x_pointer, y_pointer = x.data_ptr(), y.data_ptr()
    x_step, y_step = MAX_ROWS * x.stride(0) * x.element_size(), MAX_ROWS * n * y.element_size()
    while m > 0:
        launch, fields = _small_launch(format, x.dtype, min(m, MAX_ROWS), n, k, device)
        launch(*weight, x_pointer, bias_pointer, y_pointer, *fields)
        x_pointer, y_pointer, m = x_pointer + x_step, y_pointer + y_step, m - MAX_ROWS
    return y


def hopper_linear(
    x: Tensor, packed: Tensor, codebook: Tensor, format: str, bias: Tensor | None, n: int, k: int
) -> Tensor:
    """``marlin_linear`` through hopper_gemm.cu."""
    # The copy engine wants rows of a multiple of 16 bytes.
    x = _padded(x, k if k % 8 == 0 else packed.shape[1] * BLOCK_COLUMNS)
    runner = _hopper_runner(format, x.dtype, x.shape[0], n, k, x.device.index)
    return run_hopper(runner, x, packed, codebook, bias, n)


def run_hopper(
    runner: "HopperRunner", x: Tensor, packed: Tensor, codebook: Tensor, bias: Tensor | None, n: int
) -> Tensor:
    """y by one plan, from x with rows of a multiple of 16 bytes."""
    plan, shape = runner.plan, runner.plan.shape
    m = x.shape[0]
    y = x.new_empty((m, n))
    bias_pointer = 0 if bias is None else bias.data_ptr()
    parts = y  # not used
    if plan.parts > 0:
        parts = x.new_empty(plan.parts * shape.columns * shape.rows, dtype=torch.float32)
    runner.product(
        swizzled_map(x.data_ptr(), m, x.shape[1], shape.columns, x.dtype),
        packed.data_ptr(),
        codebook.data_ptr(),
        bias_pointer,
        y.data_ptr(),
        parts.data_ptr(),
        *runner.fields,
    )
    if runner.sum is not None:
        runner.sum(parts.data_ptr(), bias_pointer, y.data_ptr(), *runner.sum_fields)
    return y


def marlin_grad_x(
    grad_y: Tensor,  # [m, n, dtype]
    packed: Tensor,
    codebook: Tensor,
    format: str,
    n: int,
    k: int,
) -> Tensor:
    """``dy @ W_hat``, ``[m, k, dtype]``."""
    _check_dtype("grad_y", grad_y, codebook)
    return grad_y @ dequantise(packed, codebook, format, n, k)


def dequantise(packed: Tensor, codebook: Tensor, format: str, n: int, k: int) -> Tensor:
    """``W_hat :: [n, k]`` in the codebook's dtype, from a weight in the Marlin layout."""
    out = codebook.new_empty((n, k))
    launch, fields = _dequantise_launch(format, codebook.dtype, n, k, packed.device.index)
    launch(packed.data_ptr(), codebook.data_ptr(), out.data_ptr(), *fields)
    return out


@cache
def device_limits(index: int) -> Device:
    """What plans need to know of a GPU."""
    properties = torch.cuda.get_device_properties(index)
    return Device(
        processors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        has_clusters=properties.major >= 9,
        is_hopper=properties.major == 9,
    )


def small_launch(variant: Variant, plan: SmallPlan, device: int, *, overlap: bool = True) -> Launch:
    """Loads small_m.cu for a plan, compiling it where it has not been."""
    kernel = small_m_kernel(variant, plan.shape)
    return Launch(
        kernel,
        device,
        fields=SMALL_FIELDS,
        grid=plan.grid,
        threads=32 * plan.shape.warps,
        shared_bytes=plan.shared_bytes,
        cluster=plan.split,
        overlap=overlap and device_limits(device).has_clusters,
    )


def small_fields(variant: Variant, plan: SmallPlan, geometry: Geometry, m: int) -> tuple[int, ...]:
    """The fields of small_m.cu's Params after the pointers."""
    sizes = (geometry.n, geometry.columns, m)
    cut = plan.stored_columns, plan.tiles, plan.passes, plan.rounds
    return *sizes, *cut, plan.log_share, plan.sum_buffers, *variant.constants


@dataclass(frozen=True)
class HopperRunner:
    """A plan, ready to run.

    Attributes:
        plan: how the product is cut.
        product: launches hopper_gemm.cu.
        fields: of its Params, after the pointers.
        sum: launches sum_splits.cu, where the plan has parts.
        sum_fields: likewise.
    """

    plan: HopperPlan
    product: Launch
    fields: tuple[int, ...]
    sum: Launch | None
    sum_fields: tuple[int, ...]


def hopper_runner(
    geometry: Geometry,
    dtype: torch.dtype,
    m: int,
    plan: HopperPlan,
    device: int,
    *,
    overlap: bool = True,
) -> HopperRunner:
    """Loads the kernels of a plan, compiling them where they have not been."""
    variant, shape = Variant.of(geometry, dtype), plan.shape
    product = Launch(
        hopper_kernel(variant, shape),
        device,
        fields=HOPPER_FIELDS,
        grid=plan.grid,
        threads=shape.threads,
        shared_bytes=plan.shared_bytes,
        cluster=shape.cluster,
        overlap=overlap,
    )
    stages = geometry.columns // (BLOCK_COLUMNS * shape.k_blocks)
    tiles = plan.row_tiles, plan.column_tiles, min(GROUP_TILES, plan.column_tiles)
    cut = *tiles, plan.splits, plan.whole_tiles
    fields = geometry.n, m, stages, geometry.rows // BLOCK_ROWS, *cut
    sum_fields = geometry.n, m, *cut
    total = None
    if plan.parts > 0:
        values = plan.parts // plan.splits * shape.columns * shape.rows
        total = Launch(
            sum_splits_kernel(dtype, shape),
            device,
            fields=SUM_FIELDS,
            grid=values // (SUM_THREADS * SUM_VALUES),
            threads=SUM_THREADS,
            shared_bytes=0,
            overlap=overlap,
        )
    return HopperRunner(plan, product, fields, total, sum_fields)


# m is any number of tokens here: the least used ones go.
@lru_cache(maxsize=4096)
def _hopper_runner(
    format: str, dtype: torch.dtype, m: int, n: int, k: int, device: int
) -> HopperRunner:
    geometry = Geometry.of(Format.parse(format), n, k)
    plan = plan_hopper(geometry, m, device_limits(device))
    return hopper_runner(geometry, dtype, m, plan, device)


@cache
def _small_launch(
    format: str, dtype: torch.dtype, m: int, n: int, k: int, device: int
) -> tuple[Launch, tuple[int, ...]]:
    geometry = Geometry.of(Format.parse(format), n, k)
    variant = Variant.of(geometry, dtype)
    plan = plan_small(geometry, dtype, m, device_limits(device))
    return small_launch(variant, plan, device), small_fields(variant, plan, geometry, m)


@cache
def _dequantise_launch(
    format: str, dtype: torch.dtype, n: int, k: int, device: int
) -> tuple[Launch, tuple[int, ...]]:
    geometry = Geometry.of(Format.parse(format), n, k)
    variant = Variant.of(geometry, dtype)
    limits = device_limits(device)
    blocks = geometry.shape[0] * geometry.shape[1]
    per_processor = max(1, min(8, limits.shared_bytes // (TABLE_BYTES + 1024)))
    launch = Launch(
        dequantise_kernel(variant),
        device,
        fields=DEQUANTISE_FIELDS,
        grid=min(-(-blocks // DEQUANTISE_WARPS), limits.processors * per_processor),
        threads=32 * DEQUANTISE_WARPS,
        shared_bytes=TABLE_BYTES,
    )
    return launch, (n, k, geometry.columns, blocks, *variant.constants)


def _fused_rows(is_hopper: bool, codebook: Tensor) -> int:
    if not is_hopper:
        return MAX_FUSED_ROWS
    return MAX_HOPPER_ROWS if len(codebook) == LARGE_CODEBOOK else sys.maxsize


def _check_dtype(name: str, tensor: Tensor, codebook: Tensor) -> None:
    if tensor.dtype != codebook.dtype:
        raise TypeError(f"marlin_linear: {name} must be {codebook.dtype}, got {tensor.dtype}")


def _padded(x: Tensor, columns: int) -> Tensor:
    """x with rows that the kernel's 16-byte loads can take."""
    if x.shape[1] != columns:
        return torch.nn.functional.pad(x, (0, columns - x.shape[1]))
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


_library = Library("fdk_cuda", "FRAGMENT")
linear_op = define_linear_op(
    _library,
    "marlin_linear",
    layout="Tensor packed, Tensor codebook, str format",
    forward=marlin_linear,
    grad_x=marlin_grad_x,
    dispatch_keys=("CUDA",),
)
