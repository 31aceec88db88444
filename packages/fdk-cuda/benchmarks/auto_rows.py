"""Times layers of Marlin and of ``triton`` in turns, for the table of ``auto``.

    python packages/fdk-cuda/benchmarks/auto_rows.py --out docs/results/h100/auto.jsonl

Whole layers in CUDA graphs over copies of the weight that the L2 does not hold, each checked beside
the dequantised weight first. Rows are as those of ``fdk-bench compare``, and auto_table.py reads
both. Processes compile side by side, and then one times what they left in the caches.
"""

import argparse
import multiprocessing
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from _rows import write_rows
from auto_table import MS
from marlin import COLD_BYTES, SHAPES, Run, graph_times, random_weight
from torch import Tensor

from fdk_formats.backends import Layout, all_backends
from fdk_formats.tensor import QuantisedTensor

# Of each kind of format.
BACKENDS = {"codebook": ("marlin-lut", "triton"), "affine": ("marlin", "triton")}
BITS = range(1, 9)
LARGEST_ERROR = 6e-3  # of bf16 rounding
Task = tuple[str, int, int, int]  # kind, bits, n, k


def checked_layouts(task: Task) -> tuple[QuantisedTensor, list[Layout]]:
    """A weight, and its layout for each backend, called once for each of ``MS``.

    Raises:
        ValueError: an answer is wrong.
    """
    kind, bits, n, k = task
    q = random_weight(bits, n, k, affine=kind == "affine")
    backends = [all_backends()[name] for name in BACKENDS[kind]]
    layouts = [backend.pack(q, dtype=torch.bfloat16) for backend in backends]
    W = q.dequantise(torch.bfloat16).float()
    for m in MS:
        x = x_of(m, k)
        wanted = x.float() @ W.T
        for backend, layout in zip(backends, layouts, strict=True):
            error = float((layout(x).float() - wanted).norm() / wanted.norm())
            if not error < LARGEST_ERROR:
                raise ValueError(f"wrong answer: {backend.name} {task} m{m}: {error:.1e}")
    return q, layouts


def compile_for(task: Task) -> None:
    """In a process of its own: leaves in the caches what a task takes."""
    checked_layouts(task)
    torch.cuda.empty_cache()


def rows_of(task: Task) -> list[dict[str, Any]]:
    """A row for each backend and number of rows."""
    kind, _, n, k = task
    q, layouts = checked_layouts(task)
    count = COLD_BYTES // q.packed.nbytes + 2
    copies = [[layout, *(deepcopy(layout) for _ in range(count - 1))] for layout in layouts]
    rows = []
    for m in MS:
        x = x_of(m, k)
        times = graph_times([run_of(of, x) for of in copies], max(40, count))
        for name, us in zip(BACKENDS[kind], times, strict=True):
            case = {"m": m, "n": n, "k": k, "format": str(q.format), "backend": name}
            rows.append({"case": case, "values": {"time": us / 1e6}, "error": None})
    return rows


def x_of(m: int, k: int) -> Tensor:
    """Random activations."""
    return torch.randn(m, k, device="cuda").bfloat16()


def run_of(layouts: list[Layout], x: Tensor) -> Run:
    """The product of one layer after another; each has had x once."""
    for layout in layouts:
        layout(x)
    return lambda i: layouts[i % len(layouts)](x)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="0,1,2,3,4", help="indices of marlin.py's SHAPES")
    parser.add_argument("--bits", default=",".join(map(str, BITS)))
    parser.add_argument("--kinds", default=",".join(BACKENDS), help="of formats")
    parser.add_argument("--processes", type=int, default=8, help="of up to 7 GiB each on the GPU")
    parser.add_argument("--out", type=Path, help="a file that rows are written to as JSONL")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: needs an NVIDIA GPU, torch finds none on this machine")
        return
    shapes = [SHAPES[index] for index in map(int, args.shapes.split(","))]
    tasks = [
        (kind, bits, *shape)
        for shape in shapes
        for bits in map(int, args.bits.split(","))
        for kind in args.kinds.split(",")
    ]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(compile_for, tasks, chunksize=1)
    with torch.no_grad():
        write_rows(args.out, (row for task in tasks for row in rows_of(task)), line_of)


def line_of(row: dict[str, Any]) -> str:
    """A row as text."""
    case = row["case"]
    return " ".join(map(str, case.values())) + f" {1e6 * row['values']['time']:.2f}"


if __name__ == "__main__":
    main()
