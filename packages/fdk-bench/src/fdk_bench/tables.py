"""Tables of rows: for the terminal, as Markdown, and as frames of pandas for figures."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fdk_bench.cases import BITSANDBYTES, DTYPES
from fdk_bench.rows import CALIBRATED, Row
from fdk_formats import Format

Cells = dict[str, str]
GAP = 2  # columns of the terminal between two of the table
# The read floor is measured, so a little more than 100 % is noise. Above this share the machine
# was disturbed (its read rate changed during the run), and the time is not to be trusted.
MOST_SHARE = 1.05
DISTURBED = "(disturbed)"


@dataclass(frozen=True)
class Layout:
    """The columns of a benchmark's table.

    Attributes:
        cells: texts of a row by heading, empty where a row has nothing to show.
        headings: column headings, in order.
        left: headings of text, aligned to the left.
        spare: left out of a terminal that is too narrow, in this order.
        optional: left out where no row fills them.
    """

    cells: Callable[[Row[Any, Any]], Cells]
    headings: tuple[str, ...]
    left: tuple[str, ...]
    spare: tuple[str, ...]
    optional: tuple[str, ...]

    def shown(self, lines: Sequence[Cells]) -> list[str]:
        """Return the headings that some line fills, or that are never left out."""
        return [h for h in self.headings if h not in self.optional or any(c[h] for c in lines)]


def table(
    layout: Layout, rows: Sequence[Row[Any, Any]], caption: str = "", width: int | None = None
) -> Table:
    """Make the table for a terminal of ``width`` columns; the caption names what it leaves out."""
    lines = [layout.cells(row) for row in rows]
    headings, dropped = layout.shown(lines), []
    for spare in layout.spare:
        longest = (max(len(h), *(len(cells[h]) for cells in lines), 0) + GAP for h in headings)
        if width is None or sum(longest) <= width:
            break
        if spare in headings:
            headings.remove(spare)
            dropped.append(spare)
    note = f"; too narrow for {', '.join(dropped)}" if dropped else ""
    return make_table(headings, layout.left, lines, caption + note)


def make_table(
    headings: Sequence[str], left: Sequence[str], lines: Iterable[Cells], caption: str = ""
) -> Table:
    """Make a table from cells by heading."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption_justify="left")
    made.caption = caption or None
    for heading in headings:
        made.add_column(heading, justify="left" if heading in left else "right", overflow="fold")
    for cells in lines:
        made.add_row(*(cells[heading] for heading in headings))
    return made


def markdown(layout: Layout, rows: Sequence[Row[Any, Any]]) -> str:
    """Return the table of some rows as Markdown."""
    lines = [layout.cells(row) for row in rows]
    return make_markdown(layout.shown(lines), layout.left, lines)


def make_markdown(
    headings: Sequence[str], left: Sequence[str], lines: Iterable[Mapping[str, str]]
) -> str:
    """Return a Markdown table from cells by heading."""
    table = [headings, ["---" if heading in left else "---:" for heading in headings]]
    table += [[cells[heading] for heading in headings] for cells in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in table)


def seconds_text(seconds: float) -> str:
    """Return seconds with three digits and a unit: ``9.87 us``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def share_text(share: float) -> str:
    """Return a share of the read floor in percent, marked where the machine was disturbed."""
    return f"{100 * share:.0f} %" + (f" {DISTURBED}" if share > MOST_SHARE else "")


def _number(value: float | None, digits: str, suffix: str = "") -> str:
    return "" if value is None else f"{value:{digits}}{suffix}"


def _kernel_cells(row: Row[Any, Any]) -> Cells:
    case, values = row.case, row.values
    cells = dict.fromkeys(KERNELS.headings, "")
    cells |= {"n x k": f"{case.n} x {case.k}", "m": str(case.m), "format": case.format}
    if values is None:
        return cells | {"by": case.backend, "time": "failed"}
    return cells | {
        "by": values.backend,
        "time": seconds_text(values.time),
        "least": seconds_text(values.time_min),
        "spread": f"{100 * values.spread:.0f} %",
        "eager": "" if values.eager_time is None else seconds_text(values.eager_time),
        "GB/s": f"{values.bandwidth / 1e9:.1f}",
        "floor": seconds_text(values.floor),
        "share": share_text(values.floor_share),
        "TFLOP/s": f"{values.throughput / 1e12:.3g}",
        "x 16 bit": _number(values.speedup_16, ".2f"),
        "x best peer": _number(values.speedup_peer, ".2f", f" ({values.best_peer})"),
    }


KERNELS = Layout(
    _kernel_cells,
    headings=(
        *("n x k", "m", "format", "by", "time", "least", "spread", "eager", "GB/s"),
        *("floor", "share", "TFLOP/s", "x 16 bit", "x best peer"),
    ),
    left=("n x k", "format", "by"),
    spare=(
        *("least", "floor", "eager", "TFLOP/s", "GB/s", "spread", "x 16 bit", "share"),
        "x best peer",
    ),
    optional=("eager", "x 16 bit", "x best peer"),
)


def _model_cells(row: Row[Any, Any]) -> Cells:
    case, values = row.case, row.values
    # Most of what a small model with few bits reads is an output head of 16 bits.
    kept = case.skip and re.search(case.skip, "lm_head")
    cells = dict.fromkeys(MODELS.headings, "")
    cells |= {
        "model": case.model,
        "format": case.format,
        "head": case.dtype if kept else case.format,
        "fused": "" if case.fused else "no",
        "batch": str(case.batch),
        "engine": case.engine,
    }
    if values is None:
        return cells | {"by": case.backend, "step": "failed"}
    return cells | {
        "by": values.backends,
        "tokens/s": f"{values.tokens_per_second:.1f}",
        "step": seconds_text(values.step_time),
        "spread": f"{100 * values.spread:.0f} %",
        "first token": seconds_text(values.first_token_time),
        "read GB": f"{values.weight_bytes / 1e9:.3g}",
        "share": share_text(values.floor_share),
        "memory GB": "" if values.memory is None else f"{values.memory / 1e9:.2f}",
        "x 16 bit": _number(values.speedup_16, ".2f"),
        "perplexity": _number(values.perplexity, ".3f"),
    }


MODELS = Layout(
    _model_cells,
    headings=(
        *(
            "model",
            "format",
            "head",
            "by",
            "fused",
            "engine",
            "batch",
            "tokens/s",
            "step",
            "spread",
        ),
        *("first token", "read GB", "share", "memory GB", "x 16 bit", "perplexity"),
    ),
    left=("model", "format", "head", "by", "fused", "engine"),
    spare=(
        *("spread", "head", "read GB", "fused", "memory GB", "share", "x 16 bit"),
        *("first token", "perplexity"),
    ),
    optional=("fused", "memory GB", "x 16 bit", "perplexity"),
)


def _accuracy_cells(row: Row[Any, Any]) -> Cells:
    values = row.values
    if values is None:
        return dict.fromkeys(ACCURACY.headings, "") | {
            "format": row.case.label,
            "seconds": "failed",
        }
    return {
        "format": row.case.label,
        "bits/weight": f"{values.bits_per_weight:.3f}",
        "file MB": f"{values.file_bytes / 1e6:.2f}",
        "weight error": f"{values.weight_error:.4f}",
        "output error": f"{values.output_error:.4f}",
        "cosine": f"{values.cosine_mean:.5f}",
        "least cosine": f"{values.cosine_min:.5f}",
        "KL": _number(values.divergence, ".4f"),
        "seconds": f"{values.seconds:.1f}",
    }


ACCURACY = Layout(
    _accuracy_cells,
    headings=(
        *("format", "bits/weight", "file MB", "weight error", "output error"),
        *("cosine", "least cosine", "KL", "seconds"),
    ),
    left=("format",),
    spare=("file MB", "least cosine", "seconds", "weight error", "KL", "output error"),
    optional=("KL",),
)


def _layer_cells(row: Row[Any, Any]) -> Cells:
    case, values = row.case, row.values
    assert values is not None
    return {
        "layer": case.layer,
        "n x k": f"{values.n} x {values.k}",
        "format": case.label,
        "weight error": f"{values.weight_error:.4f}",
        "output error": _number(values.output_error, ".4f"),
    }


LAYERS = Layout(
    _layer_cells,
    headings=("layer", "n x k", "format", "weight error", "output error"),
    left=("layer", "n x k", "format"),
    spare=("n x k", "weight error"),
    optional=(),
)


def _language_cells(row: Row[Any, Any]) -> Cells:
    case, values = row.case, row.values
    cells = dict.fromkeys(LANGUAGE.headings, "") | {"method": case.method, "by": case.by}
    if values is None:
        return cells | {"seconds": "failed"}
    tasks = (values.tasks or {}).items()
    return cells | {
        "bits/weight": f"{values.bits_per_weight:.3f}",
        "model bits": f"{values.model_bits_per_weight:.2f}",
        "weight error": f"{values.weight_error:.4f}",
        "perplexity": with_error(values.perplexity, values.perplexity_error),
        "excess": with_error(values.excess, values.excess_error),
        "KL": with_error(values.divergence, values.divergence_error),
        "same token": f"{100 * values.agreement:.1f} %",
        "tasks": ", ".join(f"{name} {value:.3f}" for name, value in tasks),
        "seconds": f"{values.seconds:.1f}",
    }


def with_error(value: float, error: float | None) -> str:
    """Return a mean with its standard error, both to the digits that the error leaves."""
    if not error or not math.isfinite(error):
        return f"{value:.4g}"
    digits = max(0, 1 - math.floor(math.log10(error)))  # two digits of the error
    return f"{value:.{digits}f} ± {error:.{digits}f}"


LANGUAGE = Layout(
    _language_cells,
    headings=(
        *("method", "by", "bits/weight", "model bits", "weight error", "perplexity"),
        *("excess", "KL", "same token", "tasks", "seconds"),
    ),
    left=("method", "by", "tasks"),
    spare=("weight error", "by", "same token", "model bits", "seconds", "excess"),
    optional=("tasks",),
)


def kernel_frame(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the measured rows of `kernels` and `compare`; of a case measured twice the last.

    Columns: the case, the values of ``KernelValues`` that the rows hold, and bits, by, machine,
    threads, shape, size, operations, throughput and share.
    """
    rows = [
        _kernel_line(record)
        for record in records
        if record["benchmark"] in ("kernels", "compare") and record["values"] is not None
    ]
    return _last_of(rows, ["m", "n", "k", "format", "by", "dtype", "machine", "threads"])


def _kernel_line(record: Mapping[str, Any]) -> dict[str, Any]:
    case, values = record["case"], dict(record["values"])
    if "median_us" in values:
        values = _values_of_device(case, values)
    operations = 2 * case["m"] * case["n"] * case["k"]
    return {
        "speedup_16": None,
        **case,
        **values,
        **_machine(record),
        # A peer's values name its weight type too, which would split its series.
        "by": case["backend"] if _is_peer(case) else f"fdk {values['backend']}",
        "shape": f"{case['n']} x {case['k']}",
        "size": case["n"] * case["k"],
        "operations": operations,
        "throughput": operations / values["time"],
        "share": values["floor"] / values["time"],
    }


def _is_peer(case: Mapping[str, Any]) -> bool:
    """Return whether a row is of another project's kernel, or of torch without quantisation."""
    from fdk_bench.peers import PEERS

    return case["format"] in DTYPES or any(peer.name == case["backend"] for peer in PEERS)


def _values_of_device(case: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the values of a row that ``fdk_cpu_bench`` wrote, on a phone for instance."""
    rounded = f" {case['activations']}" if "activations" in case else ""
    return {
        "backend": f"{case['backend']} {case['instruction_set']}{rounded}",
        "bits_per_weight": values["nbytes"] * 8 / (case["n"] * case["k"]),
        "bytes": values["nbytes"],
        "time": values["median_us"] / 1e6,
        "floor": values["nbytes"] / (values["read_gb_s"] * 1e9),
    }


def model_frame(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the measured rows of `models`: case and values, bits, by, machine, threads, share."""
    rows = [
        {
            **record["case"],
            **record["values"],
            **_machine(record),
            "by": _model_by(record),
            "share": record["values"]["floor"] / record["values"]["step_time"],
        }
        for record in records
        if record["benchmark"] == "models" and record["values"] is not None
    ]
    keys = ["model", "batch", "format", "by", "dtype", "context", "machine", "threads"]
    return _last_of(rows, keys)


def _model_by(record: Mapping[str, Any]) -> str:
    case = record["case"]
    parts = [str(record["values"]["backends"])]
    if not case.get("fused", True):
        parts.append("not fused")
    if (engine := case.get("engine", "fdk")) != "fdk":
        parts.append(engine)
    return ", ".join(parts)


def accuracy_frame(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the measured rows of `accuracy`: case and values, and the label of the format."""
    rows = [
        {
            **record["case"],
            **record["values"],
            "label": record["case"]["format"]
            + (f" {CALIBRATED}" if record["case"].get("calibration") else ""),
        }
        for record in records
        if record["benchmark"] == "accuracy" and record["values"] is not None
    ]
    return _last_of(rows, ["label", "model"])


def _machine(record: Mapping[str, Any]) -> dict[str, Any]:
    case = record["case"]
    on_cpu = case.get("device", "cpu") == "cpu"
    return {
        "machine": record["device"],
        "threads": int(record["threads"]) if on_cpu else 0,
        "bits": code_bits(case["format"]),
    }


def code_bits(format: str) -> int:
    """Return the bits of a code, or of an element of a weight that is not quantised."""
    if format in DTYPES:
        return DTYPES[format].itemsize * 8
    return 4 if format == BITSANDBYTES else Format.parse(format).bits


def _last_of(rows: Sequence[Mapping[str, Any]], keys: list[str]) -> pd.DataFrame:
    frame = pd.DataFrame(rows)
    return frame.drop_duplicates(keys, keep="last").reset_index(drop=True) if rows else frame
