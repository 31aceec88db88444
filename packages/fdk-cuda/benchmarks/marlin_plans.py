"""Time every plan of a Marlin kernel against the one that the cost model chooses.

    python packages/fdk-cuda/benchmarks/marlin_plans.py --kernel small_m --ms 1,4 --bits 3,4
    python packages/fdk-cuda/benchmarks/marlin_plans.py --kernel hopper_gemm --ms 64,256
    python packages/fdk-cuda/benchmarks/marlin_plans.py --kernel hopper_dgrad --ms 256

The cost models of small_m, hopper_gemm and the gradient were fitted to such rows, and the tuned
overrides are cases where another plan was more than 1.5 % faster (2 % with 16 rows). `--first`
limits the plans of a case. Microseconds per call, cold L2, median
of graph replays in turns; each plan's answer is checked first.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from _marlin_weight import GROUP_SIZE, MarlinWeight
from _timing import (
    Row,
    Run,
    argument_parser,
    check,
    graph_times,
    has_gpu,
    integers,
    shapes,
    write_rows,
)
from torch import Tensor

from fdk_cuda.marlin.dgrad import dgrad_plan, dgrad_plans, dgrad_runner, run_dgrad
from fdk_cuda.marlin.heuristics_hopper import HopperPlan, hopper_plans, plan_hopper
from fdk_cuda.marlin.heuristics_small_m import SmallPlan, plan_small, small_m_cost, small_plans
from fdk_cuda.marlin.instantiations import Variant
from fdk_cuda.marlin.runtime import (
    device_limits,
    hopper_runner,
    run_hopper,
    small_fields,
    small_launch,
)

KERNELS = ("small_m", "hopper_gemm", "hopper_dgrad")
REPLAYS, CALLS = 14, 40
Plan = SmallPlan | HopperPlan


def plans_of(kernel: str, weight: MarlinWeight, m: int, first: int) -> list[Any]:
    """List the chosen plan, then the others; small_m's by predicted cost."""
    geometry, limits = weight.layout.geometry, device_limits(0)
    if kernel == "small_m":
        chosen: Plan = plan_small(geometry, torch.bfloat16, m, limits)
        plans: list[Any] = list(
            small_plans(geometry, Variant.of(geometry, torch.bfloat16), m, limits)
        )
        plans.sort(key=lambda plan: small_m_cost(geometry, plan))
    elif kernel == "hopper_gemm":
        chosen, plans = plan_hopper(geometry, m, limits), list(hopper_plans(geometry, m, limits))
    else:
        chosen = dgrad_plan(geometry, m, limits)
        plans = list(dgrad_plans(geometry, m, limits))
    return [chosen, *(plan for plan in plans if plan != chosen)][:first]


def small_run(weight: MarlinWeight, x: Tensor, plan: SmallPlan) -> Run:
    """Return a launch of small_m.cu by one plan."""
    geometry, m = weight.layout.geometry, len(x)
    variant = Variant.of(geometry, x.dtype)
    launch, fields = small_launch(variant, plan, 0), small_fields(variant, plan, geometry, m)
    y = x.new_full((m, geometry.n), torch.nan)
    pointers = weight.layout.codebook.data_ptr(), x.data_ptr(), 0, y.data_ptr()

    def run(i: int) -> Tensor:
        launch(weight.packed[i % len(weight.packed)].data_ptr(), *pointers, *fields)
        return y

    return run


def hopper_run(weight: MarlinWeight, x: Tensor, plan: HopperPlan) -> Run:
    """Return a launch of hopper_gemm.cu by one plan, with its reduction of split k."""
    layout, packed = weight.layout, weight.packed
    runner = hopper_runner(layout.geometry, x.dtype, len(x), plan, 0)
    codebook, n = layout.codebook, layout.geometry.n
    return lambda i: run_hopper(runner, x, packed[i % len(packed)], codebook, None, n)


def dgrad_run(weight: MarlinWeight, dy: Tensor, plan: HopperPlan) -> Run:
    """Return a launch of the gradient's kernel by one plan, with its reduction of split n."""
    layout, packed = weight.layout, weight.packed
    runner = dgrad_runner(layout.geometry, dy.dtype, len(dy), plan, 0)
    codebook, k = layout.codebook, layout.geometry.k
    return lambda i: run_dgrad(runner, dy, packed[i % len(packed)], codebook, k)


RUNS: dict[str, Callable[..., Run]] = dict(
    zip(KERNELS, (small_run, hopper_run, dgrad_run), strict=True)
)


def time_case(
    kernel: str, n: int, k: int, bits: int, kind: str, ms: list[int], first: int
) -> Iterator[Row]:
    """Yield a row for each plan of each m."""
    weight, dy = MarlinWeight.random(bits, n, k, kind), kernel == "hopper_dgrad"
    for m in ms:
        x = torch.randn(m, n if dy else k, device="cuda").bfloat16()
        plans, oracle = plans_of(kernel, weight, m, first), weight.oracle(x, dy=dy)
        runs = [RUNS[kernel](weight, x, plan) for plan in plans]
        for plan, run in zip(plans, runs, strict=True):
            check(run(0), oracle, f"{n}x{k} {kind} b{bits} m{m} {plan}")
        count = 6 if m * n * k > 1e11 else CALLS
        times = graph_times(runs, count, replays=REPLAYS)
        for plan, us in zip(plans, times, strict=True):
            row = {"kernel": kernel, "n": n, "k": k, "bits": bits, "m": m, "kind": kind}
            row |= {"plan": asdict(plan), "us": us}
            yield row | {"chosen": plan is plans[0], "fastest": us == min(times)}


def line_of(row: Row) -> str:
    """Format a row."""
    mark = "chosen " * row["chosen"] + "fastest" * row["fastest"]
    fields = row["plan"]["shape"] | row["plan"]
    plan = " ".join(f"{name}={value}" for name, value in fields.items() if name != "shape")
    case = f"{row['n']:6}x{row['k']:<6} {row['kind']:8} b{row['bits']} m{row['m']:<4}"
    return f"{case} {row['us']:7.2f} us {mark:15} {plan}"


def main() -> None:
    """Read the command line and time every plan."""
    parser = argument_parser(__doc__)
    parser.add_argument("--kernel", choices=KERNELS, default="small_m")
    parser.add_argument("--ms", type=integers, default="1,16", help="rows of x or dy")
    parser.add_argument("--bits", type=integers, default="1,4")
    parser.add_argument("--shapes", type=shapes, default="8192x8192")
    parser.add_argument("--kinds", default="codebook", help=f"groups of {GROUP_SIZE}")
    parser.add_argument("--first", type=int, default=14, help="plans of each case")
    args = parser.parse_args()
    if not has_gpu(hopper=args.kernel != "small_m"):
        return
    rows = (
        row
        for n, k in args.shapes
        for bits in args.bits
        for kind in args.kinds.split(",")
        for row in time_case(args.kernel, n, k, bits, kind, args.ms, args.first)
    )
    write_rows(args.out, rows, line_of)


if __name__ == "__main__":
    main()
