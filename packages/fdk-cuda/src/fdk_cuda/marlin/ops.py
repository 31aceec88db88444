"""The torch op over the Marlin layout: which kernel runs for which m, and the gradient."""

from functools import cache

import torch
from torch import Tensor
from torch.library import Library

from fdk_cuda.marlin.layout import Geometry
from fdk_cuda.marlin.plan import MAX_ROWS, Device, SmallPlan, plan_small
from fdk_cuda.marlin.programs import (
    DEQUANTISE_WARPS,
    TABLE_BYTES,
    Variant,
    dequantise_kernel,
    small_m_kernel,
)
from fdk_cuda.nvrtc import Launch
from fdk_formats.format import Format
from fdk_formats.ops import define_linear_op

DTYPES = (torch.bfloat16, torch.float16)
# Above this many rows, dequantise and cuBLAS; up to it, the small-m kernel for 16 rows at a time.
# H200, 4 bits, 28672 x 8192: 289 us against 298 with 96 rows, 388 against 303 with 128.
MAX_FUSED_ROWS = 96
ALIGNMENT = 16
SMALL_FIELDS, DEQUANTISE_FIELDS = "5P9i5I", "3P4i5I"


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
    if m > MAX_FUSED_ROWS:
        return torch.nn.functional.linear(x, dequantise(packed, codebook, format, n, k), bias)
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
