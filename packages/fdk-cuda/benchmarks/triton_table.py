"""Makes the table of docs/kernels/triton.md from the rows that triton_record.py writes.

    python packages/fdk-cuda/benchmarks/triton_table.py docs/results/h200/triton.jsonl [--fill F]

With --fill it goes between the marks of a document.
"""

from collections import Counter
from typing import Any

from _tables import Row, filled, main, markdown

HEADINGS = (
    *("n x k", "bits", "kind", "m", "floor", "cuBLAS", "y", "/ floor", "/ m = 1", "/ cuBLAS", "by"),
    *("dy: cuBLAS", "dy", "/ y", "by"),
)
Case = tuple[Any, ...]


def table(rows: list[Row]) -> str:
    """A line for each case: the product, and its gradient where it was timed."""
    of = {(*case_of(row), row["direction"]): row for row in rows}
    lines = [HEADINGS, ("---",) * len(HEADINGS)]
    for row in sorted((r for r in rows if r["direction"] == "y"), key=case_of):
        n, k, bits, kind, m = case = case_of(row)
        one = of.get((n, k, bits, kind, 1, "y"))
        us = row["us"]
        cells = [f"{n} x {k}", str(bits), kind, str(m), f"{row['floor']:.1f}"]
        cells += [f"{row['cublas']:.1f}", f"{us:.1f}", f"{us / row['floor']:.2f}"]
        cells += ["-" if one is None else f"{us / one['us']:.2f}", f"{us / row['cublas']:.2f}"]
        dy = of.get((*case, "dy"))
        cells += [row["by"], *("-", "-", "-", "-")]
        if dy is not None:
            cells[-4:] = [
                f"{dy['cublas']:.1f}",
                f"{dy['us']:.1f}",
                f"{dy['us'] / us:.2f}",
                dy["by"],
            ]
        lines.append(tuple(cells))
    return f"{markdown(lines)}\n{counts(of)}\n{run_of(rows)}\n"


def case_of(row: dict[str, Any]) -> Case:
    """By which rows are sorted."""
    return row["n"], row["k"], row["bits"], row["kind"], row["m"]


def counts(of: dict[Case, dict[str, Any]]) -> str:
    """How often what issue 4 wants of codebooks and affine formats is met."""

    def met(what: str, limit: float, ratios: list[float]) -> str:
        share = sum(ratio <= limit for ratio in ratios)
        return f"- {what}: {share} of {len(ratios)}, the largest {max(ratios):.2f}.\n"

    y = [row for key, row in of.items() if key[-1] == "y"]
    ones = {case_of(row)[:4]: row["us"] for row in y if row["m"] == 1}
    large = [row for row in y if row["n"] * row["k"] >= 1 << 26]
    gradients = [(row, of[(*key[:-1], "y")]) for key, row in of.items() if key[-1] == "dy"]
    lists = (
        ("m = 1 within 2.2 of the floor at 1 to 3 bits, 8192 x 8192 and larger", 2.2, [
            row["us"] / row["floor"] for row in large if row["m"] == 1 and row["bits"] <= 3
        ]),
        ("m = 1 within 1.6 of the floor at 4 and 8 bits, 8192 x 8192 and larger", 1.6, [
            row["us"] / row["floor"] for row in large if row["m"] == 1 and row["bits"] in (4, 8)
        ]),
        ("m = 16 within 1.3 of m = 1", 1.3, [
            row["us"] / ones[case_of(row)[:4]] for row in y if row["m"] == 16
        ]),
        ("m = 64 no slower than cuBLAS", 1, [
            row["us"] / row["cublas"] for row in y if row["m"] == 64
        ]),
        ("m = 256 within 1.1 of cuBLAS", 1.1, [
            row["us"] / row["cublas"] for row in y if row["m"] == 256
        ]),
        ("m = 1024 at 0.8 of cuBLAS's speed or more", 1.25, [
            row["us"] / row["cublas"] for row in y if row["m"] == 1024
        ]),
        ("dy @ W_hat within 1.2 of the product", 1.2, [
            row["us"] / other["us"] for row, other in gradients
        ]),
        ("y no later than cuBLAS by more than a dequantisation, where that was timed", 1, [
            row["us"] / ways["dequantise"] for row in y if "dequantise" in (ways := ways_of(row))
        ]),
        ("chosen within 1.03 of the fastest of several ways", 1.03, [
            row["us"] / min(ways_of(row).values()) for row in of.values() if row.get("others")
        ]),
    )  # fmt: skip
    return "".join(met(*one) for one in lists if one[2])


def ways_of(row: Row) -> dict[str, float]:
    """Microseconds of what was chosen and of what else would take it, in turns."""
    return {row["by"]: row["us"]} | row.get("others", {})


def run_of(rows: list[Row]) -> str:
    """Of which run, or of which, where one went on with another."""
    versions = f"torch {rows[0]['versions']['torch']}, triton {rows[0]['triton']}"
    runs = Counter((r["device"], r["started"][:10], r["commit"], r["command"]) for r in rows)
    if len(runs) == 1:
        (((device, day, commit, command), _),) = runs.items()
        return f"One run, {device}, {day}, {versions}, commit {commit}:\n`{command}`."
    return "\n".join(
        f"- {count} of {len(rows)} rows: {device}, {day}, {versions}, commit {commit}: `{command}`."
        for (device, day, commit, command), count in sorted(runs.items())
    )


def fill(text: str, rows: list[Row]) -> str:
    """A document with the table between its marks."""
    return filled(text, "triton", table(rows))


if __name__ == "__main__":
    main(__doc__, "triton", "triton_record.py", table)
