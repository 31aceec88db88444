"""Configurations of ``gemv_kernel``: a table by architecture, width, outputs and rows of x.

``gemv.json`` has the fastest of those timed on an H200 (2026-11-23 and 24: one and two tiles of
outputs, four to sixteen warps, with and without words ahead, prefetch, ``minus`` and a limit of
registers). Elsewhere nothing was timed: rows for ``ampere`` and ``blackwell`` are configurations
that do not spill there (Triton 3.7.1). ``outputs`` is relative to ``Gpu.few_outputs``.
"""

from dataclasses import dataclass, replace

from fdk_cuda.triton.configs.gpus import Gpu
from fdk_cuda.triton.configs.table import Table
from fdk_cuda.triton.layout import PackedLayout


@dataclass(frozen=True)
class GemvConfig:
    """Configuration of ``gemv_kernel``: 16 * n_tiles outputs per program, k split between warps.

    Attributes:
        n_tiles: tiles of 16 outputs of a program.
        warps: warps of a program.
        ahead: tiles of k that a warp loads words ahead.
        fetch: rounds of tiles that are prefetched to L2 ahead (compute capability 9.0).
        overlap: start before the previous kernel ends (compute capability 9.0).
        registers: largest number for a thread; 0 leaves it to ptxas.
        minus: subtract zero points by a tensor-core product instead of summing x, where the dtype
            of x holds them exactly.
    """

    n_tiles: int
    warps: int
    ahead: int = 1
    fetch: int = 0
    overlap: bool = False
    registers: int = 0
    minus: bool = False


MAX_OFFSET = (1 << 31) - 1  # within x and y of ``gemv_kernel``
GEMV_TABLE = Table("gemv", GemvConfig)


def gemv_config(layout: PackedLayout, m: int, gpu: Gpu, *, affine: bool = False) -> GemvConfig:
    """Returns the configuration for m rows of x, the same for every m of 9 or more."""
    if layout.n <= gpu.few_outputs:
        outputs = "few"
    else:
        outputs = "some" if layout.n <= 2 * gpu.few_outputs else "many"
    return GEMV_TABLE.find(
        architecture=gpu.architecture,
        bits=layout.bits,
        affine=affine,
        rows="1-8" if m <= 8 else "9-16",
        outputs=outputs,
    )


def as_run(config: GemvConfig, gpu: Gpu) -> GemvConfig:
    """Returns a configuration without the fields that a GPU ignores."""
    return config if gpu.can_overlap else replace(config, fetch=0, overlap=False)
