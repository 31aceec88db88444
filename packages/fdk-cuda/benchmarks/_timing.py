"""CUDA-graph timing, the time floor of an H200, and result rows as text and JSON lines."""

import argparse
import bisect
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fdk_cuda import __version__

Row = dict[str, Any]
Run = Callable[[int], Tensor]  # call i of a series, each on another copy of the weight
# Copies of a weight hold this much together: more than five times the L2 of an H200.
COLD_BYTES = 256 << 20
MAX_COPIES = 400
REPLAYS, WARM_REPLAYS = 15, 2
# Time to read a number of MiB once, in microseconds (H200).
READ_MIB = (0, 1, 2, 4, 8, 16, 32, 64, 128)
READ_TIME = (2.06, 2.36, 2.66, 3.03, 3.91, 5.67, 9.23, 16.6, 31.2)
# cuBLAS, bf16 (H200).
FLOPS_PER_MICROSECOND = 793e6


def product_floor(m: int, n: int, k: int, nbytes: int) -> float:
    """Return the larger of the times to read ``nbytes`` and to do the arithmetic, microseconds."""
    return max(read_floor(nbytes), 2 * m * n * k / FLOPS_PER_MICROSECOND)


def read_floor(nbytes: int) -> float:
    """Interpolate the time to read ``nbytes`` once, in microseconds."""
    mib = nbytes / (1 << 20)
    i = min(max(1, bisect.bisect_left(READ_MIB, mib)), len(READ_MIB) - 1)
    share = (mib - READ_MIB[i - 1]) / (READ_MIB[i] - READ_MIB[i - 1])
    return READ_TIME[i - 1] + share * (READ_TIME[i] - READ_TIME[i - 1])


def copies(tensor: Tensor, *, most: int = MAX_COPIES) -> list[Tensor]:
    """Clone a tensor until the copies together exceed the L2."""
    return [tensor.clone() for _ in range(min(most, COLD_BYTES // tensor.nbytes + 2))]


def graph_times(runs: list[Run], count: int, *, replays: int = REPLAYS) -> list[float]:
    """Return the median microseconds per call of each run.

    Each run is captured ``count`` times in a CUDA graph. The graphs are replayed in turns, and each
    round starts with the next one, so that clocks and heat affect all of them equally.
    """
    graphs = []
    for run in runs:
        run(0)
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for i in range(count):
                run(i)
    samples: list[list[float]] = [[] for _ in graphs]
    for replay in range(WARM_REPLAYS + replays):
        for step in range(len(graphs)):
            own = (replay + step) % len(graphs)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            graphs[own].replay()
            end.record()
            end.synchronize()
            samples[own].append(start.elapsed_time(end) * 1000 / count)
    return [statistics.median(series[WARM_REPLAYS:]) for series in samples]


def heat(seconds: float) -> None:
    """Run cuBLAS for ``seconds``, so that the clocks settle as they do under load."""
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(20):
            torch.mm(a, a)
        torch.cuda.synchronize()


def check(y: Tensor, oracle: Tensor, case: str, *, limit: float = 4e-3) -> None:
    """Exit unless the error relative to the float64 oracle is below ``limit``."""
    error = float((y.double() - oracle).norm() / oracle.norm())
    if not error < limit:
        raise SystemExit(f"wrong answer, not timed: {case}: error {error:.2e}")


def integers(text: str) -> list[int]:
    """Parse ``1,4,16``."""
    return [int(part) for part in text.split(",")]


def shapes(text: str) -> list[tuple[int, int]]:
    """Parse ``4096x4096,8192x8192``: n and k of each weight."""
    return [(int(n), int(k)) for n, k in (part.split("x") for part in text.split(","))]


def argument_parser(module_doc: str) -> argparse.ArgumentParser:
    """Make a parser with the module's documentation and ``--out``."""
    parser = argparse.ArgumentParser(
        description=module_doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the rows to this file, as JSON lines")
    return parser


def has_gpu(*, hopper: bool = False) -> bool:
    """Return whether the GPU that a script needs is present; otherwise print why not."""
    if not torch.cuda.is_available():
        print("not run: needs an NVIDIA GPU, torch finds none on this machine")
        return False
    if hopper and torch.cuda.get_device_capability()[0] != 9:
        print("not run: needs a GPU of compute capability 9.x")
        return False
    return True


def write_rows(out: Path | None, rows: Iterable[Row], line_of: Callable[[Row], str]) -> None:
    """Print rows as they come; with ``out``, write them to that file with facts about the run."""
    facts = run_facts()
    with out.open("w") if out else nullcontext() as file:
        for row in rows:
            print(line_of(row), flush=True)
            if file is not None:
                file.write(json.dumps(row | facts) + "\n")
                file.flush()


def run_facts() -> Row:
    """Return device, versions, commit, start time and command."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    # Only the last part of an absolute path: where a machine keeps its files is private.
    command = (Path(a).name if Path(a).is_absolute() else a for a in sys.argv)
    versions = {"torch": torch.__version__, "fdk_cuda": __version__}
    return {
        "device": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), **versions},
        "commit": commit or None,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
    }
