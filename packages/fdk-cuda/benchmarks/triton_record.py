"""Times what the Triton backend chooses, every width and both directions, and writes rows.

    python packages/fdk-cuda/benchmarks/triton_record.py --out docs/results/h200/triton.jsonl

Each case is checked beside the dequantised weight, then captured in a CUDA graph over copies of
the weight that the L2 does not hold (but 12 of 4096 x 4096 at 1 bit, with 256 rows). Its replays
take turns with those of cuBLAS over a bf16 weight, and the median is quoted, in microseconds.
`floor` is that of _floor.py for an H200. Processes compile side by side and time one after the
other; who has compiled a kernel launches it once, on the same GPU, whoever is timing meanwhile.
triton_table.py makes a table of rows.
"""

import argparse
import multiprocessing
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from _floor import product_floor
from _rows import write_rows
from marlin import COLD_BYTES, graph_times
from torch import Tensor
from triton_kernels import short

from fdk_cuda.triton import launch
from fdk_cuda.triton.arrangement import Arrangement
from fdk_cuda.triton.launch import Weight
from fdk_cuda.triton.linear import gradient_config
from fdk_cuda.triton.tune import default, random_weights

# By n and k, the widths that are timed.
SHAPES = {
    (8192, 8192): (1, 2, 3, 4, 5, 6, 7, 8),
    (28672, 8192): (1, 3, 4, 8),
    (4096, 4096): (1, 4),
    (4096, 14336): (4,),
    (14336, 4096): (4,),
}
# Rows of x for every width, and for 4 bits as well.
MS, MORE_MS = (1, 16, 64, 256), (32, 128, 512, 1024)
MANY = 64
LARGEST_ERROR = 6e-3  # of bf16 rounding
GROUP_SIZE = 64
_gpu: Any = nullcontext()
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


def ms_of(bits: int) -> tuple[int, ...]:
    """Rows of x that are timed."""
    return tuple(sorted((*MS, *MORE_MS))) if bits == 4 else MS


def weights_of(a: Arrangement, affine: bool) -> list[Weight]:
    """Random ones, in copies."""
    return random_weights(a, torch.bfloat16, torch.bfloat16 if affine else None, 0)


def random_x(m: int, width: int) -> Tensor:
    """Activations."""
    return torch.randn(m, width, device="cuda").bfloat16()


def call(x: Tensor, ws: list[Weight], config: Any, transposed: bool, i: int) -> Tensor:
    """A product by a configuration."""
    w = ws[i % len(ws)]
    if transposed:
        return launch.linear_transposed(x, w, config)
    return launch.linear(x, w, None, config)


def config_of(a: Arrangement, m: int, affine: bool, transposed: bool) -> Any:
    """What the backend chooses."""
    return (gradient_config if transposed else default)(a, m, launch.gpu_at(0), affine=affine)


def prepare(task: Task) -> None:
    """Compiles and loads the kernels of a task, with a weight of few outputs."""
    n, k, bits, affine, transposed = task
    few = weights_of(Arrangement(512, k, bits, GROUP_SIZE), affine)[:1]
    for m in ms_of(bits):
        config = config_of(Arrangement(n, k, bits, GROUP_SIZE), m, affine, transposed)
        call(random_x(m, 512 if transposed else k), few, config, transposed, 0)
    torch.cuda.synchronize()


def rows_of(task: Task) -> list[dict[str, Any]]:
    """A row for each number of rows of x. One process at a time has the GPU."""
    prepare(task)
    n, k, bits, affine, transposed = task
    a = Arrangement(n, k, bits, GROUP_SIZE)
    rows = []
    with _gpu:
        ws = weights_of(a, affine)
        hat = launch.dequantise(ws[0], torch.bfloat16)
        dense = [hat.clone() for _ in range(COLD_BYTES // hat.nbytes + 2)]
        W = hat.float()
        for m in ms_of(bits):
            x, config = random_x(m, n if transposed else k), config_of(a, m, affine, transposed)
            run = partial(call, x, ws, config, transposed)
            reference = x.float() @ (W if transposed else W.T)
            error = float((run(0).float() - reference).norm() / reference.norm())
            if not error < LARGEST_ERROR:
                raise ValueError(f"wrong answer, not timed: {task} m{m}: {error:.1e}")
            runs: list[Callable[[int], Tensor]] = [run, partial(cublas, x, dense, transposed)]
            count = max(len(dense), len(ws)) if m <= MANY else 12
            us, peer = graph_times(runs, min(count, 40), replays=11)
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
            rows.append(row | {"floor": floor, "by": short(config)})
        del ws, hat, dense, W, x, run, runs, reference
        torch.cuda.empty_cache()
    return rows


def cublas(x: Tensor, dense: list[Tensor], transposed: bool, i: int) -> Tensor:
    """The same by cuBLAS."""
    W = dense[i % len(dense)]
    return torch.mm(x, W if transposed else W.T)


def take_turns(lock: Any) -> None:
    """In a new process: who holds the lock has the GPU."""
    global _gpu
    _gpu = lock


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a file that rows are written to as JSONL")
    parser.add_argument("--processes", type=int, default=14)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: needs an NVIDIA GPU, torch finds none on this machine")
        return
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(args.processes, take_turns, (spawn.Lock(),)) as pool:
        rows = (
            row | {"triton": triton.__version__}
            for found in pool.imap_unordered(rows_of, tasks(), chunksize=1)
            for row in found
        )
        write_rows(args.out, rows, line_of)


def line_of(row: dict[str, Any]) -> str:
    """A row as text."""
    case = f"{row['n']:6}x{row['k']:<6} {row['kind']:8} b{row['bits']} m{row['m']:<4}"
    return (
        f"{case} {row['direction']:2} "
        f"{row['us']:7.2f} cublas {row['cublas']:7.2f} floor {row['floor']:7.2f} {row['by']}"
    )


if __name__ == "__main__":
    main()
