"""Makes the table of docs/kernels/marlin.md from the rows that marlin.py writes.

    python packages/fdk-cuda/benchmarks/marlin_table.py docs/results/h200/marlin.jsonl [--fill F]

With --fill it goes between the marks of a document; tests/test_marlin_table.py holds the document
to it.
"""

import statistics
from typing import Any

from _tables import Row, filled, goals_met, least_to_most, main, markdown, over_goals, paragraph

HEADINGS = (
    *("n x k", "bits", "m", "floor", "PDL", "plain", "floor / PDL", "goal", "PDL / goal"),
    *("affine PDL", "/ codebook", "/ goal"),
)
# Rows of x up to which a goal counts as this kernel's.
FEW_ROWS = 16
KINDS = ("codebook", "affine")
Cases = dict[tuple[int, ...], dict[str, Any]]  # by n, k, bits, m
# What is bound alike, as the document tells it, by bits and rows of x.
CLASSES = {
    "8 bits, m <= 4": ((8,), (1, 4)),
    "4 bits, m <= 4": ((4,), (1, 4)),
    "3 bits, m <= 4": ((3,), (1, 4)),
    "2 bits, m <= 4": ((2,), (1, 4)),
    "1 bit, m = 1": ((1,), (1,)),
    "1 bit, m = 4": ((1,), (4,)),
    "1 and 2 bits, m = 16": ((1, 2), (16,)),
    "3 and 4 bits, m = 16": ((3, 4), (16,)),
    "8 bits, m = 16": ((8,), (16,)),
    "m = 64": ((1, 2, 3, 4, 8), (64,)),
}
CLASS_HEADINGS = ("class", "weights", "time / goal", "met", "over", "over its goal, by name")


def table(rows: list[Row]) -> str:
    """A line for each case: codebook, then affine beside it; below, how many meet their goals."""
    by_kind: dict[str, Cases] = {kind: {} for kind in KINDS}
    for row in rows:
        by_kind[row["kind"]][row["n"], row["k"], row["bits"], row["m"]] = row
    lines = [HEADINGS, ("---",) * len(HEADINGS)]
    for key, row in by_kind["codebook"].items():
        lines.append((f"{row['n']} x {row['k']}", *cells(row, by_kind["affine"].get(key))))
    parts = markdown(lines), counts(by_kind), by_class(by_kind), beside_codebook(by_kind)
    return "\n".join((*parts, f"{run_of(rows)}\n"))


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


def counts(by_kind: dict[str, Cases]) -> str:
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


def by_class(by_kind: dict[str, Cases]) -> str:
    """For each class, and kind of weight, the cases that are over their goals; those nearly met in
    brackets.
    """
    lines: list[tuple[str, ...]] = [CLASS_HEADINGS, ("---",) * len(CLASS_HEADINGS)]
    for name, (bits, ms) in CLASSES.items():
        for kind in KINDS:
            ratios = {
                key: row["pdl"] / row["goal"]
                for key, row in sorted(by_kind[kind].items())
                if row["goal"] is not None and key[2] in bits and key[3] in ms
            }
            if ratios:
                met = sum(ratio <= 1 for ratio in ratios.values())
                counted = f"{met} of {len(ratios)}", str(len(ratios) - met)
                span = least_to_most(ratios.values())
                lines.append((name, kind, span, *counted, over_goals(ratios)))
    return markdown(lines)


def beside_codebook(by_kind: dict[str, Cases]) -> str:
    """Affine times over those of codebooks, and which are the same or better."""
    ratios = {
        key: row["pdl"] / by_kind["codebook"][key]["pdl"]
        for key, row in sorted(by_kind["affine"].items())
        if key in by_kind["codebook"]
    }
    if not ratios:
        return ""
    parts = []
    for what, ms in (("m <= 4", (1, 4)), ("m = 16", (16,)), ("m = 64", (64,))):
        if own := [ratio for key, ratio in ratios.items() if key[3] in ms]:
            low, middle, high = min(own), statistics.median(own), max(own)
            parts.append(f"{what}: {low:.2f} to {high:.2f}, in the middle {middle:.2f}")
    better = [f"{n} x {k} {b}b m{m}" for (n, k, b, m), ratio in ratios.items() if ratio <= 1]
    told = f"the same or better in {len(better)} of {len(ratios)} cases"
    named = ", ".join(better) or "none"
    return paragraph(f"Affine over codebook, {'; '.join(parts)}; {told}: {named}.") + "\n"


def run_of(rows: list[Row]) -> str:
    """Of which run, and what cuBLAS took in it by shape: how the chip was."""
    ((device, day, commit),) = {(r["device"], r["started"][:10], r["commit"]) for r in rows}
    times: dict[str, list[float]] = {}
    for row in rows:
        if row["m"] <= FEW_ROWS:
            times.setdefault(f"{row['n']} x {row['k']}", []).append(row["cublas"])
    parts = [f"{shape} {min(own):.1f} to {max(own):.1f}" for shape, own in times.items()]
    runs = len({row["started"] for row in rows})
    told = "One run" if runs == 1 else f"{runs} processes one after the other"
    run = f"{told}, {device}, {day}, commit {commit}"
    return paragraph(f"{run}; cuBLAS, bf16, m <= 16: {', '.join(parts)}.")


def fill(text: str, rows: list[Row]) -> str:
    """A document with the table between its marks."""
    return filled(text, "marlin", table(rows))


if __name__ == "__main__":
    main(__doc__, "marlin", "marlin.py", table)
