"""Times the experts of mixtures on the CPU, against transformers' experts in bf16.

    GOMP_SPINCOUNT=0 python packages/fdk-cpu/benchmarks/experts.py --shapes mixtral qwen3-30b-a3b

Prints one table per shape: for each number of tokens the experts hit, the time to read their
weights once (measured in the same run), and the median ms of each contender, in turns. A call is
gate and up, the gate, and down with routing weights, as in one layer of the model. Tokens choose
experts at random, other ones for each call, so that weights come from memory. Random weights: the
time does not depend on them.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import fdk_cpu
from fdk_formats import Format, QuantisedExperts, QuantisedStack
from fdk_formats.experts import QuantisedExpertLinear, experts_like
from fdk_formats.testing import random_quantised

READ_BYTES = 192 << 20


@dataclass(frozen=True)
class Shape:
    """The experts of one layer: ``experts`` of gate and up ``[2 i, h]`` and down ``[h, i]``."""

    experts: int
    top_k: int
    h: int
    i: int


SHAPES = {
    # A quarter of Mixtral's 14336, so that a layer in bf16 takes 0.7 GB.
    "mixtral": Shape(8, 2, 4096, 3584),
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "deepseek-v2-lite": Shape(64, 6, 2048, 1408),
}
Call = Callable[[Tensor, Tensor, Tensor], object]


def dense_experts(shape: Shape) -> MixtralExperts:
    """Return transformers' module in bf16."""
    config = SimpleNamespace(
        num_local_experts=shape.experts,
        hidden_size=shape.h,
        intermediate_size=shape.i,
        hidden_act="silu",
        _experts_implementation="eager",
    )
    with torch.device("meta"):
        experts = MixtralExperts(config)
    experts.act_fn = ACT2FN["silu"]
    for name, parameter in list(experts.named_parameters()):
        weight = torch.randn(1, *parameter.shape[1:]) / parameter.shape[2] ** 0.5
        values = weight.to(torch.bfloat16).expand(parameter.shape).contiguous()
        setattr(experts, name, torch.nn.Parameter(values, requires_grad=False))
    return experts.eval()


def ours(shape: Shape, format: Format, source: MixtralExperts) -> QuantisedExperts:
    """Return the same with random weights of a format."""
    made = {}
    for name, n, k in (("gate_up_proj", 2 * shape.i, shape.h), ("down_proj", shape.h, shape.i)):
        stack = QuantisedStack.of([random_quantised(format, n, k)] * shape.experts)
        made[name] = QuantisedExpertLinear.from_quantised(stack)
    experts = experts_like(source, made)
    experts.take_over(source)
    for layer in made.values():
        assert layer.layout is not None  # packed
    return experts.eval()


def read_bandwidth() -> float:
    """Return bytes per second, the median of eight reads."""
    memory = torch.ones(READ_BYTES, dtype=torch.uint8)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        fdk_cpu.read_sum(memory)
        times.append(time.perf_counter() - start)
    return READ_BYTES / statistics.median(times)


def with_implementation(experts: MixtralExperts, name: str) -> Call:
    """Return a call of transformers' module with one of its implementations."""

    def call(*arguments: Tensor) -> object:
        experts.config._experts_implementation = name
        return experts(*arguments)

    return call


def print_table(shape: Shape, format: Format, tokens: list[int], seconds: float) -> None:
    """Print a line for each number of tokens."""
    dense = dense_experts(shape)
    quantised = ours(shape, format, dense)
    expert_bytes = sum(
        sum(buffer.nbytes for buffer in layer.layout.buffers()) / shape.experts
        for layer in quantised.children()
        if isinstance(layer, QuantisedExpertLinear)
    )
    contenders: dict[str, Call] = {f"fdk {format}": quantised}
    for name in ("eager", "grouped_mm"):
        contenders[f"bf16 {name}"] = with_implementation(dense, name)
    print(f"{'tokens':>7}{'experts':>9}{'floor':>9}" + "".join(f"{c:>18}" for c in contenders))
    for m in tokens:
        x = torch.randn(m, shape.h).to(torch.bfloat16)
        routings = []
        for _ in range(16):
            scores = torch.rand(m, shape.experts).topk(shape.top_k)
            routings.append((scores.indices, scores.values.softmax(1).to(torch.bfloat16)))
        hit = statistics.mean(len(ids.unique()) for ids, _ in routings)
        floor = hit * expert_bytes / read_bandwidth()
        series: dict[str, list[float]] = {name: [] for name in contenders}
        end, turn = time.perf_counter() + seconds * len(contenders), 0
        while time.perf_counter() < end or turn < 3:
            routing = routings[turn % len(routings)]
            for name, call in contenders.items():
                start = time.perf_counter()
                call(x, *routing)
                series[name].append(time.perf_counter() - start)
            turn += 1
        cells = "".join(f"{1e3 * statistics.median(one):18.3f}" for one in series.values())
        print(f"{m:7}{hit:9.1f}{1e3 * floor:9.3f}{cells}", flush=True)


def main() -> None:
    """Print one table per shape."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--format", type=Format.parse, default=Format.parse("custom4-g64"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 512])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1, help="per cell of a table")
    parser.add_argument("--quick", action="store_true", help="a fifth of the time, one token")
    args = parser.parse_args()
    if args.quick:
        args.seconds, args.tokens = args.seconds / 5, args.tokens[:1]
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    for name in args.shapes:
        shape = SHAPES[name]
        print(
            f"\n{name}: {shape.experts} experts, {shape.top_k} per token, h={shape.h}, "
            f"i={shape.i}, {args.threads} threads, {fdk_cpu.instruction_set()}: median ms"
        )
        with torch.inference_mode():
            print_table(shape, args.format, args.tokens, args.seconds)


if __name__ == "__main__":
    main()
