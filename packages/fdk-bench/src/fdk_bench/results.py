"""Rows of JSONL files as tables of pandas, whatever benchmark wrote them."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]

from fdk_bench.cases import DTYPES
from fdk_formats import Format

KERNELS = ("kernels", "compare")


class ResultsError(ValueError):
    """A file that is no file of rows; the text says which line."""


def read_records(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """The rows of some files, one after another.

    Raises:
        ResultsError: for a line that is no row.
    """
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ResultsError(f"{path}:{number}: wanted JSON, got {error}") from None
            if not isinstance(record, dict) or not {"benchmark", "case", "values"} <= set(record):
                raise ResultsError(f"{path}:{number}: wanted a row with benchmark, case and values")
            yield record


def kernel_frame(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """What was measured of kernels, a line per case, times in microseconds.

    Columns: m, n, k, shape, format, bits (of a code), by, machine, threads, and the numbers of
    ``KernelValues``. A case that was measured more than once keeps its last row.
    """
    rows = []
    for record in records:
        if record["benchmark"] in KERNELS and record["values"] is not None:
            case, values = record["case"], record["values"]
            if "median_us" in values:
                values = values_of_device(record)
            rows.append(
                {
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
            )
    frame = pd.DataFrame(rows)
    if rows:
        keys = ["m", "n", "k", "format", "by", "dtype", "machine", "threads"]
        frame = frame.drop_duplicates(keys, keep="last").reset_index(drop=True)
    return frame


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
        {
            **record["values"],
            **record["case"],
            "by": _model_by(record),
            "bits": code_bits(record["case"]["format"]),
            "machine": record["device"],
            "threads": cpu_threads(record),
        }
        for record in records
        if record["benchmark"] == "models" and record["values"] is not None
    ]
    frame = pd.DataFrame(rows)
    if rows:
        keys = ["model", "batch", "format", "by", "dtype", "context", "machine", "threads"]
        frame = frame.drop_duplicates(keys, keep="last").reset_index(drop=True)
    return frame


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
