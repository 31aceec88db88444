"""Times the Marlin kernels in CUDA graphs over rotating weights: cold L2, median replay.

    python packages/fdk-cuda/benchmarks/marlin.py --ms 1,16,64 --bits 1,4 [--goals goals.jsonl]

Each case is checked against the weight in float64 before it is timed. `pdl` is with programmatic
dependent launch, `plain` without, `cublas` the product with a bf16 weight; their replays take
turns. `floor` is the larger of reading weights, scales and x once, at the rates that
docs/kernels/marlin.md gives for an H200, and the arithmetic at the rate of cuBLAS. `goal` comes
from a file of rows {n, k, bits, m, goal}.

    python packages/fdk-cuda/benchmarks/marlin.py --step --ms 1,16 --bits 1,4

times one decoding step of a llama of 4096 channels in a CUDA graph, m sequences of STEP_LENGTH
tokens, with and without its linear layers: what they add there, between torch's norms, rotations
and attention, beside the same layers back to back. Without, their right outputs are taken from
memory as they lie, so what they add holds every gap around them.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from _floor import product_floor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from fdk_cuda.marlin import MARLIN, MARLIN_LUT, MarlinLayout
from fdk_cuda.marlin.hopper import plan_hopper
from fdk_cuda.marlin.launches import (
    device_limits,
    hopper_runner,
    run_hopper,
    small_fields,
    small_launch,
)
from fdk_cuda.marlin.ops import dequantise, small_linear
from fdk_cuda.marlin.plan import MAX_ROWS, plan_small
from fdk_cuda.marlin.programs import Variant
from fdk_formats.format import Format
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.testing import nrmse

# The last three, fused q, k, v of two models and a vocabulary, are run where --shapes names them.
SHAPES = (
    *((4096, 4096), (8192, 8192), (28672, 8192), (4096, 14336), (14336, 4096)),
    *((6144, 4096), (21504, 6144), (128256, 4096)),
)
COLD_BYTES = 256 << 20
REPLAYS = 15
# From here on, dequantising first and cuBLAS is timed too.
MANY_ROWS = 1024
Run = Callable[[int], torch.Tensor]
# The blocks of --step: Llama 3 8B's, q, k and v in one layer and gate and up in another.
HEADS, KV_HEADS, HEAD, FFN = 32, 8, 128, 14336
DIM = HEADS * HEAD
STEP_SHAPES = {
    "qkv": (DIM + 2 * KV_HEADS * HEAD, DIM),
    "o": (DIM, DIM),
    "gate_up": (2 * FFN, DIM),
    "down": (DIM, FFN),
}
STEP_BLOCKS, STEP_LENGTH = 8, 512
StepLinear = Callable[[int, str, torch.Tensor], torch.Tensor]


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


def exact_weight(q: QuantisedTensor) -> torch.Tensor:
    """The weight before its products with scales are rounded, float64."""
    codes = q.codes().view(*q.scale.shape, -1)
    if q.codebook is not None:
        values = q.codebook.to(torch.bfloat16).double()[codes.int()]
    else:
        assert q.zero_point is not None
        values = codes.double() - q.zero_point.double()[..., None]
    return (values * q.scale.double()[..., None]).view(q.shape)


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
    """Launches hopper_gemm.cu, and sum_splits.cu where the plan has parts."""
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


def graph_times(runs: list[Run], count: int, *, replays: int = REPLAYS) -> list[float]:
    """Median microseconds of each ``run(i)``, captured ``count`` times in a graph; in turns."""
    graphs = []
    for run in runs:
        run(0)
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for i in range(count):
                run(i)
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(replays + 2):
        for graph, own in zip(graphs, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            own.append(start.elapsed_time(end) * 1000 / count)
    return [statistics.median(own[2:]) for own in times]


def time_case(
    n: int, k: int, bits: int, ms: list[int], goals: dict[tuple[int, ...], float], *, affine: bool
) -> None:
    """Prints a line for each m."""
    q = random_weight(bits, n, k, affine=affine)
    layout = (MARLIN if affine else MARLIN_LUT).pack(q, dtype=torch.bfloat16)
    assert isinstance(layout, MarlinLayout)
    copies = min(400, COLD_BYTES // layout.packed.nbytes + 2)
    packed = [layout.packed.clone() for _ in range(copies)]
    W_hat = q.dequantise(torch.bfloat16)
    dense = [W_hat.clone() for _ in range(COLD_BYTES // W_hat.nbytes + 2)]
    for m in ms:
        x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
        make, W = (small_run, exact_weight(q)) if m <= MAX_ROWS else (hopper_run, W_hat.double())
        runs = [make(layout, packed, x, overlap=overlap) for overlap in (True, False)]
        oracle = x.double() @ W.T
        for run in runs:
            error = nrmse(run(0), oracle)
            if not error < 2e-3:
                raise SystemExit(f"wrong answer, not timed: n{n} k{k} b{bits} m{m}: {error:.2e}")
        del W, oracle
        runs += dense_runs(layout, packed, dense, x)
        count = 8 if m * n * k > 1e11 else max(copies, 40)
        pdl, plain, cublas, *unfused = graph_times(runs, count)
        floor = product_floor(m, n, k, q.packed.nbytes + q.scale.nbytes + x.nbytes)
        goal = goals.get((n, k, bits, m))
        verdict = "" if goal is None else f"goal {goal:6.1f} {'ok' if pdl <= goal else 'OVER'}"
        extra = f"dequantise + cublas {unfused[0]:7.1f} " if unfused else ""
        print(
            f"{n:6}x{k:<6} {'affine' if affine else 'b'}{bits} m{m:<4} pdl {pdl:7.2f} plain "
            f"{plain:7.2f} cublas {cublas:7.2f} pdl/cublas {pdl / cublas:5.2f} floor {floor:7.2f} "
            f"{100 * floor / pdl:3.0f}% {extra}{verdict}",
            flush=True,
        )


def decoding_step(x: torch.Tensor, cache: torch.Tensor, linear: StepLinear) -> torch.Tensor:
    """One token of each sequence through all blocks.

    x     :: [m, DIM, bf16]
    cache :: [STEP_BLOCKS, 2, m, KV_HEADS, STEP_LENGTH, HEAD, bf16]    written at its last entry
    """
    m = len(x)
    last = torch.full((1,), STEP_LENGTH - 1, device="cuda")
    angles = last * 10000.0 ** -torch.linspace(0, 1, HEAD // 2, device="cuda")
    turn = torch.cat([angles.cos(), angles.sin()]).to(x.dtype).view(2, -1)
    kv = KV_HEADS * HEAD

    def rotate(heads: torch.Tensor) -> torch.Tensor:
        even, odd = heads.chunk(2, dim=-1)
        cosine, sine = turn
        return torch.cat([even * cosine - odd * sine, odd * cosine + even * sine], dim=-1)

    for block in range(STEP_BLOCKS):
        keys, values = cache[block]
        q, k, v = linear(block, "qkv", rms_norm(x, (DIM,))).split([DIM, kv, kv], dim=-1)
        keys.index_copy_(2, last, rotate(k.view(m, KV_HEADS, 1, HEAD)))
        values.index_copy_(2, last, v.view(m, KV_HEADS, 1, HEAD))
        # The heads of a group stand where tokens would, so that no key is repeated.
        q = rotate(q.view(m, KV_HEADS, -1, HEAD))
        y = scaled_dot_product_attention(q, keys, values).view(m, DIM)
        x = x + linear(block, "o", y)
        gate, up = linear(block, "gate_up", rms_norm(x, (DIM,))).split([FFN, FFN], dim=-1)
        x = x + linear(block, "down", silu(gate) * up)
    return x


def time_step(bits: int, m: int, *, affine: bool) -> None:
    """Prints what the linear layers of a block take in a decoding step, and back to back."""
    layouts, packed = {}, {}
    for name, shape in STEP_SHAPES.items():
        weight = random_weight(bits, *shape, affine=affine)
        layout = (MARLIN if affine else MARLIN_LUT).pack(weight, dtype=torch.bfloat16)
        assert isinstance(layout, MarlinLayout)
        layouts[name] = layout
        packed[name] = [layout.packed.clone() for _ in range(STEP_BLOCKS)]
    x = torch.randn(m, DIM, device="cuda").to(torch.bfloat16)
    shape = STEP_BLOCKS, 2, m, KV_HEADS, STEP_LENGTH, HEAD
    cache = torch.randn(shape, device="cuda").to(torch.bfloat16)
    inputs: dict[tuple[int, str], torch.Tensor] = {}
    outputs: dict[tuple[int, str], torch.Tensor] = {}

    def linear(block: int, name: str, x: torch.Tensor) -> torch.Tensor:
        layout = layouts[name]
        weight = packed[name][block], layout.codebook, str(layout.format)
        return small_linear(x, *weight, None, *layout.shape)

    def kept(block: int, name: str, x: torch.Tensor) -> torch.Tensor:
        inputs[block, name], outputs[block, name] = x, linear(block, name, x)
        return outputs[block, name]

    def back_to_back(_: int) -> torch.Tensor:
        for block in range(STEP_BLOCKS):
            for name in STEP_SHAPES:
                y = linear(block, name, inputs[block, name])
        return y

    expected = decoding_step(x, cache, kept)
    if not torch.equal(expected, decoding_step(x, cache, lambda *at: outputs[at[:2]])):
        raise SystemExit(f"two answers, not timed: b{bits} m{m}")
    runs: list[Run] = [
        lambda _: decoding_step(x, cache, linear),
        lambda _: decoding_step(x, cache, lambda *at: outputs[at[:2]]),
        back_to_back,
    ]
    whole, rest, alone = (time / STEP_BLOCKS for time in graph_times(runs, 1))
    print(
        f"a block of a step, {'affine' if affine else 'b'}{bits} m{m}: {whole:6.1f} us, without "
        f"linear layers {rest:6.1f}, so they add {whole - rest:6.1f}; back to back {alone:6.1f}",
        flush=True,
    )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ms", default="1,4,8,16")
    parser.add_argument("--bits", default="1,2,3,4,8")
    parser.add_argument("--shapes", default="0,1,2,3,4", help="indices of SHAPES")
    parser.add_argument("--affine", action="store_true", help="integer zero points, no codebook")
    parser.add_argument("--goals", type=Path)
    parser.add_argument("--step", action="store_true", help="a decoding step, not single layers")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: needs an NVIDIA GPU, torch finds none on this machine")
        return
    ms = [int(m) for m in args.ms.split(",")]
    if args.step:
        for bits in args.bits.split(","):
            for m in ms:
                time_step(int(bits), m, affine=args.affine)
        return
    goals: dict[tuple[int, ...], float] = {}
    if args.goals:
        for line in args.goals.read_text().splitlines():
            row = json.loads(line)
            goals[row["n"], row["k"], row["bits"], row["m"]] = row["goal"]
    for index in args.shapes.split(","):
        for bits in args.bits.split(","):
            time_case(*SHAPES[int(index)], int(bits), ms, goals, affine=args.affine)


if __name__ == "__main__":
    main()
