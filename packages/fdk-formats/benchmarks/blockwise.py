"""Time and peak memory of the blockwise ops beside bitsandbytes' own, in one run.

    GOMP_SPINCOUNT=0 python packages/fdk-formats/benchmarks/blockwise.py
    ... --shapes 28672x8192 --ops 8-bit --append docs/results/epyc-zen4/blockwise.jsonl

All four sizes of docs/blockwise.md take some eight minutes; in parts of two at most: 1024x4096 and
4096x4096, 8192x7168, and 28672x8192 with --ops 8-bit, nf4 and fp4. `fdk-bench table --fill
docs/blockwise.md` then writes what the page says of them.

Contenders: `fdk C++`, the kernels of fdk-cpu, where it is installed; `fdk torch`, those of this
package; `bnb torch`, bitsandbytes' torch backend, which is also the oracle (it dequantises through
torch.compile where there is a C++ compiler); `bnb C++`, its CPU library, which has no 4-bit
quantiser. They take turns as in `fdk-bench compare`, each round in another order, so that another
load on the machine meets all of them, until each has had its seconds and three turns. Every
contender's answer is compared with the oracle's before it is timed, and a wrong one ends the run:
the 8-bit codes of the CPU library are the one exception, and the table says how many differ
(docs/blockwise.md says why). Peak memory is what the process grew by during one call, the result
included; it needs Linux.
"""

import argparse
import ctypes
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import bitsandbytes  # noqa: F401 (registers its ops)
import torch
from torch import Tensor

from fdk_bench.blockwise_tables import HEADINGS, BlockwiseCase, BlockwiseRow, BlockwiseValues
from fdk_bench.blockwise_tables import cells_of as cells_of_row
from fdk_bench.records import Row, cpu_name, gather_facts, to_json
from fdk_bench.timing import CALLS_PER_TURN, SETTLING_CALLS, TURN_SECONDS, summarise
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
SHAPES = "1024x4096,4096x4096,8192x7168"
SECONDS = 1.0
FEWEST_TURNS, MOST_CALLS = 3, 200
ORACLE = "bnb torch"
BLOCK_SIZE_4BIT = 64
BLOCK_SIZE_8BIT = 256
# Those of fdk-cpu, if it is there.
INSTALLED_KERNELS = kernels_for(torch.device("cpu"))
# Of the codes of normal values, the share that the CPU library may give another entry.
COARSE_SHARE = 0.01


@dataclass(frozen=True)
class Case:
    """One op on one tensor: contenders by name, and how to read an answer as plain tensors."""

    name: str
    contenders: dict[str, Run]
    answer: Callable[[object], tuple[Tensor, ...]]


def main() -> None:
    """Prints a table of every op and shape, and appends its rows to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=SHAPES, help=f"comma-separated, default {SHAPES}")
    parser.add_argument("--ops", default="", help="only those whose name holds this: dequantise")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of calls of a contender")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--append", type=Path, help="JSONL file that rows are appended to")
    parser.add_argument("--quick", action="store_true", help="the smallest shape, short")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.shapes, arguments.seconds = SHAPES.split(",")[0], 0.1
    torch.set_num_threads(arguments.threads)
    modules = ("torch", "bitsandbytes")
    facts = gather_facts("blockwise", device=cpu_name(), threads=arguments.threads, modules=modules)
    facts = replace(facts, command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]))
    print(" | ".join(HEADINGS))
    for shape in arguments.shapes.split(","):
        for case in cases(tuple(int(size) for size in shape.split("x"))):
            if arguments.ops not in case.name:
                continue
            for row in rows_of(shape, case, arguments.seconds):
                print(" | ".join(cells_of_row(row).values()), flush=True)
                if arguments.append is not None:
                    with arguments.append.open("a", encoding="utf-8") as file:
                        file.write(to_json(row, facts) + "\n")


def cases(shape: tuple[int, ...]) -> Iterator[Case]:
    """The ops on a normal tensor of this shape."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    code = dynamic_map()
    yield Case(
        "quantise 8-bit fp32",
        {
            **ours(lambda: quantise_blockwise(x, block_size=BLOCK_SIZE_8BIT)),
            ORACLE: lambda: torch_backend("quantize_blockwise", x, code, BLOCK_SIZE_8BIT),
            "bnb C++": lambda: cpu_library("quantize_blockwise", x, code, BLOCK_SIZE_8BIT),
        },
        codes_and_absmax,
    )
    q = quantise_blockwise(x, block_size=BLOCK_SIZE_8BIT)
    parts = q.packed, q.absmax, q.code, BLOCK_SIZE_8BIT, torch.float32
    yield Case(
        "dequantise 8-bit fp32",
        {
            **ours(lambda: dequantise_blockwise(q)),
            ORACLE: lambda: torch_backend("dequantize_blockwise", *parts),
            "bnb C++": lambda: cpu_library("dequantize_blockwise", *parts),
        },
        lambda out: (out,),
    )
    halves = x.to(torch.bfloat16)
    yield from (four_bit_quantise(halves, kind) for kind in ("nf4", "fp4"))
    q4 = quantise_4bit(halves, BLOCK_SIZE_4BIT)
    parts4 = q4.packed, q4.absmax, BLOCK_SIZE_4BIT, "nf4", shape, torch.bfloat16
    yield Case(
        "dequantise nf4 bf16",
        {
            **ours(lambda: dequantise_4bit(q4)),
            ORACLE: lambda: torch_backend("dequantize_4bit", *parts4),
            "bnb C++": lambda: cpu_library("dequantize_4bit", *parts4),
        },
        lambda out: (out,),
    )


def four_bit_quantise(x: Tensor, kind: str) -> Case:
    """Quantising to NF4 or FP4, of which bitsandbytes has one CPU implementation."""
    arguments = x, BLOCK_SIZE_4BIT, kind, torch.uint8
    return Case(
        f"quantise {kind} bf16",
        {
            **ours(lambda: quantise_4bit(x, BLOCK_SIZE_4BIT, kind)),
            ORACLE: lambda: torch_backend("quantize_4bit", *arguments),
        },
        codes_and_absmax,
    )


def ours(run: Run) -> dict[str, Run]:
    """An op of this package on each set of kernels there is."""

    def on(kernels: Kernels) -> Run:
        def call() -> object:
            register_kernels("cpu", kernels)
            return run()

        return call

    sets = {"fdk C++": INSTALLED_KERNELS, "fdk torch": TORCH_KERNELS}
    if INSTALLED_KERNELS is TORCH_KERNELS:
        del sets["fdk C++"]
    return {name: on(kernels) for name, kernels in sets.items()}


def torch_backend(name: str, *arguments: object) -> object:
    """An op of bitsandbytes on its torch backend."""
    return getattr(torch.ops.bitsandbytes, name).default.redispatch(TORCH_BACKEND, *arguments)


def cpu_library(name: str, *arguments: object) -> object:
    """An op of bitsandbytes as it runs on a CPU tensor."""
    return getattr(torch.ops.bitsandbytes, name).default(*arguments)


def codes_and_absmax(answer: object) -> tuple[Tensor, ...]:
    """The tensors of a ``QuantisedBlocks``, or bitsandbytes' pair of them."""
    if isinstance(answer, QuantisedBlocks):
        return answer.packed, answer.absmax
    return answer


def rows_of(shape: str, case: Case, seconds: float) -> Iterator[BlockwiseRow]:
    """Checks every contender, then times them in turns: a row for each."""
    wanted = case.answer(case.contenders[ORACLE]())
    coarse = {name: check(case, name, wanted) for name in case.contenders}
    result_bytes = sum(tensor.nbytes for tensor in wanted)
    del wanted
    memory = {name: peak_memory(run) for name, run in case.contenders.items()}
    turns = turns_of(case.contenders, seconds)
    rows, columns = (int(size) for size in shape.split("x"))
    for name, series in turns.items():
        timing = summarise([call for turn in series for call in counted(turn)], "calls")
        values = BlockwiseValues(
            time=timing.median,
            time_min=timing.minimum,
            spread=timing.spread,
            samples=timing.samples,
            result_bytes=result_bytes,
            memory=memory[name],
            coarse=coarse[name],
            time_first=statistics.median(turn[0] for turn in series),
        )
        yield Row(BlockwiseCase(case.name, rows, columns, name), values)


def turns_of(contenders: Mapping[str, Run], seconds: float) -> dict[str, list[list[float]]]:
    """Seconds of all calls of each contender, turn by turn."""
    turns: dict[str, list[list[float]]] = {name: [] for name in contenders}
    left, order = set(contenders), random.Random(0)
    while left:
        for name in order.sample(sorted(left), len(left)):
            turns[name].append(turn_of(contenders[name]))
        for name in list(left):
            calls = [call for turn in turns[name] for call in counted(turn)]
            if len(turns[name]) >= FEWEST_TURNS and (
                sum(calls) >= seconds or len(calls) >= MOST_CALLS
            ):
                left.remove(name)
    return turns


def turn_of(run: Run) -> list[float]:
    """Seconds of the calls of a turn, two at least."""
    series: list[float] = []
    while len(series) < 2 or (
        len(series) < SETTLING_CALLS + CALLS_PER_TURN and sum(series) < TURN_SECONDS
    ):
        start = time.perf_counter()
        run()
        series.append(time.perf_counter() - start)
    return series


def counted(turn: list[float]) -> list[float]:
    """Those that count: not the first half, of short ones the first four.

    A result that was freed seconds ago is memory that the host may have taken back: the first call
    finds it untouched (28672x8192 dequantised to float32: 933 ms, the next ones 100).
    """
    return turn[min(SETTLING_CALLS, len(turn) // 2) :]


def check(case: Case, name: str, wanted: tuple[Tensor, ...]) -> float:
    """Compares an answer with the oracle's; the share that is different by nature.

    Raises:
        SystemExit: for a wrong answer.
    """
    if name == ORACLE:
        return 0.0
    got = case.answer(case.contenders[name]())
    share = [(one != other).float().mean().item() for one, other in zip(got, wanted, strict=True)]
    coarse = name == "bnb C++" and case.name.startswith("quantise 8-bit")
    if coarse and share[0] < COARSE_SHARE and share[1] == 0:
        return share[0]
    if any(share):
        raise SystemExit(f"{case.name}: {name} is wrong in {share} of its elements; not timed")
    return 0.0


def peak_memory(run: Run) -> int | None:
    """Bytes that the process grows by during one call; None where the system does not tell."""
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls freed must not serve this one unseen
    reset.write_text("5")
    before = status_kib("VmRSS")
    run()
    return (status_kib("VmHWM") - before) * 1024


def status_kib(name: str) -> int:
    """A line of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
