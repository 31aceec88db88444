"""What triton_table.py and triton_peers.py make of rows."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "packages/fdk-cuda/benchmarks/triton_table.py"
PEER_SHAPES = ("4096x4096", "8192x8192", "28672x8192")
FACTS = {
    "device": "NVIDIA H200",
    "started": "2026-11-22T09:00:00+00:00",
    "commit": "1234",
    "command": "triton_record.py",
    "versions": {"torch": "2.11.0"},
    "triton": "3.6.0",
}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("triton_table")


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("triton_peers")


def row(m, direction, us, cublas):
    case = {"n": 8192, "k": 8192, "bits": 4, "m": m, "kind": "codebook", "direction": direction}
    return case | {"us": us, "cublas": cublas, "floor": 10.0, "by": f"kernel-{m}"} | FACTS


def test_a_table_by_hand(script):
    rows = [
        *(row(16, "y", 18.0, 36.0), row(1, "y", 12.0, 35.0), row(1, "dy", 18.0, 34.0)),
        *(row(64, "y", 30.0, 40.0), row(64, "dy", 33.0, 40.0), row(256, "y", 55.0, 50.0)),
    ]
    text = script.table(rows).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text[2:6]]
    first = ["10.0", "35.0", "12.0", "1.20", "1.00", "0.34", "kernel-1"]
    assert cells[0] == [
        "8192 x 8192",
        "4",
        "codebook",
        "1",
        *first,
        "34.0",
        "18.0",
        "1.50",
        "kernel-1",
    ]
    assert cells[1][6:11] == ["18.0", "1.80", "1.50", "0.50", "kernel-16"]
    assert cells[1][11:] == ["-"] * 4
    assert [line for line in text if line.startswith("- ")] == [
        "- m = 1 within 1.6 of the floor at 4 and 8 bits, 8192 x 8192 and larger: 1 of 1, "
        "the largest 1.20.",
        "- m = 16 within 1.3 of m = 1: 0 of 1, the largest 1.50.",
        "- m = 64 no slower than cuBLAS: 1 of 1, the largest 0.75.",
        "- m = 256 within 1.1 of cuBLAS: 1 of 1, the largest 1.10.",
        "- dy @ W_hat within 1.2 of the product: 1 of 2, the largest 1.50.",
    ]
    assert text[-2].startswith(
        "One run, NVIDIA H200, 2026-11-22, torch 2.11.0, triton 3.6.0, commit 1234"
    )


def test_a_run_that_went_on_with_another(script):
    other = row(16, "y", 18.0, 36.0) | {"command": "triton_record.py --without rows.jsonl"}
    assert script.run_of([row(1, "y", 12.0, 35.0), other, other]).splitlines() == [
        "- 1 of 3 rows: NVIDIA H200, 2026-11-22, torch 2.11.0, triton 3.6.0, commit 1234: "
        "`triton_record.py`.",
        "- 2 of 3 rows: NVIDIA H200, 2026-11-22, torch 2.11.0, triton 3.6.0, commit 1234: "
        "`triton_record.py --without rows.jsonl`.",
    ]


def test_ways_by_hand(script):
    rows = [
        row(64, "y", 30.0, 40.0) | {"others": {"many": 33.0, "dequantise": 90.0}},
        row(256, "y", 55.0, 50.0) | {"others": {"dequantise": 50.0}},
        row(1024, "y", 220.0, 180.0) | {"by": "dequantise", "others": {"many": 218.0}},
        row(1, "y", 10.0, 30.0) | {"others": {}},
    ]
    told = [line for line in script.table(rows).splitlines() if line.startswith("- ")][-2:]
    assert told == [
        "- y no later than cuBLAS by more than a dequantisation, where that was timed: 2 of 3, "
        "the largest 1.10.",
        "- chosen within 1.03 of the fastest of several ways: 2 of 3, the largest 1.10.",
    ]


def test_peers_by_hand(peers):
    def timed(format, backend, us, error=None):
        case = {"n": 512, "k": 256, "m": 1, "format": format, "backend": backend}
        values = None if error else {"time": us * 1e-6, "floor": 2e-6}
        return {"case": case, "values": values, "error": error} | FACTS

    rows = [
        *(timed("bf16", "torch", 12.0), timed("custom4-g64", "triton", 5.0)),
        *(timed("custom4-g64", "humming", 8.25), timed("custom4-g64", "tinygemm", 0, "wrong")),
        timed("custom3-g64", "humming", 9.0),  # no line: the Triton kernels were not timed
    ]
    text = peers.table(rows).splitlines()
    assert text[2] == "| 512 x 256 | 4 | 1 | 2.0 | 12.0 | 5.0 | 8.2 | - | - | - | - |"
    assert text[3:] == ["", "Rows of NVIDIA H200, 2026-11-22, 1234."]
    both = peers.run_of([*rows, {**rows[0], "commit": "abc"}])
    assert both == "Rows of NVIDIA H200, 2026-11-22, 1234; NVIDIA H200, 2026-11-22, abc."
    without = peers.table(rows[1:]).splitlines()[2]
    assert without == "| 512 x 256 | 4 | 1 | 2.0 | - | 5.0 | 8.2 | - | - | - | - |"
