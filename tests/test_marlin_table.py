"""The table of docs/kernels/marlin.md is what the recorded rows render to."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "packages/fdk-cuda/benchmarks/marlin_table.py"
RESULTS = ROOT / "docs/results/h200"
FACTS = {"device": "NVIDIA H200", "started": "2026-11-22T09:00:00+00:00", "commit": "1234"}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("marlin_table")


def read(name):
    return [json.loads(line) for line in (RESULTS / name).read_text("utf-8").splitlines()]


def row(m, kind, pdl, goal):
    case = {"n": 4096, "k": 8192, "bits": 4, "m": m, "kind": kind}
    return case | {"pdl": pdl, "plain": 6.5, "floor": 4.0, "cublas": 30.0 + m, "goal": goal} | FACTS


def test_a_table_by_hand(script):
    rows = [
        *(row(1, "codebook", 5.0, 4.0), row(1, "affine", 4.0, 4.0)),
        *(row(64, "codebook", 8.0, 8.0), row(64, "affine", 8.2, 8.0)),
        row(4, "codebook", 5.0, None),
    ]
    text = script.table(rows).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text[2:5]]
    times = ["4.00", "5.00", "6.50", "80 %", "4.0", "1.25", "4.00", "0.80", "1.00"]
    assert cells[0] == ["4096 x 8192", "4", "1", *times]
    assert cells[1][7:] == ["8.0", "1.00", "8.20", "1.02", "1.02"]
    assert cells[2][7:] == ["-"] * 5
    counts = [line for line in text if line.startswith("m ")]
    assert counts == [
        "m <= 16, codebook: of 1 goals 0 are met, 0 are within 5 %, 1 are over.",
        "m > 16, codebook: of 1 goals 1 are met, 0 are within 5 %, 0 are over.",
        "m <= 16, affine: of 1 goals 1 are met, 0 are within 5 %, 0 are over.",
        "m > 16, affine: of 1 goals 0 are met, 1 are within 5 %, 0 are over.",
    ]
    classes = [[c.strip() for c in line.split("|")[1:-1]] for line in text if "4 bits, m <" in line]
    named = "4096 x 8192: 4b m1 1.25"
    assert classes == [
        ["4 bits, m <= 4", "codebook", "1.25 to 1.25", "0 of 1", "1", named],
        ["4 bits, m <= 4", "affine", "1.00 to 1.00", "1 of 1", "0", "-"],
    ]
    near = "| m = 64 | affine | 1.02 to 1.02 | 0 of 1 | 1 | 4096 x 8192: (4b m64 1.02) |"
    assert near in text
    start = text.index(next(line for line in text if line.startswith("Affine over codebook")))
    beside = " ".join(text[start : text.index("", start)])
    assert "m <= 4: 0.80 to 0.80, in the middle 0.80; m = 64: 1.02 to 1.02" in beside
    assert beside.endswith("the same or better in 1 of 2 cases: 4096 x 8192 4b m1.")
    # Of few rows only: cuBLAS took 31 us at m = 1 and 34 at m = 4.
    assert "NVIDIA H200, 2026-11-22, commit 1234" in text[-1]
    assert text[-1].endswith("4096 x 8192 31.0 to 34.0.")


def test_the_document_has_the_recorded_rows(script):
    path = ROOT / "docs/kernels/marlin.md"
    text = path.read_text("utf-8")
    wanted = script.fill(text, read("marlin.jsonl"))
    assert text == wanted, f"{SCRIPT.name} docs/results/h200/marlin.jsonl --fill {path.name}"


def test_many_rows_by_hand_and_as_recorded(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    script = importlib.import_module("marlin_many_table")
    case = {"n": 64, "k": 128, "m": 256, "commit": "1234", "started": "2026-11-22T09:00:00+00:00"}
    one = case | {"bits": 1, "marlin": 3.0, "unfused": 4.0, "cublas": 5.0}
    two = case | {"bits": 4, "marlin": 1005.0, "unfused": 2000.0, "triton": 1000.0, "cublas": 6.0}
    text = script.table([one, two])
    assert "| 64 x 128 | 256 | 5.5 | 3.0 (0.75) | 1005 (1.00) |" in text
    assert "Of 2 cases 1 took longer" in text
    (told,) = (part for part in text.split("\n\n") if part.startswith("Of 2 cases"))
    assert max(map(len, told.splitlines())) <= 120
    slower = "1.005 of its time at most: 64 x 128 4b m256 1.005. 2026-11-22, commit 1234."
    assert slower in " ".join(told.split())
    path = ROOT / "docs/kernels/marlin.md"
    text = path.read_text("utf-8")
    assert text == script.fill(text, read("marlin-many.jsonl")), f"--fill {path.name}"


def test_a_decoding_step_as_recorded():
    """Its table is filled by hand."""
    text = (ROOT / "docs/kernels/marlin.md").read_text("utf-8")
    lines = text.partition("| they add |")[2].split("\n\n")[0].splitlines()[2:]
    rows = sorted(read("marlin-step.jsonl"), key=lambda row: (row["m"], row["bits"]))
    names = ("step", "without", "add", "back_to_back")
    assert lines == [
        f"| {row['bits']} | {row['m']} | {' | '.join(f'{row[name]:.1f}' for name in names)} |"
        for row in rows
    ]


def test_every_case_has_one_class(script):
    for row in read("marlin.jsonl"):
        found = [b for b, m in script.CLASSES.values() if row["bits"] in b and row["m"] in m]
        assert len(found) == 1, (row["bits"], row["m"])


def test_every_goal_up_to_64_rows_was_timed_in_one_run_of_its_shape():
    rows = read("marlin.jsonl")
    shapes = {(row["n"], row["k"]) for row in rows}
    assert len({row["commit"] for row in rows}) == 1
    runs = {(row["started"], row["command"], row["n"], row["k"]) for row in rows}
    assert len(runs) == len(shapes)
    for kind in ("codebook", "affine"):
        timed = {
            (row["n"], row["k"], row["bits"], row["m"]): row["goal"]
            for row in rows
            if row["kind"] == kind
        }
        for goal in read("goals.jsonl"):
            case = goal["n"], goal["k"], goal["bits"], goal["m"]
            if goal["m"] <= 64:
                assert timed[case] == goal["goal"]
