"""Rows as lines of JSON: case, values and facts."""

import json
import subprocess
from dataclasses import dataclass

import pytest

import fdk_bench
from fdk_bench.rows import (
    Row,
    cpu_name,
    environment,
    gather_facts,
    source_commit,
    to_json,
)


@dataclass(frozen=True)
class Case:
    name: str


@dataclass(frozen=True)
class Values:
    error: float


def test_row_is_one_line_of_json(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/bin/fdk-bench", "accuracy", "--skip", "a b"])
    facts = gather_facts("accuracy", device="a µ-chip", threads=2, modules=("json", "absent"))
    line = to_json(Row(Case("x\ny"), Values(0.5)), facts)
    assert "\n" not in line
    record = json.loads(line)
    assert record["benchmark"] == "accuracy"
    assert record["case"] == {"name": "x\ny"}
    assert record["values"] == {"error": 0.5}
    assert record["error"] is None
    assert record["command"] == "fdk-bench accuracy --skip 'a b'"
    assert (record["device"], record["threads"]) == ("a µ-chip", 2)
    assert record["versions"]["fdk_bench"] == fdk_bench.__version__
    assert record["versions"]["absent"] == "not imported"
    assert record["started"].endswith("+00:00")


def test_row_of_a_failure():
    facts = gather_facts("accuracy", device="d", threads=1)
    record = json.loads(to_json(Row(Case("x"), error="ValueError: no"), facts))
    assert (record["values"], record["error"]) == (None, "ValueError: no")


def test_infinity_is_refused():
    # JSON has no infinity: a reader of the file would fail on it long after the run.
    facts = gather_facts("accuracy", device="d", threads=1)
    with pytest.raises(ValueError, match="JSON compliant"):
        to_json(Row(Case("x"), Values(float("inf"))), facts)


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_source_commit(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    assert source_commit(package) is None  # no checkout
    (package / "file").write_text("one")
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "empty")
    assert source_commit(package) is None  # in a checkout, but not of it
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert source_commit(package) == head
    (package / "file").write_text("two")
    assert source_commit(package) == f"{head}-dirty"


def test_source_commit_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert source_commit(tmp_path) is None


def test_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FDK_GGML", str(tmp_path / "ggml"))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found = environment()
    assert (found["FDK_GGML"], found["OMP_NUM_THREADS"]) == ("ggml", "2")
    assert "PATH" not in found


@pytest.mark.parametrize(
    ("name", "family", "model", "expected"),
    [
        ("AMD EPYC", 26, 2, "AMD EPYC (family 26, model 2)"),
        ("AMD EPYC", 25, 17, "AMD EPYC (family 25, model 17)"),
        ("AMD EPYC 9654", 25, 97, "AMD EPYC 9654"),
        ("Intel Xeon CPU @ 2.20GHz", 6, 85, "Intel Xeon CPU @ 2.20GHz (family 6, model 85)"),
        (
            "QEMU Virtual CPU version 2.5+",
            15,
            107,
            "QEMU Virtual CPU version 2.5+ (family 15, model 107)",
        ),
    ],
)
def test_cpu_name(tmp_path, name, family, model, expected):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"cpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: {name}\n")
    assert cpu_name(cpuinfo) == expected


def test_cpu_name_of_this_machine(tmp_path):
    assert cpu_name().strip()
    assert cpu_name(tmp_path / "absent").strip()
