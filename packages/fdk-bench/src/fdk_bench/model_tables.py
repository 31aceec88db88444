"""The table of a model benchmark, for the terminal and as Markdown."""

import re
from collections.abc import Sequence

from rich.table import Table

from fdk_bench.kernel_tables import empty_table, fitting, markdown, seconds_text
from fdk_bench.model_cases import ModelRow

HEADINGS = (
    "model",
    "format",
    "head",
    "by",
    "fused",
    "batch",
    "tokens/s",
    "step",
    "spread",
    "first token",
    "read GB",
    "share",
    "memory GB",
    "x 16 bit",
    "perplexity",
)
LEFT = ("model", "format", "head", "by", "fused")
# Left out of a terminal that is too narrow, in this order; the Markdown file has them.
SPARE = (
    "spread",
    "head",
    "read GB",
    "fused",
    "memory GB",
    "share",
    "x 16 bit",
    "first token",
    "perplexity",
)
OPTIONAL = ("fused", "memory GB", "x 16 bit", "perplexity")


def model_table(rows: Sequence[ModelRow], caption: str = "", width: int | None = None) -> Table:
    """A line per row; no wider than ``width`` where ``SPARE`` allows."""
    lines = [cells_of(row) for row in rows]
    headings, note = fitting(headings_of(rows), lines, SPARE, width)
    table = empty_table(headings, LEFT, caption + note)
    for cells in lines:
        table.add_row(*(cells[heading] for heading in headings))
    return table


def model_markdown(rows: Sequence[ModelRow]) -> str:
    """The same table as Markdown."""
    return markdown(headings_of(rows), LEFT, map(cells_of, rows))


def continuations(rows: Sequence[ModelRow]) -> str:
    """How each real model goes on from the text that was given: a line each, or nothing."""
    told = [
        f"{row.case.model} {row.case.format} {row.values.backends}: {row.values.continuation!r}\n"
        for row in rows
        if row.values is not None and row.values.continuation is not None
    ]
    return "The text goes on:\n" + "".join(dict.fromkeys(told)) if told else ""


def headings_of(rows: Sequence[ModelRow]) -> tuple[str, ...]:
    """The columns that any row fills."""
    filled = [cells_of(row) for row in rows]
    return tuple(h for h in HEADINGS if h not in OPTIONAL or any(cells[h] for cells in filled))


def cells_of(row: ModelRow) -> dict[str, str]:
    """The texts of a row by heading."""
    case, values = row.case, row.values
    cells = dict.fromkeys(HEADINGS, "")
    cells |= {"model": case.model, "format": case.format, "batch": str(case.batch)}
    # A layer of 16 bits is most of what a small model with few bits reads: a table has to say it.
    kept = case.skip and re.search(case.skip, "lm_head")
    cells["head"] = case.dtype if kept else case.format
    cells["fused"] = "" if case.fused else "no"
    if values is None:
        return cells | {"by": case.backend, "step": "failed"}
    return cells | {
        "by": values.backends,
        "tokens/s": f"{values.tokens_per_second:.1f}",
        "step": seconds_text(values.step_time),
        "spread": f"{100 * values.spread:.0f} %",
        "first token": seconds_text(values.first_token_time),
        "read GB": f"{values.weight_bytes / 1e9:.3g}",
        "share": f"{100 * values.floor_share:.0f} %",
        "memory GB": "" if values.memory is None else f"{values.memory / 1e9:.2f}",
        "x 16 bit": "" if values.speedup_16 is None else f"{values.speedup_16:.2f}",
        "perplexity": "" if values.perplexity is None else f"{values.perplexity:.3f}",
    }
