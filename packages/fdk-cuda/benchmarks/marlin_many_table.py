"""Makes the table of many rows of docs/kernels/marlin.md from the rows that marlin_many.py writes.

    python packages/fdk-cuda/benchmarks/marlin_many_table.py rows.jsonl [--fill F]

The rows are docs/results/h200/marlin-many.jsonl; with --fill the table goes between the marks of a
document, and tests/test_marlin_table.py holds the document to it.
"""

import statistics
from typing import Any

from _tables import Row, filled, main, markdown, paragraph

OTHERS = ("unfused", "triton")


def table(rows: list[Row]) -> str:
    """A line for each shape and number of rows, a column for each width; below, the slower cases.

    cuBLAS ran beside every width: its median.
    """
    widths = sorted({row["bits"] for row in rows})
    cases: dict[tuple[int, int, int], dict[int, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["n"], row["k"], row["m"]), {})[row["bits"]] = row
    headings = ("n x k", "m", "cuBLAS bf16", *(f"{b} bit{'s' * (b > 1)}" for b in widths))
    lines: list[tuple[str, ...]] = [headings, ("---",) * len(headings)]
    for (n, k, m), of in sorted(cases.items()):
        times = (cell(of[bits]) if bits in of else "-" for bits in widths)
        cublas = statistics.median(row["cublas"] for row in of.values())
        lines.append((f"{n} x {k}", str(m), us(cublas), *times))
    return f"{markdown(lines)}\n{summary(rows)}\n"


def us(time: float) -> str:
    """Microseconds to four digits or a tenth."""
    return f"{time:.0f}" if time >= 1000 else f"{time:.1f}"


def ratio(row: Row) -> float:
    """The op's time over that of the faster of the others."""
    return float(row["marlin"] / min(row[name] for name in OTHERS if name in row))


def cell(row: Row) -> str:
    """The op's time, and over the others'."""
    return f"{us(row['marlin'])} ({ratio(row):.2f})"


def summary(rows: list[Row]) -> str:
    """How many cases there are, which were slower than the others, and of which commits."""
    slower = [
        f"{row['n']} x {row['k']} {row['bits']}b m{row['m']} {ratio(row):.3f}"
        for row in rows
        if ratio(row) > 1
    ]
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    days = ", ".join(sorted({row["started"][:10] for row in rows}))
    most = max(map(ratio, rows))
    return paragraph(
        f"Of {len(rows)} cases {len(slower)} took longer than the faster of the two, {most:.3f} of "
        f"its time at most: {', '.join(slower) or 'none'}. {days}, commit {commits}."
    )


def fill(text: str, rows: list[Row]) -> str:
    """A document with the table between its marks."""
    return filled(text, "marlin many", table(rows))


if __name__ == "__main__":
    main(__doc__, "marlin many", "marlin_many.py", table)
