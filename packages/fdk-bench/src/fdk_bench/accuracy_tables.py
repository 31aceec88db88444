"""Tables of the accuracy benchmark: for the terminal and as Markdown."""

from collections.abc import Sequence

from rich.table import Table

from fdk_bench.accuracy_cases import (
    CALIBRATED,
    AccuracyRow,
    Comparison,
    LayerRow,
)
from fdk_bench.kernel_tables import empty_table, fitting, markdown

HEADINGS = (
    "format",
    "bits/weight",
    "file MB",
    "weight error",
    "output error",
    "cosine mean",
    "min",
    "KL",
    "seconds",
)
# Left out of a terminal that is too narrow, in this order; the Markdown file has them.
SPARE = ("file MB", "min", "seconds", "weight error", "KL", "output error")
LAYER_HEADING = "layer (n x k)"


def accuracy_table(rows: Sequence[AccuracyRow], width: int | None = None) -> Table:
    """One line per format, a rule between widths; without some of ``SPARE`` in a narrow one."""
    lines = [accuracy_cells(row) for row in rows]
    headings, note = fitting(_headings(rows), lines, SPARE, width, _folded)
    caption = f"{_caption(rows).removesuffix('.')}{note}."
    table = empty_table(headings, HEADINGS[:1], caption, _folded)
    bits = None
    for row, cells in zip(rows, lines, strict=True):
        if row.values is None:
            cells |= {headings[-1]: "failed"}
        else:
            if bits not in (None, int(row.values.bits_per_weight)):
                table.add_section()
            bits = int(row.values.bits_per_weight)
        table.add_row(*(cells[heading] for heading in headings))
    return table


def accuracy_markdown(rows: Sequence[AccuracyRow]) -> str:
    """The same table as Markdown."""
    table = markdown(_headings(rows), HEADINGS[:1], map(accuracy_cells, rows))
    return f"{table}\n{_caption(rows)}\n"


def layer_table(rows: Sequence[LayerRow], width: int | None = None) -> Table:
    """The output error of every layer, a line per layer, in every format that there is room for."""
    headings, lines = _by_layer(rows)
    spare = headings[:1:-1]
    shown, note = fitting(headings, lines, spare, width, _folded_format)
    table = empty_table(shown, shown[:1], f"error of each layer's output{note}", _folded_format)
    for cells in lines:
        table.add_row(*(cells[heading] for heading in shown))
    return table


def _folded(heading: str) -> str:
    """On two lines, so that the table fits 80 columns."""
    return heading.replace("/", "/ ").replace(" ", "\n")


def _folded_format(heading: str) -> str:
    """A part of a format's name on each line, so that a few columns fit."""
    return heading if heading == LAYER_HEADING else heading.replace("-", "\n").replace(" ", "\n")


def layer_markdown(rows: Sequence[LayerRow]) -> str:
    """The same table as Markdown, and that of weight errors."""
    parts = []
    for title, which in (("Output error", "output_error"), ("Weight error", "weight_error")):
        headings, lines = _by_layer(rows, which)
        parts.append(f"{title} of each layer\n\n{markdown(headings, headings[:1], lines)}")
    return "\n".join(parts)


def _by_layer(
    rows: Sequence[LayerRow], which: str = "output_error"
) -> tuple[list[str], list[dict[str, str]]]:
    """Headings, and for each layer its texts by heading."""
    lines: dict[str, dict[str, str]] = {}
    formats: dict[str, None] = {}
    for row in rows:
        if row.values is None:
            continue
        label = f"{row.case.format} {CALIBRATED}" if row.case.calibration else row.case.format
        formats[label] = None
        size = f"{row.values.n} x {row.values.k}"
        line = lines.setdefault(row.case.layer, {LAYER_HEADING: f"{row.case.layer} ({size})"})
        error = getattr(row.values, which)
        line[label] = "" if error is None else f"{error:.4f}"
    headings = [LAYER_HEADING, *formats]
    return headings, [dict.fromkeys(headings, "") | line for line in lines.values()]


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
        change = _change(c.uniform_error, c.kmeans_error)
        lines.append(
            f"  {c.bits} bits: {c.kmeans} {c.kmeans_error:.4f}, "
            f"{c.uniform} {c.uniform_error:.4f} ({change})"
        )
    return lines


def calibration_lines(pairs: Sequence[tuple[AccuracyRow, AccuracyRow]]) -> list[str]:
    """What weighing the error by the inputs changed, format by format."""
    if not pairs:
        return []
    text = pairs[0][1].case.calibration
    lines = [f"Errors weighed by the mean square of each input over {text}:"]
    for plain, weighed in pairs:
        before, after = plain.values, weighed.values
        assert before is not None
        assert after is not None
        loss = 1 - before.cosine_mean, 1 - after.cosine_mean
        parts = [
            f"output error {before.output_error:.4f} to {after.output_error:.4f} "
            f"({_change(before.output_error, after.output_error)})",
            f"1 - cosine {loss[0]:.5f} to {loss[1]:.5f} ({_change(*loss)})",
        ]
        if before.divergence is not None and after.divergence is not None:
            change = _change(before.divergence, after.divergence)
            parts.append(f"KL {before.divergence:.4f} to {after.divergence:.4f} ({change})")
        lines.append(f"  {plain.case.format}: {', '.join(parts)}")
    return lines


def _change(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.1f} %" if before else "from 0"


def _headings(rows: Sequence[AccuracyRow]) -> tuple[str, ...]:
    headed = any(row.values is not None and row.values.divergence is not None for row in rows)
    return tuple(heading for heading in HEADINGS if heading != "KL" or headed)


def accuracy_cells(row: AccuracyRow) -> dict[str, str]:
    """The texts of a row by heading."""
    values = row.values
    if values is None:
        return dict.fromkeys(HEADINGS, "") | {"format": row.case.label, "seconds": "failed"}
    return {
        "format": row.case.label,
        "bits/weight": f"{values.bits_per_weight:.3f}",
        "file MB": f"{values.file_bytes / 1e6:.2f}",
        "weight error": f"{values.weight_error:.4f}",
        "output error": f"{values.output_error:.4f}",
        "cosine mean": f"{values.cosine_mean:.5f}",
        "min": f"{values.cosine_min:.5f}",
        "KL": "" if values.divergence is None else f"{values.divergence:.4f}",
        "seconds": f"{values.seconds:.1f}",
    }


def _caption(rows: Sequence[AccuracyRow]) -> str:
    row = next((row for row in rows if row.values is not None), None)
    if row is None or row.values is None:
        return "No format was measured."
    values = row.values
    text = next((row.case.calibration for row in rows if row.case.calibration), "")
    calibrated = f" {CALIBRATED}: errors weighed by the inputs that {text} gives." if text else ""
    return (
        f"{row.case.model}: {values.layers} linear layers, {values.weights / 1e6:.2f} million "
        f"weights; outputs for {row.case.sentences} sentences, {row.case.dtype} on "
        f"{row.case.device}.{calibrated}"
    )
