"""Makes the table of docs/kernels/marlin.md from the rows that marlin.py writes.

    python packages/fdk-cuda/benchmarks/marlin_table.py docs/results/h200/marlin.jsonl [--fill F]

With --fill it goes between the marks of a document; tests/test_marlin_table.py holds the document
to it.
"""

from typing import Any

from _tables import Row, filled, goals_met, main, markdown

HEADINGS = (
    *("n x k", "bits", "m", "floor", "PDL", "plain", "floor / PDL", "goal", "PDL / goal"),
    *("affine PDL", "/ codebook", "/ goal"),
)
# Rows of x up to which a goal counts as this kernel's.
FEW_ROWS = 16


def table(rows: list[Row]) -> str:
    """A line for each case: codebook, then affine beside it; below, how many meet their goals."""
    by_kind: dict[str, dict[tuple[int, ...], dict[str, Any]]] = {"codebook": {}, "affine": {}}
    for row in rows:
        by_kind[row["kind"]][row["n"], row["k"], row["bits"], row["m"]] = row
    lines = [HEADINGS, ("---",) * len(HEADINGS)]
    for key, row in by_kind["codebook"].items():
        lines.append((f"{row['n']} x {row['k']}", *cells(row, by_kind["affine"].get(key))))
    return f"{markdown(lines)}\n{counts(by_kind)}\n{run_of(rows)}\n"


def cells(row: dict[str, Any], affine: dict[str, Any] | None) -> tuple[str, ...]:
    """What follows the shape."""
    pdl, goal = row["pdl"], row["goal"]
    share = f"{100 * row['floor'] / pdl:.0f} %"
    other = ("-", "-", "-")
    if affine is not None:
        ratio = f"{affine['pdl'] / pdl:.2f}"
        other = (f"{affine['pdl']:.2f}", ratio, of_goal(affine["pdl"], goal))
    return (
        *(str(row["bits"]), str(row["m"])),
        *(f"{row[name]:.2f}" for name in ("floor", "pdl", "plain")),
        *(share, "-" if goal is None else f"{goal:.1f}", of_goal(pdl, goal), *other),
    )


def of_goal(time: float, goal: float | None) -> str:
    """A time over its goal."""
    return "-" if goal is None else f"{time / goal:.2f}"


def counts(by_kind: dict[str, dict[tuple[int, ...], dict[str, Any]]]) -> str:
    """How many goals are met, by kind and number of rows."""
    lines = []
    for kind, rows in by_kind.items():
        for few in (True, False):
            ratios = [
                row["pdl"] / row["goal"]
                for row in rows.values()
                if row["goal"] is not None and (row["m"] <= FEW_ROWS) == few
            ]
            if ratios:
                what = f"m {'<=' if few else '>'} {FEW_ROWS}, {kind}"
                lines.append(f"{what}: {goals_met(ratios)}\n")
    return "\n".join(lines)


def run_of(rows: list[Row]) -> str:
    """Of which run, and what cuBLAS took in it by shape: how the chip was."""
    (told,) = {(row["device"], row["started"][:10], row["commit"]) for row in rows}
    times: dict[str, list[float]] = {}
    for row in rows:
        if row["m"] <= FEW_ROWS:
            times.setdefault(f"{row['n']} x {row['k']}", []).append(row["cublas"])
    parts = [f"{shape} {min(own):.1f} to {max(own):.1f}" for shape, own in times.items()]
    device, day, commit = told
    return f"One run, {device}, {day}, commit {commit}; cuBLAS, bf16, m <= 16: {', '.join(parts)}."


def fill(text: str, rows: list[Row]) -> str:
    """A document with the table between its marks."""
    return filled(text, "marlin", table(rows))


if __name__ == "__main__":
    main(__doc__, "marlin", "marlin.py", table)
