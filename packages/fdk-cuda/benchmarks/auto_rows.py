"""Times affine layers of ``marlin`` and of ``triton`` in turns, for the table of ``auto``.

    python packages/fdk-cuda/benchmarks/auto_rows.py --out docs/results/h200/auto-affine.jsonl

Whole layers in CUDA graphs over copies of the weight that the L2 does not hold, each checked beside
the dequantised weight first. Rows are as those of ``fdk-bench compare``, and auto_table.py reads
both. Processes compile side by side and time one after the other.
"""

import argparse
import multiprocessing
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from _rows import write_rows
from auto_table import BACKENDS, MS
from marlin import COLD_BYTES, SHAPES, Run, graph_times, random_weight
from torch import Tensor

from fdk_formats.backends import Layout, all_backends

BITS = (1, 2, 3, 4, 8)
LARGEST_ERROR = 6e-3  # of bf16 rounding
Task = tuple[int, int, int]  # n, k, bits
_gpu: Any = nullcontext()


def rows_of(task: Task) -> list[dict[str, Any]]:
    """A row for each backend and number of rows. One process at a time has the GPU.

    Raises:
        ValueError: an answer is wrong.
    """
    n, k, bits = task
    q = random_weight(bits, n, k, affine=True)
    backends = [all_backends()[name] for name in BACKENDS]
    xs = [torch.randn(m, k, device="cuda").bfloat16() for m in MS]
    W = q.dequantise(torch.bfloat16).float()
    layouts = [backend.pack(q, dtype=torch.bfloat16) for backend in backends]
    for backend, layout in zip(backends, layouts, strict=True):
        for x in xs:  # compiles, beside others that do
            wanted = x.float() @ W.T
            error = float((layout(x).float() - wanted).norm() / wanted.norm())
            if not error < LARGEST_ERROR:
                raise ValueError(f"wrong answer: {backend.name} {task} m{len(x)}: {error:.1e}")
    del W
    rows = []
    with _gpu, torch.no_grad():
        count = COLD_BYTES // q.packed.nbytes + 2
        copies = [[layout, *(deepcopy(layout) for _ in range(count - 1))] for layout in layouts]
        for x in xs:
            times = graph_times([run_of(of, x) for of in copies], max(40, count))
            for name, us in zip(BACKENDS, times, strict=True):
                case = {"m": len(x), "n": n, "k": k, "format": str(q.format), "backend": name}
                rows.append({"case": case, "values": {"time": us / 1e6}, "error": None})
    return rows


def run_of(layouts: list[Layout], x: Tensor) -> Run:
    """The product of one layer after another; each has had x once."""
    for layout in layouts:
        layout(x)
    return lambda i: layouts[i % len(layouts)](x)


def take_turns(lock: Any) -> None:
    """In a new process: who holds the lock has the GPU."""
    global _gpu
    _gpu = lock


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="0,1,2,3,4", help="indices of marlin.py's SHAPES")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--out", type=Path, help="a file that rows are written to as JSONL")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: needs an NVIDIA GPU, torch finds none on this machine")
        return
    shapes = [SHAPES[index] for index in map(int, args.shapes.split(","))]
    tasks = [(*shape, bits) for shape in shapes for bits in BITS]
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(args.processes, take_turns, (spawn.Lock(),)) as pool:
        found = pool.imap_unordered(rows_of, tasks, chunksize=1)
        write_rows(args.out, (row for rows in found for row in rows), line_of)


def line_of(row: dict[str, Any]) -> str:
    """A row as text."""
    case = row["case"]
    return " ".join(map(str, case.values())) + f" {1e6 * row['values']['time']:.2f}"


if __name__ == "__main__":
    main()
