"""Times plans for few rows of x in turns: the one that is taken, and those that cost least.

    python packages/fdk-cuda/benchmarks/marlin_plans.py [--shapes 0,2] [--bits 3,4] [--ms 1,4] \\
        [--first 14] [--out rows.jsonl]

As marlin.py does it: graphs over rotating weights, cold L2, each answer checked first; which graph
is replayed first changes from replay to replay. A row a plan; printed is, for each case, what is
taken and the fastest. cost_model.py was fitted to such rows; tuned_overrides.py has those where
another plan was faster by over 1.5 %, with 16 rows 2.
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _rows import write_rows
from marlin import SHAPES, Run, Weights

from fdk_cuda.marlin.heuristics_small_m import SmallPlan, plan_small, small_m_cost, small_plans
from fdk_cuda.marlin.instantiations import Variant
from fdk_cuda.marlin.runtime import device_limits, small_fields, small_launch
from fdk_formats.testing import nrmse

REPLAYS, MIN_CALLS = 14, 40


def plan_run(weights: Weights, x: torch.Tensor, plan: SmallPlan) -> Run:
    """Launches one plan, checked.

    Raises:
        SystemExit: the answer is wrong.
    """
    geometry, m, packed = weights.layout.geometry, len(x), weights.packed
    variant = Variant.of(geometry, x.dtype)
    launch, fields = small_launch(variant, plan, 0), small_fields(variant, plan, geometry, m)
    y = x.new_full((m, geometry.n), torch.nan)
    pointers = weights.layout.codebook.data_ptr(), x.data_ptr(), 0, y.data_ptr()

    def run(i: int) -> torch.Tensor:
        launch(packed[i % len(packed)].data_ptr(), *pointers, *fields)
        return y

    oracle = x.double() @ weights.multiplied(plan.shape).T
    if not (error := nrmse(run(0), oracle)) < 2e-3:
        raise SystemExit(f"wrong answer, not timed: {weights.layout.format} m{m} {plan}: {error}")
    return run


def times_in_turns(runs: list[Run], count: int) -> list[float]:
    """Median microseconds of each; every replay begins with the next graph."""
    graphs = []
    for run in runs:
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for i in range(count):
                run(i)
    times: list[list[float]] = [[] for _ in graphs]
    for replay in range(REPLAYS + 2):
        for step in range(len(graphs)):
            own = (replay + step) % len(graphs)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            graphs[own].replay()
            end.record()
            end.synchronize()
            times[own].append(start.elapsed_time(end) * 1000 / count)
    return [statistics.median(own[2:]) for own in times]


def time_case(kind: str, bits: int, n: int, k: int, ms: list[int], first: int) -> Iterator[Any]:
    """A row for each plan of each m."""
    weights, limits = Weights.of(kind, bits, n, k), device_limits(0)
    geometry = weights.layout.geometry
    for m in ms:
        x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
        taken = plan_small(geometry, x.dtype, m, limits)
        plans = small_plans(geometry, Variant.of(geometry, x.dtype), m, limits)
        ranked = sorted(plans, key=lambda plan: small_m_cost(geometry, plan))
        chosen = [taken, *(plan for plan in ranked if plan != taken)][:first]
        runs = [plan_run(weights, x, plan) for plan in chosen]
        times = times_in_turns(runs, max(MIN_CALLS, len(weights.packed)))
        best = min(times)
        for plan, us in zip(chosen, times, strict=True):
            shape = plan.shape
            cut = shape.fragments, shape.k_blocks, shape.n_groups, shape.warps, plan.cluster
            row = {"n": n, "k": k, "bits": bits, "m": m, "kind": kind, "cut": cut}
            row |= {"limb_rows": shape.limb_rows, "cost": small_m_cost(geometry, plan), "us": us}
            yield row | {"taken": plan is taken, "best": us == best}


def line_of(row: dict[str, Any]) -> str:
    """A row as text."""
    what = "taken " * row["taken"] + "fastest" * row["best"]
    cut = " ".join(map(str, row["cut"]))
    case = f"{row['n']:6}x{row['k']:<6} {row['kind']:8} b{row['bits']} m{row['m']:<2}"
    return f"{case} {cut:12} {row['us']:7.2f} {what}"


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="0,1,2,3,4", help="indices of marlin.py's SHAPES")
    parser.add_argument("--bits", default="1,2,3,4,8")
    parser.add_argument("--ms", default="1,4")
    parser.add_argument("--kinds", default="codebook,affine", help="of weights")
    parser.add_argument("--first", type=int, default=14, help="plans of each case")
    parser.add_argument("--out", type=Path, help="a file that rows are written to as JSONL")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: needs an NVIDIA GPU, torch finds none on this machine")
        return
    ms = [int(m) for m in args.ms.split(",")]
    rows = (
        row
        for index in map(int, args.shapes.split(","))
        for bits in map(int, args.bits.split(","))
        for kind in args.kinds.split(",")
        for row in time_case(kind, bits, *SHAPES[index], ms, args.first)
    )
    write_rows(args.out, rows, line_of)


if __name__ == "__main__":
    main()
