"""Makes the table by which ``backend="auto"`` chooses on a GPU, from recorded rows.

    python packages/fdk-cuda/benchmarks/auto_table.py docs/results/*/auto.jsonl [--write]

Rows are those of auto_rows.py; ``fdk-bench compare`` writes such rows too. A case counts where
every number of rows in ``MS`` was timed for both of ``BACKENDS``. With --write the table becomes
fdk_cuda/measured.json; tests/test_auto_table.py holds that to the rows.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from _tables import Row, read_rows

from fdk_cuda.measured import DATA, kind_of
from fdk_formats.format import Format

MS = (1, 4, 16, 64)
BACKENDS = ("marlin", "triton")
Key = tuple[str, str, int, int, int]  # GPU, kind, bits, n, k


def table(rows: Iterable[Row]) -> str:
    """The file's text, a line for each case."""
    times: dict[Key, dict[tuple[str, int], float]] = {}
    for row in rows:
        case = row["case"]
        family = case["backend"].removesuffix("-lut")
        if family not in BACKENDS or row["error"] is not None:
            continue
        format = Format.parse(case["format"])
        # ``int`` was timed with one of the two only.
        if format.codebook not in ("custom", "affine"):
            continue
        key = row["device"], kind_of(format), format.bits, case["n"], case["k"]
        times.setdefault(key, {})[family, case["m"]] = 1e6 * row["values"]["time"]
    gpus: dict[str, list[str]] = {}
    for key, found in sorted(times.items()):
        wanted = [(name, m) for name in BACKENDS for m in MS]
        if all(one in found for one in wanted):
            us = {name: [round(found[name, m], 2) for m in MS] for name in BACKENDS}
            gpu, kind, bits, n, k = key
            told: dict[str, Any] = {"kind": kind, "bits": bits, "n": n, "k": k, "us": us}
            gpus.setdefault(gpu, []).append(json.dumps(told))
    separator = ",\n"
    parts = (f"{json.dumps(gpu)}: [\n{separator.join(lines)}\n]" for gpu, lines in gpus.items())
    return f'{{"ms": {list(MS)}, "gpus": {{{separator.join(parts)}}}}}\n'


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, nargs="+", help="JSONL files")
    parser.add_argument("--write", action="store_true", help="into the package")
    args = parser.parse_args()
    text = table(row for path in args.rows for row in read_rows(path))
    if args.write:
        DATA.write_text(text, "utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
