"""Makes the table of the Triton kernels beside their peers, from the rows of fdk-bench compare.

    python packages/fdk-cuda/benchmarks/triton_peers.py docs/results/h200/compare-8192x8192.jsonl

With --fill it goes between the marks of a document; several files make one table. A line is a case
of one run: its floor, the product in 16 bits, the Triton kernels, the peers.
"""

import argparse
from collections import defaultdict
from pathlib import Path

from _tables import Row, markdown, read_rows, show

from fdk_formats.format import Format

# The 16-bit product is torch's.
PEERS = ("humming", "gemlite", "tinygemm", "bitsandbytes", "torch.compile")
HEADINGS = ("n x k", "bits", "m", "floor", "16 bit", "triton", *PEERS)
Case = tuple[int, int, int, int]


def table(rows: list[Row]) -> str:
    """Microseconds, where something was timed; a case has a line where the Triton kernels were."""
    times: dict[Case, dict[str, float]] = defaultdict(dict)
    dense: dict[tuple[int, int, int], float] = {}
    for row in (row for row in rows if row["error"] is None):
        case, values = row["case"], row["values"]
        n, k, m = case["n"], case["k"], case["m"]
        us = values["time"] * 1e6
        if case["format"] == "bf16":
            dense[n, k, m] = us
            continue
        of = times[n, k, Format.parse(case["format"]).bits, m]
        of[case["backend"]] = us
        if case["backend"] == "triton":
            of["floor"] = values["floor"] * 1e6
    lines: list[tuple[str, ...]] = [HEADINGS, ("---",) * len(HEADINGS)]
    for (n, k, bits, m), of in sorted(times.items()):
        if "triton" not in of:
            continue
        all_of = of if (n, k, m) not in dense else of | {"16 bit": dense[n, k, m]}
        cells = (f"{all_of[name]:.1f}" if name in all_of else "-" for name in HEADINGS[3:])
        lines.append((f"{n} x {k}", str(bits), str(m), *cells))
    return f"{markdown(lines)}\n{run_of(rows)}\n"


def run_of(rows: list[Row]) -> str:
    """Of which runs."""
    told = {(row["device"], row["started"][:10], row["commit"][:7]) for row in rows}
    return "Rows of " + "; ".join(f"{d}, {day}, {commit}" for d, day, commit in sorted(told)) + "."


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, nargs="+", help="JSONL, written by fdk-bench compare")
    parser.add_argument("--fill", type=Path, help="a document with marks")
    args = parser.parse_args()
    made = table([row for path in args.rows for row in read_rows(path)])
    show("triton peers", made, args.fill)


if __name__ == "__main__":
    main()
