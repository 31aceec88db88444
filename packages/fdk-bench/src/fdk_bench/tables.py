"""Tables of results: for the terminal (rich) and as Markdown."""

from collections.abc import Sequence

from rich.table import Table

from fdk_bench.accuracy import AccuracyRow, AccuracyValues, Comparison

HEADINGS = ("format", "bits/weight", "file MB", "weight error", "cosine mean", "min", "seconds")


def accuracy_table(rows: Sequence[AccuracyRow]) -> Table:
    """One line per format; a line between widths; the error in place of a failed row's values."""
    table = Table(caption=_caption(rows), caption_justify="left", title_justify="left")
    table.add_column(HEADINGS[0], no_wrap=True, min_width=18)
    for heading in HEADINGS[1:]:
        # Two lines each, so that the table fits 80 columns.
        heading = heading.replace("/", "/ ").replace(" ", "\n")
        table.add_column(heading, justify="right", no_wrap=True, min_width=6)
    width = None
    for row in rows:
        if row.values is None:
            continue
        if width not in (None, int(row.values.bits_per_weight)):
            table.add_section()
        width = int(row.values.bits_per_weight)
        table.add_row(row.case.format, *_cells(row.values))
    return table


def accuracy_markdown(rows: Sequence[AccuracyRow]) -> str:
    """The same table as Markdown."""
    lines = [HEADINGS, ("---", *("---:" for _ in HEADINGS[1:]))]
    for row in rows:
        if row.values is not None:
            lines.append((f"`{row.case.format}`", *_cells(row.values)))
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{table}\n{_caption(rows)}\n"


def comparison_lines(comparisons: Sequence[Comparison]) -> list[str]:
    """Whether k-means beat the uniform grid, with the numbers that say so."""
    if not comparisons:
        return [
            "k-means was not compared with the uniform grid: that takes kmeans and uniform rows "
            "of 2, 3 or 4 bits that differ in nothing else."
        ]
    lost = [c.kmeans for c in comparisons if not c.holds]
    verdict = f"does NOT beat it with {', '.join(lost)}" if lost else "beats it in every pair"
    lines = [f"k-means against the best uniform grid, weight error: {verdict}."]
    for c in comparisons:
        change = 100 * (c.kmeans_error / c.uniform_error - 1)
        lines.append(
            f"  {c.bits} bits: {c.kmeans} {c.kmeans_error:.4f}, "
            f"{c.uniform} {c.uniform_error:.4f} ({change:+.1f} %)"
        )
    return lines


def _cells(values: AccuracyValues) -> tuple[str, ...]:
    return (
        f"{values.bits_per_weight:.3f}",
        f"{values.file_bytes / 1e6:.2f}",
        f"{values.weight_error:.4f}",
        f"{values.cosine_mean:.5f}",
        f"{values.cosine_min:.5f}",
        f"{values.seconds:.1f}",
    )


def _caption(rows: Sequence[AccuracyRow]) -> str:
    row = next((row for row in rows if row.values is not None), None)
    if row is None or row.values is None:
        return "No format was measured."
    values = row.values
    return (
        f"{row.case.model}: {values.layers} linear layers, {values.weights / 1e6:.2f} million "
        f"weights; cosine of the embeddings of {row.case.sentences} sentences."
    )
