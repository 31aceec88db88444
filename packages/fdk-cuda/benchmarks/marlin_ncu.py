"""What bounds the kernels for few rows: Nsight Compute of one launch of each, and a table of it.

    ncu --profile-from-start off --clock-control none --csv --page raw \\
        --section SpeedOfLight --section WarpStateStats --section ComputeWorkloadAnalysis \\
        --section MemoryWorkloadAnalysis_Tables --section InstructionStats --section LaunchStats \\
        python packages/fdk-cuda/benchmarks/marlin_ncu.py > kernels.csv
    python packages/fdk-cuda/benchmarks/marlin_ncu.py --table kernels.csv

Kernels run without programmatic dependent launch and with a cold L2, which ncu sees to. Shares are
of the time, those of issue slots, ALU and tensor cores of a processor's active cycles; stalls are
the cycles that a warp waits between two of its instructions, by reason.
"""

import argparse
import csv
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from _tables import markdown
from marlin import hopper_run, random_weight, small_run

from fdk_cuda.marlin import MARLIN, MARLIN_LUT, MarlinLayout
from fdk_cuda.marlin.ops import small_m_limit

LARGE, LONG = (28672, 8192), (4096, 14336)
# Kind, bits, m and shape.
CASES = (
    *(("codebook", 1, 1, LARGE), ("affine", 1, 1, LARGE), ("codebook", 2, 1, LARGE)),
    *(("codebook", bits, 1, LARGE) for bits in (3, 4)),
    *(("codebook", 1, 4, LARGE), ("codebook", 1, 4, LONG)),
    *(("codebook", bits, 16, LARGE) for bits in (1, 2, 3, 4, 8)),
)
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
ELAPSED, ACTIVE = "avg.pct_of_peak_sustained_elapsed", "avg.pct_of_peak_sustained_active"
# Lines of the table: a metric, what it is multiplied with, digits.
LINES: dict[str, tuple[str, float, int]] = {
    "memory, %": (f"dram__cycles_active.{ELAPSED}", 1, 0),
    "L2, %": (f"lts__throughput.{ELAPSED}", 1, 0),
    "issue slots, %": ("smsp__issue_active.avg.per_cycle_active", 100, 0),
    "L1 and shared memory, %": (f"l1tex__data_pipe_lsu_wavefronts.{ELAPSED}", 1, 0),
    "of it shared memory, %": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed",
        1,
        0,
    ),
    "ALU (logic, shifts, permutes), %": (f"sm__pipe_alu_cycles_active.{ACTIVE}", 1, 0),
    "tensor cores, %": (f"sm__pipe_tensor_cycles_active.{ACTIVE}", 1, 0),
    "registers of a thread": ("launch__registers_per_thread", 1, 0),
    "cycles between a warp's instructions": (
        "smsp__average_warp_latency_per_inst_issued.ratio",
        1,
        1,
    ),
    "of them fixed latency": (STALL.format("wait"), 1, 1),
    "loads of x, and the copies": (STALL.format("long_scoreboard"), 1, 1),
    "the other warps' turn": (STALL.format("not_selected"), 1, 1),
    "a busy pipe": (STALL.format("math_pipe_throttle"), 1, 1),
    "dispatch": (STALL.format("dispatch_stall"), 1, 1),
    "shared memory's answer": (STALL.format("short_scoreboard"), 1, 1),
    "shared memory's queue": (STALL.format("mio_throttle"), 1, 1),
    "barriers": (STALL.format("barrier"), 1, 1),
    "wgmma": (STALL.format("gmma"), 1, 1),
}


def launch_marked(run: Callable[[], object]) -> None:
    """Once to compile, then once between marks of the profiler."""
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def run_all() -> None:
    """Launches every case once between marks of the profiler."""
    for kind, bits, m, (n, k) in CASES:
        q = random_weight(bits, n, k, affine=kind == "affine")
        layout = (MARLIN if kind == "affine" else MARLIN_LUT).pack(q, dtype=torch.bfloat16)
        assert isinstance(layout, MarlinLayout)
        x = torch.randn(m, k, device="cuda").bfloat16()
        is_few = m <= small_m_limit(str(layout.format), n, k, 0)
        run = (small_run if is_few else hopper_run)(layout, [layout.packed], x, overlap=False)
        launch_marked(partial(run, 0))


def table(text: str) -> str:
    """Markdown of what ncu wrote: a column for each case.

    Raises:
        ValueError: it is not of these cases.
    """
    kernels, times = kernels_of(text, len(CASES), ("split_k_reduce",))
    heads = [head(*case) for case in CASES]
    told: list[list[str]] = [["", *heads], ["---"] * (1 + len(heads))]
    told.append(["kernel", *(kernel["Kernel Name"] for kernel in kernels)])
    told.append(["us", *times])
    instructions = [
        f"{number(kernel, 'smsp__inst_executed.sum') / (n // 32 * k // 64):.0f}"
        for kernel, (_, _, _, (n, k)) in zip(kernels, CASES, strict=True)
    ]
    told.append(["instructions a block of 32 x 64", *instructions])
    return markdown([*told, *counters(kernels)])


def kernels_of(
    text: str, count: int, helpers: Sequence[str]
) -> tuple[list[dict[str, str]], list[str]]:
    """Metrics by name of each kernel in what ncu wrote, without helpers, and its microseconds.

    Raises:
        ValueError: it has not so many kernels.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    names, units, *rows = [*csv.reader(lines[start:])] or [[], []]
    kernels = [dict(zip(names, row, strict=True)) for row in rows]
    kernels = [row for row in kernels if row["Kernel Name"] not in helpers]
    if len(kernels) != count:
        raise ValueError(f"wanted {count} kernels, got {[k['Kernel Name'] for k in kernels]}")
    metric = "gpu__time_duration.sum"
    scale = {"ns": 1e-3, "us": 1.0}[dict(zip(names, units, strict=True))[metric]]
    return kernels, [f"{scale * number(kernel, metric):.1f}" for kernel in kernels]


def counters(kernels: list[dict[str, str]]) -> list[list[str]]:
    """``LINES`` of kernels."""
    return [
        [name, *(f"{factor * number(kernel, metric):.{digits}f}" for kernel in kernels)]
        for name, (metric, factor, digits) in LINES.items()
    ]


def head(kind: str, bits: int, m: int, shape: tuple[int, int]) -> str:
    """A column's; a codebook and the larger shape go without saying."""
    affine = "affine " if kind == "affine" else ""
    where = "" if shape == LARGE else f", {shape[0]} x {shape[1]}"
    return f"{affine}{bits} bit{'s' if bits > 1 else ''}, m = {m}{where}"


def number(kernel: dict[str, str], metric: str) -> float:
    """A metric of a kernel."""
    return float(kernel[metric].replace(",", ""))


def main(description: str, run: Callable[[], None], table: Callable[[str], str]) -> None:
    """Reads the command line of a script: ncu runs it, and it makes a table of what ncu wrote."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--table", type=Path, help="what ncu wrote")
    args = parser.parse_args()
    if args.table is not None:
        print(table(args.table.read_text("utf-8")))
    elif not torch.cuda.is_available():
        print("not run: needs an NVIDIA GPU, torch finds none on this machine")
    else:
        run()


if __name__ == "__main__":
    main(__doc__, run_all, table)
