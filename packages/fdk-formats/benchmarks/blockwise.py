"""Time and peak memory of the blockwise ops against bitsandbytes.

    python packages/fdk-formats/benchmarks/blockwise.py --shapes 1024x4096,8192x7168

Contenders: ``fdk-cpu`` (if installed), ``fdk torch``, ``bnb torch`` (the oracle) and ``bnb C++``,
which has no 4-bit quantiser. Every answer is compared with the oracle's before it is timed. Only
the 8-bit codes of ``bnb C++`` may differ, see docs/guide/blockwise.md. Contenders take turns in
random order, so that other load on the machine meets all of them. Set GOMP_SPINCOUNT=0 on shared
cores.
"""

import argparse
import ctypes
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import bitsandbytes  # noqa: F401  registers its ops
import torch
from torch import Tensor

from fdk_formats.blockwise import (
    TORCH_KERNELS,
    Kernels,
    QuantisedBlocks,
    dequantise_4bit,
    dequantise_blockwise,
    dynamic_map,
    kernels_for,
    quantise_4bit,
    quantise_blockwise,
    register_kernels,
)

Run = Callable[[], object]
TORCH_BACKEND = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
INSTALLED_KERNELS = kernels_for(torch.device("cpu"))
ORACLE = "bnb torch"
BLOCK_SIZE_4BIT, BLOCK_SIZE_8BIT = 64, 256
# The share of 8-bit codes that bnb C++ may give another entry.
COARSE_SHARE = 0.01
# A turn is this many calls, or as many as fit in TURN_SECONDS; the first WARM_CALLS do not count.
CALLS_PER_TURN, WARM_CALLS, TURN_SECONDS = 12, 4, 0.05


def main() -> None:
    """Prints a table of every op, shape and contender."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="1024x4096,4096x4096", help="comma-separated")
    parser.add_argument("--ops", default="", help="only ops whose name contains this")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a small shape and two turns")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.shapes, arguments.turns = "256x1024", 2
    torch.set_num_threads(arguments.threads)
    print("| shape | op | by | median | minimum | extra MB |\n|---|---|---|---:|---:|---:|")
    for shape in arguments.shapes.split(","):
        for name, contenders in cases(tuple(int(size) for size in shape.split("x"))):
            if arguments.ops not in name:
                continue
            result_bytes = check(name, contenders)
            memory = {by: peak_memory(run) - result_bytes for by, run in contenders.items()}
            for by, seconds in timed(contenders, arguments.turns).items():
                median, least = statistics.median(seconds) * 1e3, min(seconds) * 1e3
                extra = max(0, memory[by]) / 1e6
                print(
                    f"| {shape} | {name} | {by} | {median:.2f} ms | {least:.2f} ms | {extra:.0f} |"
                )


def cases(shape: tuple[int, ...]) -> Iterator[tuple[str, dict[str, Run]]]:
    """Yields each op with its contenders, on normal values."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    code, q = dynamic_map(), quantise_blockwise(x, block_size=BLOCK_SIZE_8BIT)
    arguments: tuple[object, ...] = x, code, BLOCK_SIZE_8BIT
    yield (
        "quantise 8-bit fp32",
        {
            **ours(lambda: quantise_blockwise(x, block_size=BLOCK_SIZE_8BIT)),
            **theirs("quantize_blockwise", *arguments),
        },
    )
    arguments = q.packed, q.absmax, q.code, BLOCK_SIZE_8BIT, torch.float32
    yield (
        "dequantise 8-bit fp32",
        {**ours(lambda: dequantise_blockwise(q)), **theirs("dequantize_blockwise", *arguments)},
    )
    halves = x.to(torch.bfloat16)
    for kind in ("nf4", "fp4"):
        peers = theirs("quantize_4bit", halves, BLOCK_SIZE_4BIT, kind, torch.uint8)
        del peers["bnb C++"]
        runs = ours(lambda kind=kind: quantise_4bit(halves, BLOCK_SIZE_4BIT, kind))
        yield f"quantise {kind} bf16", {**runs, **peers}
    q4 = quantise_4bit(halves, BLOCK_SIZE_4BIT)
    arguments = q4.packed, q4.absmax, BLOCK_SIZE_4BIT, "nf4", shape, torch.bfloat16
    yield (
        "dequantise nf4 bf16",
        {**ours(lambda: dequantise_4bit(q4)), **theirs("dequantize_4bit", *arguments)},
    )


def ours(run: Run) -> dict[str, Run]:
    """Returns an op of fdk on the installed kernels, if any, and on the torch ones."""

    def on(kernels: Kernels) -> Run:
        def call() -> object:
            register_kernels("cpu", kernels)
            return run()

        return call

    is_installed = INSTALLED_KERNELS is not TORCH_KERNELS
    return ({"fdk-cpu": on(INSTALLED_KERNELS)} if is_installed else {}) | {
        "fdk torch": on(TORCH_KERNELS)
    }


def theirs(name: str, *arguments: object) -> dict[str, Run]:
    """Returns an op of bitsandbytes on its torch backend and on its CPU library."""
    op = getattr(torch.ops.bitsandbytes, name).default
    return {
        ORACLE: lambda: op.redispatch(TORCH_BACKEND, *arguments),
        "bnb C++": lambda: op(*arguments),
    }


def tensors_of(answer: object) -> tuple[Tensor, ...]:
    """Returns codes and absmax of a quantised answer, or the values of a dequantised one."""
    if isinstance(answer, QuantisedBlocks):
        return answer.packed, answer.absmax
    return answer if isinstance(answer, tuple) else (answer,)


def check(op: str, contenders: dict[str, Run]) -> int:
    """Compares every answer with the oracle's; returns the bytes of the answer.

    Raises:
        SystemExit: if an answer is wrong.
    """
    wanted = tensors_of(contenders[ORACLE]())
    for name, run in contenders.items():
        got = tensors_of(run())
        wrong = [(a != b).float().mean().item() for a, b in zip(got, wanted, strict=True)]
        is_coarse = name == "bnb C++" and op.startswith("quantise 8-bit")
        if any(wrong) and not (is_coarse and wrong[0] < COARSE_SHARE and wrong[1] == 0):
            raise SystemExit(f"{op}: {name} is wrong in {wrong} of its elements")
    return sum(tensor.nbytes for tensor in wanted)


def timed(contenders: dict[str, Run], turns: int) -> dict[str, list[float]]:
    """Returns the seconds of the calls that count, of each contender."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    order = random.Random(0)
    for _ in range(turns):
        for name in order.sample(sorted(contenders), len(contenders)):
            calls: list[float] = []
            while len(calls) < 2 or (len(calls) < CALLS_PER_TURN and sum(calls) < TURN_SECONDS):
                start = time.perf_counter()
                contenders[name]()
                calls.append(time.perf_counter() - start)
            seconds[name] += calls[min(WARM_CALLS, len(calls) // 2) :]
    return seconds


def peak_memory(run: Run) -> int:
    """Returns the bytes by which the process grows during a call (Linux only, else 0)."""
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return 0
    ctypes.CDLL(None).malloc_trim(0)  # memory that earlier calls freed must not be reused unseen
    reset.write_text("5")
    before = status_kib("VmRSS")
    run()
    return (status_kib("VmHWM") - before) * 1024


def status_kib(name: str) -> int:
    """Reads an entry of /proc/self/status in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
