"""Times the small-m Marlin kernels in CUDA graphs over rotating weights: cold L2, median replay.

    python packages/fdk-cuda/benchmarks/marlin.py --ms 1,16 --bits 1,2,3,4,8 [--goals goals.jsonl]

Each case is checked against the dequantised weight before it is timed. `pdl` is with programmatic
dependent launch, `plain` without; `floor` is the time of reading weights, scales and x once at the
rates that docs/kernels/marlin.md gives for an H200; `goal` comes from a file of rows
{n, k, bits, m, goal}.
"""

import argparse
import bisect
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from fdk_cuda.marlin import MARLIN_LUT
from fdk_cuda.marlin.layout import Geometry
from fdk_cuda.marlin.ops import device_limits, small_fields, small_launch
from fdk_cuda.marlin.plan import plan_small
from fdk_cuda.marlin.programs import Variant
from fdk_formats.format import Format
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.testing import nrmse

SHAPES = ((4096, 4096), (8192, 8192), (28672, 8192), (4096, 14336), (14336, 4096))
COLD_BYTES = 256 << 20
REPLAYS = 15
# Reading so many MiB once takes so many microseconds (H200).
READ_MIB = (0, 1, 2, 4, 8, 16, 32, 64, 128)
READ_TIME = (2.06, 2.36, 2.66, 3.03, 3.91, 5.67, 9.23, 16.6, 31.2)


def read_floor(size: float) -> float:
    """Microseconds to read ``size`` bytes once, between the points of the table."""
    mib = size / (1 << 20)
    i = min(max(1, bisect.bisect_left(READ_MIB, mib)), len(READ_MIB) - 1)
    share = (mib - READ_MIB[i - 1]) / (READ_MIB[i] - READ_MIB[i - 1])
    return READ_TIME[i - 1] + share * (READ_TIME[i] - READ_TIME[i - 1])


def random_weight(bits: int, n: int, k: int) -> QuantisedTensor:
    """A weight of random codes, scales and codebook, made on the GPU."""
    generator = torch.Generator("cuda").manual_seed(bits)
    return QuantisedTensor(
        Format("custom", bits, 64),
        (n, k),
        torch.randint(
            256, (n, k * bits // 8), dtype=torch.uint8, device="cuda", generator=generator
        ),
        (0.5 + torch.rand(n, k // 64, device="cuda", generator=generator)).to(torch.bfloat16),
        torch.randn(1 << bits, device="cuda", generator=generator).sort().values,
    )


def exact_weight(q: QuantisedTensor) -> torch.Tensor:
    """The weight before its products with scales are rounded, float64."""
    assert q.codebook is not None
    values = q.codebook.to(torch.bfloat16).double()[q.codes().int()]
    return (values.view(*q.scale.shape, -1) * q.scale.double()[..., None]).view(q.shape)


def graph_time(run: Callable[[int], object], count: int) -> float:
    """Median microseconds of ``run(i)``, captured ``count`` times in one graph."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            run(i)
    times = []
    for _ in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / count)
    return statistics.median(times[2:])


def time_case(
    n: int, k: int, bits: int, ms: list[int], goals: dict[tuple[int, ...], float]
) -> None:
    """Prints a line for each m."""
    q = random_weight(bits, n, k)
    layout = MARLIN_LUT.pack(q, dtype=torch.bfloat16)
    copies = min(400, COLD_BYTES // layout.packed.nbytes + 2)
    packed = [layout.packed.clone() for _ in range(copies)]
    oracle_W = exact_weight(q)
    geometry = Geometry.of(q.format, n, k)
    variant, limits = Variant.of(geometry, torch.bfloat16), device_limits(0)
    for m in ms:
        x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
        plan = plan_small(geometry, torch.bfloat16, m, limits)
        y = torch.full((m, n), torch.nan, device="cuda", dtype=torch.bfloat16)
        fields = small_fields(variant, plan, geometry, m)
        times = []
        for overlap in (True, False):
            launch = small_launch(variant, plan, 0, overlap=overlap)
            pointers = layout.codebook.data_ptr(), x.data_ptr(), 0, y.data_ptr()

            def run(i: int, launch=launch, pointers=pointers, fields=fields) -> None:
                launch(packed[i % copies].data_ptr(), *pointers, *fields)

            run(0)
            error = nrmse(y, x.double() @ oracle_W.T)
            if not error < 2e-3:
                raise SystemExit(f"wrong answer, not timed: n{n} k{k} b{bits} m{m}: {error:.2e}")
            times.append(graph_time(run, max(copies, 40)))
        floor = read_floor(q.packed.nbytes + q.scale.nbytes + x.nbytes)
        goal = goals.get((n, k, bits, m))
        verdict = "" if goal is None else f"{goal:6.1f} {'ok' if times[0] <= goal else 'OVER'}"
        print(
            f"{n:6}x{k:<6} b{bits} m{m:<3} pdl {times[0]:6.2f} plain {times[1]:6.2f} "
            f"floor {floor:6.2f} {100 * floor / times[0]:3.0f}% split {plan.split} "
            f"warps {plan.shape.warps} groups {plan.shape.row_groups} passes {plan.passes} "
            f"goal {verdict}",
            flush=True,
        )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ms", default="1,4,8,16")
    parser.add_argument("--bits", default="1,2,3,4,8")
    parser.add_argument("--shapes", default="0,1,2,3,4", help="indices of SHAPES")
    parser.add_argument("--goals", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: needs an NVIDIA GPU, torch finds none on this machine")
        return
    goals = {}
    if args.goals:
        for line in args.goals.read_text().splitlines():
            row = json.loads(line)
            goals[row["n"], row["k"], row["bits"], row["m"]] = row["goal"]
    for index in args.shapes.split(","):
        for bits in args.bits.split(","):
            ms = [int(m) for m in args.ms.split(",")]
            time_case(*SHAPES[int(index)], int(bits), ms, goals)


if __name__ == "__main__":
    main()
