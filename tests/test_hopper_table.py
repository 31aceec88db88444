"""Hopper's tables in the documents are what the recorded rows say."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "packages/fdk-cuda/benchmarks"
RESULTS = ROOT / "docs/results/h200"
DOCUMENT = ROOT / "docs/kernels/hopper-gemm.md"
FACTS = {"device": "NVIDIA H200", "started": "2026-11-22T09:00:00+00:00", "commit": "1234"}


def script(name, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(BENCHMARKS)
    for module in ("marlin", "marlin_rows", name):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return importlib.import_module(name)


def read(name):
    return [json.loads(line) for line in (RESULTS / name).read_text("utf-8").splitlines()]


def row(bits, chip, pdl, goal):
    case = {"n": 4096, "k": 8192, "bits": bits, "m": 64, "kind": "codebook", "chip": chip}
    return case | {"pdl": pdl, "plain": 9.5, "cublas": 10.0, "goal": goal} | FACTS


def test_a_table_by_hand(monkeypatch):
    hopper = script("marlin_hopper", monkeypatch)
    rows = [row(1, "cool", 5.0, 5.0), row(4, "cool", 6.2, 6.0), row(1, "hot", 8.0, None)]
    rows.append(row(1, "hot", 7.0, None) | {"kind": "signs"})
    text = hopper.table(rows).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text[:4]]
    heads = ["n x k", "m", "chip", "cuBLAS", "1 bit", "1 bit, signs", "4 bits"]
    assert cells[0][:7] == heads
    # The row of 4 bits tells cuBLAS, no PDL and the goal.
    case = ["4096 x 8192", "64"]
    assert cells[2] == [*case, "cool", "10.0", "5.0* (0.50)", "-", "6.2 (0.62)", "9.5", "6.0"]
    assert cells[3] == [*case, "hot", "10.0", "8.0 (0.80)", "7.0 (0.70)", "-", "9.5", "-"]
    assert any(line.startswith("NVIDIA H200, 2026-11-22, commit 1234; ") for line in text)
    short = hopper.summary(rows).splitlines()
    assert "cool: of 2 goals 1 are met, 1 are within 5 %, 0 are over." in short
    assert "hot: of 0 goals 0 are met, 0 are within 5 %, 0 are over." in short
    assert "NVIDIA H200, 2026-11-22, commits 1234." in short


def test_a_table_marks_older_rows(monkeypatch):
    hopper = script("marlin_hopper", monkeypatch)
    older = {"commit": "0123", "started": "2026-11-21T09:00:00+00:00"}
    rows = [row(1, "cool", 5.0, 5.0) | older, row(4, "cool", 6.2, 6.0)]
    text = hopper.table(rows).splitlines()
    assert "| 5.0*† (0.50) | 6.2 (0.62) |" in text[2]
    assert any(
        line.startswith("NVIDIA H200, 2026-11-21, 2026-11-22, commit 1234;") for line in text
    )
    assert "†: commit 0123." in text


def test_a_table_marks_each_older_commit(monkeypatch):
    hopper = script("marlin_hopper", monkeypatch)
    old, older = (
        {"commit": c, "started": f"2026-11-{d}T09:00:00"} for c, d in (("b", 21), ("a", 20))
    )
    rows = [
        row(1, "cool", 5.0, None) | old,
        row(1, "hot", 5.5, None) | older,
        row(4, "cool", 6.0, None),
    ]
    text = hopper.table(rows)
    assert "| 5.0‡ (0.50) |" in text
    assert "| 5.5† (0.55) |" in text
    assert "†: commit a.\n‡: commit b." in text


def test_the_least_and_the_most_over_others(monkeypatch):
    hopper = script("marlin_hopper", monkeypatch)
    rows = [row(1, "cool", 4.0, 5.0), row(1, "cool", 7.5, 5.0), row(4, "cool", 11.0, None)]
    goals, cublas = (hopper.spans(rows, over).splitlines() for over in ("goal", "cublas"))
    assert goals[0] == "| time over goal | m | 1 bit | 4 bits |"
    assert goals[2:] == ["| cool | 64 | 0.80 to 1.50 (1 of 2) | - |"]
    assert cublas[2:] == ["| cool | 64 | 0.40 to 0.75 (0 of 2) | 1.10 to 1.10 (1 of 1) |"]


def test_cases_over_their_goals_are_told_by_class(monkeypatch):
    """Signs and rows without a goal are left out; what is near is in brackets."""
    hopper = script("marlin_hopper", monkeypatch)
    cases = [(1, "cool", 4.0, 5.0), (4, "cool", 5.1, 5.0), (2, "hot", 8.0, 5.0)]
    rows = [row(*case) for case in [*cases, (3, "cool", 8.0, 5.0), (8, "cool", 9.0, None)]]
    rows.append(row(1, "hot", 9.0, 5.0) | {"kind": "signs"})
    told = [line.split(" | ") for line in hopper.goals_by_class(rows).splitlines()[2:]]
    few = "| 1, 2 and 4 bits, m = 64"
    assert told == [
        [few, "cool", "0.80 to 1.02", "2.00 to 2.00", "1 of 2", "4096 x 8192: (4b m64 1.02) |"],
        [few, "hot", "1.60 to 1.60", "2.00 to 2.00", "0 of 1", "4096 x 8192: 2b m64 1.60 |"],
        ["| 3 bits, m = 64", "cool", *told[1][2:5], "4096 x 8192: 3b m64 1.60 |"],
    ]


def test_every_goal_from_64_rows_on_is_of_one_class(monkeypatch):
    hopper = script("marlin_hopper", monkeypatch)
    for goal in read("goals.jsonl"):
        bits, m = goal["bits"], goal["m"]
        classes = [name for name, (b, ms) in hopper.CLASSES.items() if bits in b and m in ms]
        assert len(classes) == (m >= 64), goal
    text = (RESULTS / "hopper.md").read_text("utf-8")
    assert all(f"| {name} |" in text for name in hopper.CLASSES)


def test_jobs(monkeypatch):
    hopper = script("marlin_hopper", monkeypatch)
    assert list(hopper.cases_of("4,8:0:64,128", "1")) == [(4, 0, [64, 128]), (8, 0, [64, 128])]
    assert list(hopper.cases_of("3:1,2", "256")) == [(3, 1, [256]), (3, 2, [256])]


def test_what_was_in_turns_with_humming_is_told_apart(monkeypatch):
    hopper = script("marlin_hopper", monkeypatch)
    cool, hot = (row(4, chip, pdl, None) for chip, pdl in (("cool", 6.0), ("hot", 8.0)))
    rows = [cool | {"humming": 7.5}, hot | {"humming": 7.9}]
    told = hopper.table([*rows, row(1, "cool", 5.0, None)])
    assert "| 4096 x 8192 | 64 | cool | 4 bits | 10.0 | 6.0 | 9.5 | 7.5 | 0.80 |" in told
    assert "Of 2 cases 1 are behind Humming." in hopper.summary(rows)
    assert "Humming" not in hopper.table([row(1, "cool", 5.0, None)])


@pytest.mark.parametrize(
    ("path", "mark"), [(DOCUMENT, "hopper summary"), (RESULTS / "hopper.md", "hopper")], ids=str
)
def test_the_documents_have_the_recorded_rows(path, mark, monkeypatch):
    text = path.read_text("utf-8")
    assert f"<!-- {mark} table -->" in text
    assert text == script("marlin_hopper", monkeypatch).fill(text, read("hopper.jsonl"))


def test_goals_from_64_rows_on_were_timed_cool_and_hot():
    timed = {
        (row["n"], row["k"], row["bits"], row["m"], row["chip"]): row["goal"]
        for row in read("hopper.jsonl")
    }
    goals = {
        (goal["n"], goal["k"], goal["bits"], goal["m"], chip): goal["goal"]
        for goal in read("goals.jsonl")
        for chip in ("cool", "hot")
        if goal["m"] >= 64
    }
    assert len(goals) == 160
    assert goals.items() <= timed.items()


def test_more_rows_take_longer_within_5_per_cent(monkeypatch):
    rows = read("rows.jsonl")
    steps_down = script("marlin_rows", monkeypatch).steps_down
    assert steps_down([1, 2, 3], [10.0, 9.0, 9.6]) == ["2: 9.0 after 10.0"]
    assert len(rows) == 12
    for row in rows:
        assert {16, 17, 64, 65, 128, 129, 256, 257, 512} <= set(row["m"])
        assert steps_down(row["m"], row["us"]) == []


def test_the_document_has_the_heated_rows():
    lines = [line.strip("|").split("|") for line in DOCUMENT.read_text("utf-8").splitlines()]
    first = next(i for i, line in enumerate(lines) if line[1:4] == [" bits ", " 1 ", " 8 "])
    ms = [int(cell) for cell in lines[first][2:]]
    heated = [row for row in read("rows.jsonl") if row["heat"] > 0]
    assert len(heated) == 6
    for line, row in zip(lines[first + 2 :], heated, strict=False):
        us = dict(zip(row["m"], row["us"], strict=True))
        cells = [f"{row['n']} x {row['k']}", str(row["bits"]), *(f"{us[m]:.1f}" for m in ms)]
        assert [cell.strip() for cell in line] == cells
