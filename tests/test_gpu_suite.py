"""tools/gpu_suite.py over a small suite of its own: parts, failures, crashes, the time limit."""

import json
from pathlib import Path

import gpu_suite
import pytest

SUITE = """
import os, time
import pytest

@pytest.mark.parametrize("i", range(7))
def test_passes(i):
    pass

def test_fails():
    assert 6 * 7 == 41, "the answer"

@pytest.mark.skip(reason="needs a spoon")
def test_skips():
    pass

def test_crashes():
    if os.environ.get("CRASH"):
        os._exit(9)

def test_hangs():
    time.sleep(float(os.environ.get("HANG", 0)))
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    file = tmp_path / "test_small.py"
    file.write_text(SUITE)
    return file


def run(suite: Path, *arguments: str) -> tuple[int, dict[str, str], str]:
    """What the tool exits with, the outcome of each test, and the summary."""
    out = suite.parent / "out"
    name = next((a for a in arguments if "/" in a), "1/1").replace("/", "of")
    status = gpu_suite.main(
        ["--out", str(out), "--tests", str(suite), "--workers", "2", *arguments, "--", "-k", "test"]
    )
    rows = [json.loads(line) for line in (out / f"results-{name}.jsonl").read_text().splitlines()]
    assert not list(out.glob("*.part"))
    outcomes = {row["id"].partition("::")[2]: row["outcome"] for row in rows}
    return status, outcomes, (out / f"summary-{name}.txt").read_text()


def test_parts_are_all_of_it(suite: Path) -> None:
    found: dict[str, str] = {}
    statuses = []
    for shard in ("1/2", "2/2"):
        status, outcomes, text = run(suite, "--shard", shard)
        assert not found.keys() & outcomes.keys()
        found |= outcomes
        statuses.append(status)
        if outcomes.get("test_fails"):
            assert "the answer" in text
    assert sorted(statuses) == [0, 1]
    assert len(found) == 11
    assert found.pop("test_fails") == "failed"
    assert found.pop("test_skips") == "skipped"
    assert set(found.values()) == {"passed"}


def test_a_crash_loses_nothing_that_ended(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRASH", "1")
    status, outcomes, text = run(suite)
    assert status == 1
    assert outcomes["test_crashes"] == "cut off"
    assert outcomes["test_fails"] == "failed"
    assert "1 processes crashed" in text


def test_the_time_limit(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANG", "60")
    status, outcomes, _ = run(suite, "--timeout", "9")
    assert (status, outcomes["test_hangs"]) == (1, "cut off")
    assert outcomes["test_passes[0]"] == "passed"


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "a/b"])
def test_part_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="a part"):
        gpu_suite.Part.parse(text)


def test_parts_within_parts() -> None:
    """Every index from 0 is in exactly one of the processes of the shards."""
    parts = [gpu_suite.Part(s, 3).within(w, 4) for s in range(3) for w in range(4)]
    assert {part.count for part in parts} == {12}
    assert sorted(part.index for part in parts) == list(range(12))
