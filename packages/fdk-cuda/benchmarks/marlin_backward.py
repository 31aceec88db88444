"""Times dy @ W_hat from packed bytes on Hopper: cold L2, in graphs, against cuBLAS in turns.

    python packages/fdk-cuda/benchmarks/marlin_backward.py --ms 64,256 --bits 1,4 [--every-plan F]

`dequantise` is what the gradient does elsewhere: dequantising, then cuBLAS. Ratios are times over
that of cuBLAS. Each case is checked against float64 first. `--every-plan` also times each plan and
appends a line of JSON for it to a file: whether the costs in backward.py choose well.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from marlin import COLD_BYTES, Run, graph_times, random_weight

from fdk_cuda.marlin import MARLIN, MARLIN_LUT, MarlinLayout
from fdk_cuda.marlin.dgrad import (
    dgrad_plan,
    dgrad_plans,
    dgrad_runner,
    run_dgrad,
)
from fdk_cuda.marlin.heuristics_hopper import HopperPlan
from fdk_cuda.marlin.ops import dequantise
from fdk_cuda.marlin.runtime import device_limits
from fdk_formats.testing import nrmse

SHAPES = "8192x8192,28672x8192,4096x14336"


def time_case(
    n: int, k: int, bits: int, ms: list[int], *, affine: bool, every_plan: Path | None
) -> None:
    """Prints a line for each m."""
    q = random_weight(bits, n, k, affine=affine)
    layout = (MARLIN if affine else MARLIN_LUT).pack(q, dtype=torch.bfloat16)
    assert isinstance(layout, MarlinLayout)
    packed = [
        layout.packed.clone() for _ in range(min(100, COLD_BYTES // layout.packed.nbytes + 2))
    ]
    W_hat = q.dequantise(torch.bfloat16)
    dense = [W_hat.clone() for _ in range(COLD_BYTES // W_hat.nbytes + 2)]
    weight = layout.codebook, str(layout.format), n, k
    for m in ms:
        dy = torch.randn(m, n, device="cuda").to(torch.bfloat16)
        oracle = dy.double() @ W_hat.double()

        def fused(plan: HopperPlan, dy: torch.Tensor = dy) -> Run:
            runner = dgrad_runner(layout.geometry, dy.dtype, len(dy), plan, 0)
            return lambda i: run_dgrad(runner, dy, packed[i % len(packed)], weight[0], k)

        def cublas(i: int, dy: torch.Tensor = dy) -> torch.Tensor:
            return torch.mm(dy, dense[i % len(dense)])

        def unfused(i: int, dy: torch.Tensor = dy) -> torch.Tensor:
            return torch.mm(dy, dequantise(packed[i % len(packed)], *weight))

        chosen = dgrad_plan(layout.geometry, m, device_limits(0))
        plans = [chosen]
        if every_plan:
            every = dgrad_plans(layout.geometry, m, device_limits(0))
            plans += [plan for plan in every if plan != chosen]
        runs = [fused(plan) for plan in plans]
        for run in runs:
            error = nrmse(run(0), oracle)
            if not error < 2e-3:
                raise SystemExit(f"wrong answer, not timed: n{n} k{k} b{bits} m{m}: {error:.2e}")
        del oracle
        count = 6 if m * n * k > 1e11 else 12 if m * n * k > 3e10 else 24
        dense_time, unfused_time, *times = graph_times([cublas, unfused, *runs], count)
        if every_plan:
            with every_plan.open("a") as file:
                for plan, time in zip(plans, times, strict=True):
                    row = {"n": n, "k": k, "bits": bits, "m": m, "time": time, **asdict(plan)}
                    file.write(json.dumps({**row, "cublas": dense_time}) + "\n")
        shape, best = chosen.shape, min(times)
        print(
            f"{n:6}x{k:<6} {'affine' if affine else 'b'}{bits} m{m:<4} fused {times[0]:7.1f} "
            f"cublas {dense_time:7.1f} dequantise {unfused_time:7.1f} ratio "
            f"{times[0] / dense_time:5.2f} ({unfused_time / dense_time:5.2f}) tile {shape.tile_m} "
            f"cluster {shape.cluster} splits {chosen.splits}"
            + (f" best {best:7.1f} of {len(plans)}" if every_plan else ""),
            flush=True,
        )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ms", default="64,256,512,1024,4096")
    parser.add_argument("--bits", default="1,2,3,4,8")
    parser.add_argument("--shapes", default=SHAPES, help="n x k of the weights")
    parser.add_argument("--affine", action="store_true", help="integer zero points, no codebook")
    parser.add_argument("--every-plan", type=Path, metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: needs an NVIDIA GPU, torch finds none on this machine")
        return
    ms = [int(m) for m in args.ms.split(",")]
    for shape in args.shapes.split(","):
        n, k = map(int, shape.split("x"))
        for bits in args.bits.split(","):
            time_case(n, k, int(bits), ms, affine=args.affine, every_plan=args.every_plan)


if __name__ == "__main__":
    main()
