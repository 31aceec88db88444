"""fdk_cuda's measured.json is what the recorded rows make of it."""

import importlib
import json
from pathlib import Path

import pytest

from fdk_cuda import measured
from fdk_formats.format import Format

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "packages/fdk-cuda/benchmarks/auto_table.py"
RESULTS = ROOT / "docs/results"
SOURCES = sorted(RESULTS.glob("*/auto.jsonl"))


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("auto_table")


def rows():
    return [json.loads(line) for path in SOURCES for line in path.read_text("utf-8").splitlines()]


def row(backend, m, us, format="custom4-g64", error=None):
    case = {"m": m, "n": 64, "k": 128, "format": format, "backend": backend}
    return {"case": case, "values": {"time": us / 1e6}, "error": error, "device": "A GPU"}


def test_a_table_by_hand(script):
    given = [row("marlin-lut", m, m) for m in (1, 4, 16, 64)]
    given += [row("triton", m, 2 * m + 0.123) for m in (64, 16, 4, 1, 256)]
    # Not whole: m = 64 was not timed. And what is none of the two.
    given += [row(name, m, m, "affine4-g64") for name in ("marlin", "triton") for m in (1, 4, 16)]
    given += [row("humming", 1, 1.0), row("torch", 1, 1.0, "bf16"), row("marlin", 1, 9, "int4-g64")]
    given += [row("triton", 64, 1.0, "affine4-g64", error="wrong answer")]
    made = json.loads(script.table(given))
    us = {"marlin": [1, 4, 16, 64], "triton": [2.12, 8.12, 32.12, 128.12]}
    case = {"kind": "codebook", "bits": 4, "n": 64, "k": 128, "us": us}
    assert made == {"ms": [1, 4, 16, 64], "gpus": {"A GPU": [case]}}


def test_the_package_has_the_recorded_times(script):
    names = " ".join(str(path.relative_to(ROOT)) for path in SOURCES)
    text = measured.DATA.read_text("utf-8")
    assert text == script.table(rows()), f"{SCRIPT.name} {names} --write"


def test_each_recorded_time_is_in_the_table():
    """Read apart from the script: each affine or codebook row of 1 to 64 rows of x."""
    kept = json.loads(measured.DATA.read_text("utf-8"))
    found = {
        (gpu, case["kind"], case["bits"], case["n"], case["k"], backend, m): us
        for gpu, cases in kept["gpus"].items()
        for case in cases
        for backend, times in case["us"].items()
        for m, us in zip(kept["ms"], times, strict=True)
    }
    seen = 0
    for one in rows():
        case = one["case"]
        assert case["backend"] in measured.BACKENDS
        assert case["m"] in kept["ms"]
        format = Format.parse(case["format"])
        kind, family = measured.kind_of(format), case["backend"].removesuffix("-lut")
        key = one["device"], kind, format.bits, case["n"], case["k"], family, case["m"]
        assert found[key] == pytest.approx(1e6 * one["values"]["time"], abs=0.005)
        seen += 1
    # Of each GPU five shapes, eight widths, two kinds, two backends, four numbers of rows.
    assert seen == len(found) == len(kept["gpus"]) * 5 * 8 * 2 * 2 * 4
