"""Times the Marlin kernels in CUDA graphs over rotating weights: cold L2, median replay.

    python packages/fdk-cuda/benchmarks/marlin.py --ms 1,16,64 --bits 1,4 \\
        [--goals goals.jsonl] [--out rows.jsonl]

Each case is checked against the weight in float64 before it is timed, with a codebook and with
integer zero points. `pdl` is with programmatic dependent launch, `plain` without, `cublas` the
product with a bf16 weight; their replays take turns. `floor` is the larger of reading weights,
scales, zero points and x once, at the rates that _floor.py gives for an H200, and the arithmetic at
the rate of cuBLAS. `goal` comes from a file of rows {n, k, bits, m, goal}. marlin_table.py makes a
table of what --out writes.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _floor import product_floor
from _rows import write_rows
from _tables import read_goals

from fdk_cuda.marlin import MARLIN, MARLIN_LUT, MarlinLayout
from fdk_cuda.marlin.heuristics_hopper import plan_hopper
from fdk_cuda.marlin.heuristics_small_m import plan_small
from fdk_cuda.marlin.instantiations import TileShape, Variant
from fdk_cuda.marlin.ops import dequantise, small_m_limit
from fdk_cuda.marlin.runtime import (
    device_limits,
    hopper_runner,
    run_hopper,
    small_fields,
    small_launch,
)
from fdk_cuda.marlin.testing import multiplied_weight
from fdk_formats.format import Format
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.testing import nrmse

# The first five are run where --shapes names no others, which are fused q, k, v of two models, a
# vocabulary, and the layers of a model of 31b.
SHAPES = (
    *((4096, 4096), (8192, 8192), (28672, 8192), (4096, 14336), (14336, 4096)),
    *((6144, 4096), (21504, 6144), (128256, 4096)),
    *((6144, 6144), (8192, 6144), (6144, 21504), (43008, 6144)),
)
COLD_BYTES = 256 << 20
REPLAYS = 15
# From here on, dequantising first and cuBLAS is timed too.
MANY_ROWS = 128
Run = Callable[[int], torch.Tensor]


def random_weight(bits: int, n: int, k: int, *, affine: bool = False) -> QuantisedTensor:
    """A weight of random codes and scales, with a codebook or zero points, made on the GPU."""
    generator = torch.Generator("cuda").manual_seed(bits)
    groups = n, k // 64
    codebook = zero_point = None
    if affine:
        levels = 1 << bits
        zero_point = torch.randint(levels, groups, device="cuda", generator=generator)
        zero_point = zero_point.to(torch.uint8)
    else:
        codebook = torch.randn(1 << bits, device="cuda", generator=generator).sort().values
    return QuantisedTensor(
        Format("affine", bits, 64, zero_point="int") if affine else Format("custom", bits, 64),
        (n, k),
        torch.randint(
            256, (n, k * bits // 8), dtype=torch.uint8, device="cuda", generator=generator
        ),
        (0.5 + torch.rand(groups, device="cuda", generator=generator)).to(torch.bfloat16),
        codebook,
        zero_point,
    )


def small_run(
    layout: MarlinLayout, packed: list[torch.Tensor], x: torch.Tensor, *, overlap: bool
) -> Run:
    """Launches small_m.cu; no work on the host but the launch."""
    geometry, m = layout.geometry, len(x)
    variant = Variant.of(geometry, x.dtype)
    plan = plan_small(geometry, x.dtype, m, device_limits(0))
    launch = small_launch(variant, plan, 0, overlap=overlap)
    fields = small_fields(variant, plan, geometry, m)
    y = x.new_full((m, geometry.n), torch.nan)
    pointers = layout.codebook.data_ptr(), x.data_ptr(), 0, y.data_ptr()

    def run(i: int) -> torch.Tensor:
        launch(packed[i % len(packed)].data_ptr(), *pointers, *fields)
        return y

    return run


def hopper_run(
    layout: MarlinLayout, packed: list[torch.Tensor], x: torch.Tensor, *, overlap: bool
) -> Run:
    """Launches hopper_gemm.cu, and split_k_reduce.cu where the plan has parts."""
    geometry = layout.geometry
    plan = plan_hopper(geometry, len(x), device_limits(0))
    runner = hopper_runner(geometry, x.dtype, len(x), plan, 0, overlap=overlap)
    codebook = layout.codebook
    return lambda i: run_hopper(runner, x, packed[i % len(packed)], codebook, None, geometry.n)


def dense_runs(
    layout: MarlinLayout, packed: list[torch.Tensor], dense: list[torch.Tensor], x: torch.Tensor
) -> list[Run]:
    """cuBLAS over a bf16 weight; with many rows also over one that is dequantised each time."""
    weight = layout.codebook, str(layout.format), *layout.shape

    def cublas(i: int) -> torch.Tensor:
        return torch.mm(x, dense[i % len(dense)].T)

    def unfused(i: int) -> torch.Tensor:
        return torch.mm(x, dequantise(packed[i % len(packed)], *weight).T)

    return [cublas, unfused] if len(x) >= MANY_ROWS else [cublas]


def graph_times(
    runs: list[Run], count: int, *, replays: int = REPLAYS, chance: random.Random | None = None
) -> list[float]:
    """Median microseconds of each ``run(i)``, captured ``count`` times in a graph; in turns.

    ``chance`` puts each round of turns in an order of its own.
    """
    graphs = []
    for run in runs:
        run(0)
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for i in range(count):
                run(i)
    times: list[list[float]] = [[] for _ in graphs]
    turns = list(zip(graphs, times, strict=True))
    for _ in range(replays + 2):
        if chance is not None:
            chance.shuffle(turns)
        for graph, own in turns:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            own.append(start.elapsed_time(end) * 1000 / count)
    return [statistics.median(own[2:]) for own in times]


@dataclass(frozen=True)
class Weights:
    """A weight of one kind, and copies of it that the L2 does not hold.

    Attributes:
        kind: ``codebook``, ``signs`` (a codebook of 1 bit, -c and c) or ``affine``.
        layout: of the weight.
        packed: copies of the layout's.
        bytes: of codes, scales and zero points, as stored in a file.
        q: the weight as it was quantised.
        rounded: the dequantised weight, bf16.
    """

    kind: str
    layout: MarlinLayout
    packed: list[torch.Tensor]
    bytes: int
    q: QuantisedTensor
    rounded: torch.Tensor

    @classmethod
    def of(cls, kind: str, bits: int, n: int, k: int) -> "Weights":
        """Random ones."""
        is_affine = kind == "affine"
        q = random_weight(bits, n, k, affine=is_affine)
        if kind == "signs":
            c = q.codebook[1:]
            q = replace(q, codebook=torch.cat([-c, c]))
        layout = (MARLIN if is_affine else MARLIN_LUT).pack(q, dtype=torch.bfloat16)
        assert isinstance(layout, MarlinLayout)
        copies = min(400, COLD_BYTES // layout.packed.nbytes + 2)
        packed = [layout.packed.clone() for _ in range(copies)]
        stored = [t for t in (q.packed, q.scale, q.zero_point) if t is not None]
        size = sum(t.nbytes for t in stored)
        return cls(kind, layout, packed, size, q, q.dequantise(torch.bfloat16))

    def multiplied(self, shape: TileShape | None) -> torch.Tensor:
        """The weight that a shape of small_m.cu multiplies, or hopper_gemm.cu for None."""
        return multiplied_weight(self.q, torch.bfloat16, shape)

    def runs(self, x: torch.Tensor) -> list[Run]:
        """The product with and without programmatic dependent launch, checked.

        Raises:
            SystemExit: an answer is wrong.
        """
        few = len(x) <= small_m_limit(str(self.layout.format), *self.layout.shape, 0)
        plan = plan_small(self.layout.geometry, x.dtype, len(x), device_limits(0)) if few else None
        make = small_run if few else hopper_run
        runs = [make(self.layout, self.packed, x, overlap=overlap) for overlap in (True, False)]
        oracle = x.double() @ self.multiplied(plan and plan.shape).T
        for run in runs:
            error = nrmse(run(0), oracle)
            if not error < 2e-3:
                case = f"{self.layout.format} {list(self.q.shape)} m{len(x)}"
                raise SystemExit(f"wrong answer, not timed: {case}: {error:.2e}")
        return runs


def time_case(
    n: int, k: int, bits: int, ms: list[int], kinds: list[str], goals: dict[tuple[int, ...], float]
) -> Iterator[dict[str, object]]:
    """A row for each m and kind of weight, in microseconds; the kinds' replays take turns."""
    weights = [Weights.of(kind, bits, n, k) for kind in kinds]
    rounded = weights[0].rounded
    dense = [rounded.clone() for _ in range(COLD_BYTES // rounded.nbytes + 2)]
    for m in ms:
        x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
        runs = [run for weight in weights for run in weight.runs(x)]
        runs += dense_runs(weights[0].layout, weights[0].packed, dense, x)
        count = 8 if m * n * k > 1e11 else max(40, *(len(weight.packed) for weight in weights))
        times = graph_times(runs, count)
        cublas, *unfused = times[2 * len(weights) :]
        for weight, pdl, plain in zip(weights, times[::2], times[1::2], strict=False):
            floor = product_floor(m, n, k, weight.bytes + x.nbytes)
            row = {"n": n, "k": k, "bits": bits, "m": m, "kind": weight.kind}
            row |= {"pdl": pdl, "plain": plain, "floor": floor, "cublas": cublas}
            if unfused:
                row["unfused"] = unfused[0]
            yield row | {"goal": goals.get((n, k, bits, m))}


def line_of(row: dict[str, Any]) -> str:
    """A row as text."""
    pdl, goal = row["pdl"], row["goal"]
    unfused = f"dequantise + cublas {row['unfused']:7.1f} " if "unfused" in row else ""
    verdict = "" if goal is None else f"goal {goal:6.2f} {pdl / goal:4.2f}"
    return (
        f"{row['n']:6}x{row['k']:<6} {row['kind']:8} b{row['bits']} m{row['m']:<4} pdl {pdl:7.2f} "
        f"plain {row['plain']:7.2f} cublas {row['cublas']:7.2f} floor {row['floor']:7.2f} "
        f"{100 * row['floor'] / pdl:3.0f}% {unfused}{verdict}"
    )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ms", default="1,4,8,16")
    parser.add_argument("--bits", default="1,2,3,4,8")
    parser.add_argument("--shapes", default="0,1,2,3,4", help="indices of SHAPES")
    parser.add_argument("--kinds", default="codebook,affine", help="of weights")
    parser.add_argument("--goals", type=Path)
    parser.add_argument("--out", type=Path, help="a file that rows are written to as JSONL")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: needs an NVIDIA GPU, torch finds none on this machine")
        return
    ms, kinds = [int(m) for m in args.ms.split(",")], args.kinds.split(",")
    goals = read_goals(args.goals)
    rows = (
        row
        for index in map(int, args.shapes.split(","))
        for bits in map(int, args.bits.split(","))
        for row in time_case(*SHAPES[index], bits, ms, kinds, goals)
    )
    write_rows(args.out, rows, line_of)


if __name__ == "__main__":
    main()
