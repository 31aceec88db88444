"""Times the Marlin kernels against the number of rows of x, on Hopper, and draws it.

    python packages/fdk-cuda/benchmarks/marlin_rows.py time rows.jsonl [--heat 3]
    python packages/fdk-cuda/benchmarks/marlin_rows.py draw rows.jsonl rows.svg

`time` replays graphs of all numbers of rows in turns, so that heat and clocks fall on all alike,
and says where more rows take over 5 % less time than fewer do. Each is checked first. `--heat` runs
cuBLAS for so many seconds before each series. Each round of turns has an order of chance: what ran
before a graph decides how hot it finds the chip.
"""

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
from _rows import write_rows
from _tables import read_rows
from marlin import COLD_BYTES, graph_times, hopper_run, random_weight, small_run

from fdk_bench.chart_parts import save_figure
from fdk_cuda.marlin import MARLIN_LUT, MarlinLayout
from fdk_cuda.marlin.ops import small_m_limit
from fdk_formats.testing import nrmse

SHAPES = "4096x4096,8192x8192,28672x8192"
# Every number from which a plan may take another tile, and what lies before and between.
MS = (1, 2, 4, 8, 12, *(m for last in range(16, 512, 16) for m in (last, last + 1)), 512)
# The shortest graph takes about so long: its launch is then in the order of 1 %.
GRAPH_MICROSECONDS, REPLAYS = 1200, 25
TOLERANCE = 1.05


def heat(seconds: float) -> None:
    """Products of cuBLAS for so long."""
    a = torch.randn(8192, 8192, device="cuda").to(torch.bfloat16)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(20):
            torch.mm(a, a)
        torch.cuda.synchronize()


def time_rows(n: int, k: int, bits: int, seconds: float) -> dict[str, Any]:
    """Microseconds by number of rows, on a chip heated for so many seconds."""
    q = random_weight(bits, n, k)
    layout = MARLIN_LUT.pack(q, dtype=torch.bfloat16)
    assert isinstance(layout, MarlinLayout)
    copies = COLD_BYTES // layout.packed.nbytes + 2
    packed = [layout.packed.clone() for _ in range(min(400, copies))]
    W_hat = q.dequantise(torch.float32)
    few = small_m_limit(str(layout.format), n, k, 0)
    runs = []
    for m in MS:
        x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
        run = (small_run if m <= few else hopper_run)(layout, packed, x, overlap=True)
        error = nrmse(run(0), x.float() @ W_hat.T)
        if not error < 4e-3:
            raise SystemExit(f"wrong answer, not timed: n{n} k{k} b{bits} m{m}: {error:.2e}")
        runs.append(run)
    shortest = 3 + 8 * n * k / 8192**2  # microseconds, about
    heat(seconds)
    count = int(GRAPH_MICROSECONDS / shortest)
    us = graph_times(runs, count, replays=REPLAYS, chance=random.Random(0))
    return {"n": n, "k": k, "bits": bits, "heat": seconds, "m": MS, "us": us}


def steps_down(ms: list[int], times: list[float]) -> list[str]:
    """Where more rows take less time than fewer, by over 5 %."""
    found, longest = [], 0.0
    for m, own in zip(ms, times, strict=True):
        if own * TOLERANCE < longest:
            found.append(f"{m}: {own:.1f} after {longest:.1f}")
        longest = max(longest, own)
    return found


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel for each shape, a line for each width, heated first or not."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
    figure, panels = pyplot.subplots(
        1, len(shapes), figsize=(4.5 * len(shapes), 3.6), layout="constrained", squeeze=False
    )
    for panel, (n, k) in zip(panels[0], shapes, strict=True):
        for row in rows:
            if (row["n"], row["k"]) == (n, k):
                name = f"{row['bits']} bit{'s' * (row['bits'] > 1)}{', heated' * (row['heat'] > 0)}"
                panel.plot(row["m"], row["us"], marker=".", markersize=3, lw=1, label=name)
        panel.set(title=f"{n} x {k}", xlabel="rows of x", ylabel="us", ylim=(0, None))
        panel.legend(frameon=False)
    save_figure(figure, path)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("time", "draw"))
    parser.add_argument("rows", type=Path, help="JSONL: written by time, read by draw")
    parser.add_argument("figure", type=Path, nargs="?", help="of draw")
    parser.add_argument("--bits", default="1,4")
    parser.add_argument("--shapes", default=SHAPES, help="n x k of the weights")
    parser.add_argument("--heat", type=float, default=0.0, help="seconds before each series")
    args = parser.parse_args()
    if args.what == "draw":
        if args.figure is None:
            parser.error("draw needs a figure to write")
        draw(read_rows(args.rows), args.figure)
        return
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("not run: needs a GPU of compute capability 9.x")
        return
    rows = (
        time_rows(*map(int, shape.split("x")), bits, args.heat)
        for shape in args.shapes.split(",")
        for bits in map(int, args.bits.split(","))
    )
    write_rows(args.rows, rows, line_of)


def line_of(row: dict[str, Any]) -> str:
    """A row as text: where more rows of x take less time."""
    down = "; ".join(steps_down(row["m"], row["us"])) or "monotone within 5 %"
    return f"{row['n']}x{row['k']} b{row['bits']}: {down}"


if __name__ == "__main__":
    main()
