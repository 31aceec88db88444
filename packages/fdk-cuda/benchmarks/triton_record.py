"""Times what the Triton backend chooses, every width and both directions, and writes rows.

    python packages/fdk-cuda/benchmarks/triton_record.py --out docs/results/h200/triton.jsonl

Each case is checked beside the dequantised weight, then captured in a CUDA graph over copies of
the weight that the L2 does not hold (but 12 of 4096 x 4096 at 1 bit, with 256 rows). Its replays
take turns with those of cuBLAS over a bf16 weight, and the median is quoted, in microseconds.
`floor` is that of _floor.py for an H200. Processes compile side by side first; then one times, and
nothing else runs on the GPU.
With --without, cases of which a file has rows are left out, so that a run that was cut off is gone
on with. triton_table.py makes a table of rows.
"""

import argparse
import multiprocessing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from _floor import product_floor
from _rows import write_rows
from _tables import read_rows
from marlin import COLD_BYTES, graph_times
from torch import Tensor
from triton_kernels import short

from fdk_cuda.triton import launch
from fdk_cuda.triton.autotune import random_weights
from fdk_cuda.triton.configs import forward_config, grad_config
from fdk_cuda.triton.configs.dgrad import dgrad_config, dgrad_wgmma_config
from fdk_cuda.triton.configs.gemm import fits_gemm_wgmma, gemm_config, gemm_wgmma_config
from fdk_cuda.triton.launch import PackedWeight
from fdk_cuda.triton.layout import PackedLayout

# By n and k, the widths that are timed.
SHAPES = {
    (8192, 8192): (1, 2, 3, 4, 5, 6, 7, 8),
    (28672, 8192): (1, 3, 4, 8),
    (4096, 4096): (1, 4),
    (4096, 14336): (4,),
    (14336, 4096): (4,),
}
# Rows of x for every width, for 8192 x 8192 and for 4 bits as well.
MS, LARGE_MS, MORE_MS = (1, 16, 64, 256), (512, 1024), (32, 128, 512, 1024)
MANY = 64
LARGEST_ERROR = 6e-3  # of bf16 rounding
GROUP_SIZE = 64
# n, k, bits, affine, and whether of dy @ W_hat.
Task = tuple[int, int, int, bool, bool]


def tasks() -> list[Task]:
    """Codebooks of all shapes, both directions where n is k; affine formats of 8192 x 8192."""
    return [
        (n, k, bits, affine, transposed)
        for (n, k), widths in SHAPES.items()
        for bits in widths
        for affine in (False, True)[: 1 + (n == k == 8192)]
        for transposed in (False, True)[: 1 + (n == k)]
    ]


def tasks_without(path: Path | None) -> list[Task]:
    """Those of which a file has no row; a task's rows are written together."""
    rows = [] if path is None else read_rows(path)
    done = {
        (r["n"], r["k"], r["bits"], r["kind"] == "affine", r["direction"] == "dy") for r in rows
    }
    return [task for task in tasks() if task not in done]


def ms_of(n: int, k: int, bits: int) -> tuple[int, ...]:
    """Rows of x that are timed."""
    more = MORE_MS if bits == 4 else LARGE_MS if n == k == 8192 else ()
    return tuple(sorted((*MS, *more)))


def weights_of(a: PackedLayout, affine: bool) -> list[PackedWeight]:
    """Random ones, in copies."""
    return random_weights(a, torch.bfloat16, torch.bfloat16 if affine else None, 0)


def random_x(m: int, width: int) -> Tensor:
    """Activations."""
    return torch.randn(m, width, device="cuda").bfloat16()


def call(x: Tensor, ws: list[PackedWeight], config: Any, transposed: bool, i: int) -> Tensor:
    """A product by a configuration."""
    w = ws[i % len(ws)]
    if transposed:
        return launch.linear_dgrad(x, w, config)
    return launch.linear(x, w, None, config)


def config_of(a: PackedLayout, m: int, affine: bool, transposed: bool) -> Any:
    """What the backend chooses."""
    return (grad_config if transposed else forward_config)(a, m, launch.gpu_at(0), affine=affine)


def others_of(a: PackedLayout, m: int, affine: bool, transposed: bool) -> list[Any]:
    """What else would take a product, by the backend's own configurations; None dequantises."""
    gpu = launch.gpu_at(0)
    ways: list[Any] = []
    if transposed:
        if m <= MANY:
            ways.append(dgrad_config(a, m, gpu, affine=affine))
        if MANY // 2 < m <= 8 * MANY and a.words == 1 and fits_gemm_wgmma(a):
            ways.append(dgrad_wgmma_config(a, m, gpu, affine=affine))
    else:
        if gpu.limits.gemv_m < m <= 2 * MANY:
            ways.append(gemm_config(a, m, gpu))
        if m > MANY // 2 and fits_gemm_wgmma(a):
            ways.append(gemm_wgmma_config(a, m, gpu, affine=affine))
    if m >= MANY:
        ways.append(None)
    return [way for way in ways if way != config_of(a, m, affine, transposed)]


def prepare(task: Task) -> None:
    """Compiles and loads the kernels of a task, with a weight of few outputs.

    What another process compiled comes from Triton's cache.
    """
    n, k, bits, affine, transposed = task
    few = weights_of(PackedLayout(512, k, bits, GROUP_SIZE), affine)[:1]
    for m in ms_of(n, k, bits):
        of = PackedLayout(n, k, bits, GROUP_SIZE), m, affine, transposed
        for config in (config_of(*of), *others_of(*of)):
            call(random_x(m, 512 if transposed else k), few, config, transposed, 0)
    torch.cuda.synchronize()


def rows_of(task: Task) -> list[dict[str, Any]]:
    """A row for each number of rows of x."""
    prepare(task)
    n, k, bits, affine, transposed = task
    a = PackedLayout(n, k, bits, GROUP_SIZE)
    rows = []
    ws = weights_of(a, affine)
    hat = launch.dequantise(ws[0], torch.bfloat16)
    dense = [hat.clone() for _ in range(COLD_BYTES // hat.nbytes + 2)]
    W = hat.float()
    for m in ms_of(n, k, bits):
        x = random_x(m, n if transposed else k)
        configs = [config_of(a, m, affine, transposed), *others_of(a, m, affine, transposed)]
        ways = [partial(call, x, ws, config, transposed) for config in configs]
        reference = x.float() @ (W if transposed else W.T)
        for config, way in zip(configs, ways, strict=True):
            error = float((way(0).float() - reference).norm() / reference.norm())
            if not error < LARGEST_ERROR:
                raise ValueError(f"wrong, not timed: {task} m{m} {config}: {error:.1e}")
        runs: list[Callable[[int], Tensor]] = [*ways, partial(cublas, x, dense, transposed)]
        count = max(len(dense), len(ws)) if m <= MANY else 12
        us, *others, peer = graph_times(runs, min(count, 40), replays=11)
        read = [t for t in (ws[0].words, ws[0].scale, ws[0].zero_point, x) if t is not None]
        floor = product_floor(m, n, k, sum(t.nbytes for t in read))
        row: dict[str, Any] = {
            "n": n,
            "k": k,
            "bits": bits,
            "m": m,
            "kind": "affine" if affine else "codebook",
        }
        row |= {"direction": "dy" if transposed else "y", "us": us, "cublas": peer}
        names = [short(config) for config in configs]
        row |= {"floor": floor, "by": names[0]}
        rows.append(row | {"others": dict(zip(names[1:], others, strict=True))})
    del ws, hat, dense, W, x, ways, runs, reference
    torch.cuda.empty_cache()
    return rows


def cublas(x: Tensor, dense: list[Tensor], transposed: bool, i: int) -> Tensor:
    """The same by cuBLAS."""
    W = dense[i % len(dense)]
    return torch.mm(x, W if transposed else W.T)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a file that rows are written to as JSONL")
    parser.add_argument("--without", type=Path, help="rows of a run that this one goes on with")
    parser.add_argument("--processes", type=int, default=14)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: needs an NVIDIA GPU, torch finds none on this machine")
        return
    left = tasks_without(args.without)
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for _ in pool.imap_unordered(prepare, left, chunksize=1):
            pass
    rows = (row | {"triton": triton.__version__} for task in left for row in rows_of(task))
    write_rows(args.out, rows, line_of)


def line_of(row: dict[str, Any]) -> str:
    """A row as text."""
    case = f"{row['n']:6}x{row['k']:<6} {row['kind']:8} b{row['bits']} m{row['m']:<4}"
    return (
        f"{case} {row['direction']:2} "
        f"{row['us']:7.2f} cublas {row['cublas']:7.2f} floor {row['floor']:7.2f} {row['by']}"
        + "".join(f", {other} {us:.2f}" for other, us in row["others"].items())
    )


if __name__ == "__main__":
    main()
