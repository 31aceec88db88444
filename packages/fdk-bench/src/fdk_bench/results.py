"""Rows of JSONL files as tables of pandas, whatever benchmark wrote them."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]

from fdk_bench.cases import DTYPES
from fdk_formats import Format

KERNELS = ("kernels", "compare")
ROW = "a row of benchmark (text), case (an object), and values (an object) or error (text)"


class ResultsError(ValueError):
    """A file that is no file of rows; the text says which line."""


def read_text(path: Path) -> str:
    """The text of a file, with the line ends that it has.

    Raises:
        ResultsError: for what cannot be read, or is not UTF-8.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path}: wanted a UTF-8 text file: {error}") from None


def read_records(
    paths: Iterable[Path], check: Callable[[dict[str, Any]], object] | None = None
) -> Iterator[dict[str, Any]]:
    """The rows of some files, one after another.

    ``check`` is called with each; what it raises tells that the row is not whole.

    Raises:
        ResultsError: for a file that cannot be read, and a line that is no row.
    """
    for path in paths:
        for number, line in enumerate(read_text(path).splitlines(), start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ResultsError(f"{path}:{number}: wanted JSON, got {error}") from None
            if not _is_row(record):
                raise ResultsError(f"{path}:{number}: wanted {ROW}; got {line.strip()[:80]}")
            try:
                if check is not None:
                    check(record)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                wanted = f"a whole row of {record['benchmark']}"
                raise ResultsError(f"{path}:{number}: wanted {wanted}; got {error!r}") from None
            yield record


def _is_row(record: object) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("case"), dict):
        return False
    values, error = record.get("values"), record.get("error")
    measured = isinstance(values, dict) and error is None
    failed = "values" in record and values is None and isinstance(error, str)
    return isinstance(record.get("benchmark"), str) and (measured or failed)


def kernel_frame(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """What was measured of kernels, a line per case, times in microseconds.

    Columns: m, n, k, shape, format, bits (of a code), by, machine, threads, and the numbers of
    ``KernelValues``. A case that was measured more than once keeps its last row.
    """
    rows = [
        kernel_line(record)
        for record in records
        if record["benchmark"] in KERNELS and record["values"] is not None
    ]
    frame = pd.DataFrame(rows)
    if rows:
        keys = ["m", "n", "k", "format", "by", "dtype", "machine", "threads"]
        frame = frame.drop_duplicates(keys, keep="last").reset_index(drop=True)
    return frame


def kernel_line(record: dict[str, Any]) -> dict[str, Any]:
    """A line of ``kernel_frame``, of a row that was measured."""
    case, values = record["case"], record["values"]
    if "median_us" in values:
        values = values_of_device(record)
    return {
        **values,
        **{name: case[name] for name in ("m", "n", "k", "format", "dtype")},
        "by": values["backend"],
        "bits": code_bits(case["format"]),
        "shape": f"{case['n']} x {case['k']}",
        "size": case["n"] * case["k"],
        "machine": record["device"],
        "threads": cpu_threads(record),
        "us": values["time"] * 1e6,
        "floor_us": values["floor"] * 1e6,
    }


def values_of_device(record: dict[str, Any]) -> dict[str, Any]:
    """The values of a row that ``fdk_cpu_bench`` wrote, on a phone say, under our names."""
    case, values = record["case"], record["values"]
    time = values["median_us"] / 1e6
    weight_bytes, operations = values["nbytes"], 2 * case["m"] * case["n"] * case["k"]
    floor = weight_bytes / (values["read_gb_s"] * 1e9)
    rounded = f" {case['activations']}" if "activations" in case else ""
    return {
        "backend": f"{case['backend']} {case['instruction_set']}{rounded}",
        "bits_per_weight": weight_bytes * 8 / (case["n"] * case["k"]),
        "weight_bytes": weight_bytes,
        "bytes": weight_bytes,
        "operations": operations,
        "error": values["nrmse"],
        "time": time,
        "time_min": values["min_us"] / 1e6,
        "spread": None,
        "samples": values["runs"],
        "bandwidth": weight_bytes / time,
        "throughput": operations / time,
        "floor": floor,
        "floor_share": floor / time,
        "speedup_16": None,
        "speedup_peer": None,
    }


def model_frame(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """What was measured of models, a line per case."""
    rows = [
        model_line(record)
        for record in records
        if record["benchmark"] == "models" and record["values"] is not None
    ]
    frame = pd.DataFrame(rows)
    if rows:
        keys = ["model", "batch", "format", "by", "dtype", "context", "machine", "threads"]
        frame = frame.drop_duplicates(keys, keep="last").reset_index(drop=True)
    return frame


def model_line(record: dict[str, Any]) -> dict[str, Any]:
    """A line of ``model_frame``, of a row that was measured."""
    case = record["case"]
    return {
        **record["values"],
        **case,
        **{name: case[name] for name in ("model", "batch", "format", "dtype", "context")},
        "by": _model_by(record),
        "bits": code_bits(case["format"]),
        "machine": record["device"],
        "threads": cpu_threads(record),
    }


def _model_by(record: dict[str, Any]) -> str:
    """The backends of a model, and whether its projections are apart."""
    fused = record["case"].get("fused", True)  # which older rows do not say
    return str(record["values"]["backends"]) + ("" if fused else ", not fused")


def cpu_threads(record: dict[str, Any]) -> int:
    """Threads of a row that a CPU computed; 0 for a GPU, which they are nothing to."""
    return int(record["threads"]) if record["case"].get("device", "cpu") == "cpu" else 0


def code_bits(format: str) -> int:
    """Bits of a code, or of an element that is not quantised."""
    return DTYPES[format].itemsize * 8 if format in DTYPES else Format.parse(format).bits
