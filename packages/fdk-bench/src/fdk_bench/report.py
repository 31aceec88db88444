"""A report in one HTML file: figures inlined, tables, and the commands that made them."""

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]

from fdk_bench.records import machine_of

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; }
body { padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
img { max-width: 100%; display: block; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: 0.2rem 0.6rem; text-align: right; border-bottom: 1px solid #ddd; }
th:nth-child(-n+5), td:nth-child(-n+5) { text-align: left; }
code { background: #f3f3f3; padding: 0.1rem 0.3rem; }
.table { overflow-x: auto; }
"""
PIXELS = 1.7  # of a picture to one of the page
KERNEL_COLUMNS = {
    "shape": "n x k",
    "format": "format",
    "by": "by",
    "dtype": "dtype",
    "machine": "machine",
    "threads": "threads",
    "m": "m",
    "us": "us",
    "spread": "spread",
    "floor_us": "floor us",
    "floor_share": "share",
    "GB/s": "GB/s",
    "TFLOP/s": "TFLOP/s",
    "speedup_16": "x 16 bit",
    "speedup_peer": "x best peer",
}
MODEL_COLUMNS = {
    "model": "model",
    "format": "format",
    "by": "by",
    "dtype": "dtype",
    "machine": "machine",
    "threads": "threads",
    "batch": "batch",
    "context": "context",
    "tokens_per_second": "tokens/s",
    "floor_share": "share",
    "speedup_16": "x 16 bit",
}


def write_report(
    path: Path,
    title: str,
    pictures: Mapping[str, Path],
    kernels: pd.DataFrame,
    models: pd.DataFrame,
    records: Sequence[Mapping[str, Any]],
) -> None:
    """Writes a report that refers to no other file; ``pictures`` are PNG files by caption."""
    parts = [f"<h1>{escape(title)}</h1>"]
    for caption, picture in pictures.items():
        data = base64.b64encode(picture.read_bytes()).decode("ascii")
        parts.append(f"<h2>{escape(caption)}</h2>")
        width = round(png_width(picture) / PIXELS)  # letters as large in every figure
        parts.append(
            f'<img alt="{escape(caption)}" width="{width}" src="data:image/png;base64,{data}">'
        )
    if not kernels.empty:
        wide = kernels.assign(
            **{"GB/s": kernels["bandwidth"] / 1e9, "TFLOP/s": kernels["throughput"] / 1e12}
        )
        parts += ["<h2>Kernels</h2>", _table(wide, KERNEL_COLUMNS)]
    if not models.empty:
        parts += ["<h2>Models</h2>", _table(models, MODEL_COLUMNS)]
    parts += [_failures(records), "<h2>How this was measured</h2>", _runs(records)]
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )
    path.write_text(page, encoding="utf-8")


def png_width(picture: Path) -> int:
    """Pixels of a PNG file, from its header."""
    return int.from_bytes(picture.read_bytes()[16:20], "big")


def _runs(records: Sequence[Mapping[str, Any]]) -> str:
    lines = {(record["command"], record["started"]): run_item(record) for record in records}
    return f"<ul>{''.join(lines.values())}</ul>"


def run_item(record: Mapping[str, Any]) -> str:
    """The command, machine, versions and commit of a row, as an item of a list."""
    versions = ", ".join(f"{name} {text}" for name, text in record["versions"].items())
    commit = record["commit"] or "no checkout"
    return (
        f"<li><code>{escape(record['command'])}</code><br>{escape(record['started'])}, "
        f"{escape(machine_of(record))}, "
        f"{escape(versions)}, commit {escape(commit)}</li>"
    )


def _failures(records: Sequence[Mapping[str, Any]]) -> str:
    failed = [record for record in records if record["values"] is None]
    if not failed:
        return ""
    items = "".join(
        f"<li>{escape(' '.join(f'{k}={v}' for k, v in record['case'].items()))}: "
        f"{escape(record['error'])}</li>"
        for record in failed
    )
    return f"<h2>Failed</h2><ul>{items}</ul>"


def _table(frame: pd.DataFrame, columns: Mapping[str, str]) -> str:
    frame = frame.assign(threads=frame["threads"].map(lambda threads: threads or ""))  # of a GPU: 0
    head = "".join(f"<th>{escape(heading)}</th>" for heading in columns.values())
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(row[name])}</td>" for name in columns) + "</tr>"
        for _, row in frame.iterrows()
    )
    return f'<div class="table"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: object) -> str:
    if value is None or (isinstance(value, float) and value != value):
        return ""
    return number(value) if isinstance(value, float) else escape(str(value))


def number(value: float) -> str:
    """Three digits, all before the point, and no exponent for what a person reads: ``1240``."""
    if value == 0 or not 1e-4 <= abs(value) < 1e9:
        return f"{value:.3g}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"
