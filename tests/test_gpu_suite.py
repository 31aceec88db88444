"""tools/gpu_suite.py over a small suite of its own: parts, failures, crashes, the time limit."""

import json
import time
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
    if file := os.environ.get("HANG"):
        open(file, "w").close()
        time.sleep(600)

@pytest.fixture
def broken():
    yield
    raise OSError("the washing up")

def test_fails_twice(request):
    if os.environ.get("TWICE"):
        request.getfixturevalue("broken")
        raise ValueError("the soup")
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
    assert len(found) == 12
    assert found.pop("test_fails") == "failed"
    assert found.pop("test_skips") == "skipped"
    assert set(found.values()) == {"passed"}


def test_a_crash_loses_nothing_that_ended(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRASH", "1")
    status, outcomes, text = run(suite)
    assert status == 1
    assert outcomes["test_crashes"] == "cut off"
    assert outcomes["test_fails"] == "failed"
    # The crash is test 9, the last of its process but one: test 11 comes after it.
    assert outcomes["test_fails_twice"] == "not run"
    assert "--- not run: " in text
    assert outcomes["test_hangs"] == "passed"
    assert "1 processes crashed" in text


def test_the_time_limit(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = suite.parent / "hanging"
    monkeypatch.setenv("HANG", str(hanging))

    class Clock:
        """The limit comes as soon as the test hangs, however slow the machine."""

        sleep = staticmethod(time.sleep)

        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + 600 * hanging.exists()

    monkeypatch.setattr(gpu_suite, "time", Clock)
    status, outcomes, _ = run(suite, "--timeout", "600")
    assert (status, outcomes["test_hangs"]) == (1, "cut off")
    # Of the same process, before it.
    assert outcomes["test_passes[0]"] == "passed"


def test_a_failure_outlives_its_teardown(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWICE", "1")
    status, outcomes, text = run(suite)
    assert (status, outcomes["test_fails_twice"]) == (1, "failed")
    assert "the soup" in text
    assert "the washing up" in text


def test_a_line_cut_in_the_middle(tmp_path: Path) -> None:
    rows = [{"id": name, "outcome": "passed", "seconds": 1.0, "text": ""} for name in "ab"]
    lines = [json.dumps(row) for row in rows]
    file = tmp_path / "0.part"
    file.write_text(f"{lines[0]}\n{lines[1][:20]}")
    assert list(gpu_suite.merged([file])) == rows[:1]
    # Elsewhere it is no process that was killed.
    file.write_text(f"{lines[0][:20]}\n{lines[1]}\n")
    with pytest.raises(json.JSONDecodeError):
        list(gpu_suite.merged([file]))


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "a/b"])
def test_part_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="a part"):
        gpu_suite.Part.parse(text)


def test_processes_share_the_gpus(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = suite.parent / "first"
    suite.write_text(
        "import os, pathlib\n"
        "def test_a(): test_b()\n"
        f"def test_b(): pathlib.Path({str(first)!r}).open('a').write("
        "os.environ['CUDA_VISIBLE_DEVICES'] + '\\n')\n"
    )
    monkeypatch.setattr(gpu_suite, "visible_gpus", lambda: ["3", "5"])
    assert run(suite)[0] == 0
    assert sorted(first.read_text().split()) == ["3,5", "5,3"]


def test_visible_gpus_are_those_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
    assert gpu_suite.visible_gpus() == ["3", "GPU-5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpu_suite.visible_gpus() == ["0", "1"]


def test_parts_within_parts() -> None:
    """Every index from 0 is in exactly one of the processes of the shards."""
    parts = [gpu_suite.Part(s, 3).within(w, 4) for s in range(3) for w in range(4)]
    assert {part.count for part in parts} == {12}
    assert sorted(part.index for part in parts) == list(range(12))
