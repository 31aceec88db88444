"""Time every plan of small_m_experts.cu against the one that the cost model chooses.

    python packages/fdk-cuda/benchmarks/expert_plans.py --models qwen3-30b-a3b --tokens 1,4,16,64
    python packages/fdk-cuda/benchmarks/expert_plans.py --rows 1,8 --bits 4 --first 12

One product of a layer, gate and up or down, without the sum over experts. Microseconds per call,
cold L2, other random experts in each call; median of graph replays in turns. Each plan's answer is
compared with that of the first.
"""

import itertools
from collections.abc import Iterator
from dataclasses import asdict

import torch
from _timing import Row, argument_parser, copies, graph_times, has_gpu, integers, write_rows
from experts import CALLS, GROUP_SIZE, MODELS, Inputs, Model, random_stack
from torch import Tensor

from fdk_cuda.marlin.expert_layout import MarlinExpertLayout
from fdk_cuda.marlin.expert_ops import ExpertStack, few_rows
from fdk_cuda.marlin.heuristics_experts import (
    TILE_ROWS,
    ExpertPlan,
    expected_tiles,
    expert_cost,
    expert_plans,
    most_pairs,
    plan_experts,
    tile_rows,
)
from fdk_cuda.marlin.instantiations import Variant
from fdk_cuda.marlin.runtime import device_limits
from fdk_formats import Format

LIMIT = 1e-2


def plans_of(w: ExpertStack, pairs: int, rows: int, first: int) -> list[ExpertPlan]:
    """List the chosen plan, then the others by predicted cost."""
    geometry, limits, dtype = w.geometry, device_limits(0), torch.bfloat16
    tiles = expected_tiles(pairs, w.experts, rows)
    chosen = plan_experts(geometry, dtype, pairs, w.experts, rows, limits)
    plans = list(expert_plans(geometry, Variant.of(geometry, dtype), rows, limits))
    plans.sort(key=lambda plan: expert_cost(geometry, plan, tiles, limits))
    return [chosen, *(plan for plan in plans if plan != chosen)][:first]


def time_product(
    model: Model, part: str, w: ExpertStack, tokens: int, rows: int, first: int
) -> Iterator[Row]:
    """Yield a row for each plan of a product."""
    stacks = [w._replace(packed=packed) for packed in copies(w.packed, most=CALLS)]
    inputs = [Inputs.random(model, tokens, seed) for seed in range(CALLS)]
    pairs, swiglu = tokens * model.top_k, part == "gate_up"
    plans = plans_of(w, pairs, rows, first)
    xs = [
        given.x if swiglu else torch.randn(pairs, w.k, device="cuda").bfloat16() / 8
        for given in inputs
    ]

    def way(plan: ExpertPlan):  # type: ignore[no-untyped-def]
        def run(i: int) -> Tensor:
            own = stacks[i % len(stacks)]
            return few_rows(xs[i], own, inputs[i].ids, plan, swiglu=swiglu, wide=not swiglu)

        return run

    runs = [way(plan) for plan in plans]
    wanted = runs[0](0).double()
    for plan, run in zip(plans, runs, strict=True):
        error = float((run(0).double() - wanted).norm() / wanted.norm())
        if not error < LIMIT:
            raise SystemExit(f"plans differ: {model.name} {part} t{tokens} {plan}: {error:.2e}")
    times = graph_times(runs, CALLS)
    for plan, us in zip(plans, times, strict=True):
        row = {"model": model.name, "part": part, "tokens": tokens, "us": us, "plan": asdict(plan)}
        yield row | {"chosen": plan is plans[0], "fastest": us == min(times)}


def line_of(row: Row) -> str:
    """Format a row."""
    mark = "chosen " * row["chosen"] + "fastest" * row["fastest"]
    fields = row["plan"]["shape"] | row["plan"]
    names = "fragments", "k_blocks", "warps", "rows", "split", "buffers"
    plan = " ".join(f"{name}={fields[name]}" for name in names)
    case = f"{row['model']:16} {row['part']:7} t{row['tokens']:<4}"
    return f"{case} {row['us']:7.2f} us {mark:15} {plan}"


def main() -> None:
    """Read the command line and time every plan."""
    parser = argument_parser(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas")
    parser.add_argument("--tokens", type=integers, default="1,4,16,64")
    parser.add_argument("--bits", type=integers, default="4")
    parser.add_argument("--rows", type=integers, default="0", help="of a tile; 0: as chosen")
    parser.add_argument("--first", type=int, default=10, help="plans of each case")
    args = parser.parse_args()
    if not set(args.rows) <= {0, 1, TILE_ROWS}:
        parser.error(f"--rows: wanted 0, 1 or {TILE_ROWS}, got {args.rows}")
    if not has_gpu():
        return

    def rows() -> Iterator[Row]:
        for name, bits in itertools.product(args.models.split(","), args.bits):
            model, format = MODELS[name], Format("custom", bits, GROUP_SIZE)
            shapes = {
                "gate_up": (2 * model.inner, model.hidden),
                "down": (model.hidden, model.inner),
            }
            for part, (n, k) in shapes.items():
                stack = random_stack(format, model.experts, n, k, 0)
                layout = MarlinExpertLayout(stack, torch.bfloat16)
                w = ExpertStack(layout.packed, layout.codebook, str(format), n, k)
                for tokens, given in itertools.product(args.tokens, args.rows):
                    chosen = given or tile_rows(tokens, model.top_k, model.experts)
                    if chosen and tokens * model.top_k <= most_pairs(model.experts):
                        yield from time_product(model, part, w, tokens, chosen, args.first)

    with torch.no_grad():
        write_rows(args.out, rows(), line_of)


if __name__ == "__main__":
    main()
