"""Runs compared as ratios to their floors; noise is told from change."""

import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fdk_bench.cli import app
from fdk_bench.guard import changes, remember
from fdk_bench.records import cpu_name


def record(time=2.0, floor=1.0, spread=0.01, **changed):
    row = {
        "benchmark": "kernels",
        "case": {
            "m": 1,
            "n": 64,
            "k": 64,
            "format": "int4-g64",
            "dtype": "bf16",
            "device": "cpu",
            "backend": "auto",
        },
        "values": {"time": time, "floor": floor, "spread": spread, "backend": "cpu"},
        "error": None,
        "device": "chip",
        "threads": 2,
    }
    return row | changed


def compare(before, after):
    return list(changes([before], [after]))


@pytest.mark.parametrize(
    ("time", "floor", "slower", "faster"),
    [
        (2.0, 1.0, False, False),
        (4.0, 2.0, False, False),  # a machine that is slow as a whole
        (2.19, 1.0, False, False),  # within 10 %
        (2.21, 1.0, True, False),
        (1.83, 1.0, False, False),
        (1.80, 1.0, False, True),
    ],
)
def test_change_is_of_the_ratio_to_the_floor(time, floor, slower, faster):
    (change,) = compare(record(time=1.0, floor=0.5), record(time=time, floor=floor))
    assert (change.before, change.after) == (2.0, time / floor)
    assert (change.slower, change.faster) == (slower, faster)


def test_rows_of_another_method_are_not_compared():
    """Turns in one order counted their first calls: short kernels took up to 1.4 times as long."""
    old, new = record(time=2.0), record(time=2.0)
    old["values"]["method"], new["values"]["method"] = "calls", "turns"
    assert compare(old, new) == []
    old["values"]["method"] = "turns"
    assert len(compare(old, new)) == 1


def test_spread_of_both_runs_is_noise():
    # 3 * sqrt(0.03^2 + 0.04^2) = 15 %.
    (change,) = compare(record(spread=0.03), record(time=2.2, spread=0.04))
    assert change.noise == pytest.approx(0.15)
    assert not change.slower
    (change,) = compare(record(spread=0.03), record(time=2.4, spread=0.04))
    assert change.slower


def test_only_the_same_case_on_the_same_machine_class():
    assert compare(record(), record(device="other")) == []
    assert compare(record(), record(threads=1)) == []
    assert compare(record(), record(case=record()["case"] | {"m": 2})) == []
    assert compare(record(), record(values=None, error="no")) == []
    on_gpu = record()["case"] | {"device": "cuda"}
    assert len(compare(record(case=on_gpu, threads=8), record(case=on_gpu, threads=16))) == 1


def test_generations_of_one_name_are_two_machine_classes(tmp_path):
    """Virtual machines of Zen 4 and Zen 5 both say AMD EPYC; rows of before say no more."""
    told = tmp_path / "cpuinfo"
    devices = ["AMD EPYC"]
    for family, model in (25, 17), (26, 2), (26, 17):
        told.write_text(f"cpu family: {family}\nmodel: {model}\nmodel name: AMD EPYC\n")
        devices.append(cpu_name(told))
    for before, after in itertools.product(devices, repeat=2):
        found = compare(record(device=before), record(device=after))
        assert len(found) == (before == after)
    last = tmp_path / "last.jsonl"
    for device in devices:
        remember(last, [record(device=device)])
    assert [json.loads(line)["device"] for line in last.read_text().splitlines()] == devices


def test_remember_replaces_and_keeps(tmp_path):
    path = tmp_path / "bench" / "last.jsonl"
    remember(path, [record(), record(device="other", time=9.0)])
    remember(path, [record(time=3.0), record(device="third", values=None, error="no")])
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["device"], r["values"]["time"]) for r in kept] == [("chip", 3.0), ("other", 9.0)]


def run(*arguments):
    return CliRunner().invoke(app, ["guard", *map(str, arguments)])


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_command(tmp_path):
    last = tmp_path / "last.jsonl"
    first = run(write(tmp_path / "new.jsonl", record()), "--last", last)
    assert first.exit_code == 0, first.output
    assert "0 of 1 cases are in " in first.stdout
    second = run(write(tmp_path / "new.jsonl", record(time=3.0)), "--last", last, "--no-update")
    assert second.exit_code == 0
    assert "SLOWER m1-n64-k64-int4-g64-cpu: 2.00 -> 3.00 times the floor" in second.stdout
    assert "1 got slower than the noise" in second.stdout
    third = run(tmp_path / "new.jsonl", "--last", last, "--json")
    assert json.loads(third.stdout)["slower"] is True
    assert "0 got slower" in run(tmp_path / "new.jsonl", "--last", last).stdout


def test_blank_lines_are_no_rows(tmp_path):
    last, new = tmp_path / "last.jsonl", write(tmp_path / "new.jsonl", record())
    last.write_text(f"\n{json.dumps(record(device='other'))}\n\n")
    assert run(new, "--last", last).exit_code == 0
    assert [json.loads(line)["device"] for line in last.read_text().splitlines()] == [
        "other",
        "chip",
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"case": {}},
        {"case": None},
        {"values": {}},
        {"values": record(floor=0.0)["values"]},
        {"threads": None},
    ],
)
def test_rows_that_are_not_whole(changed, tmp_path):
    whole, broken = record(), record(**changed)
    for new, last in (whole, broken), (broken, whole):
        files = write(tmp_path / "new.jsonl", new), write(tmp_path / "last.jsonl", last)
        done = run(files[0], "--last", files[1])
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"{files[new is whole].name}:1: wanted " in done.stderr
        assert json.loads(files[1].read_text()) == last


def test_last_that_cannot_be_a_file(tmp_path):
    new = write(tmp_path / "new.jsonl", record())
    for last in (tmp_path, Path("/dev/full"), new / "last.jsonl", new / "folder" / "last.jsonl"):
        done = run(new, "--last", last)
        assert (done.exit_code, done.stdout) == (2, "")
        assert "--last: " in done.stderr


def test_bad_usage(tmp_path):
    (tmp_path / "bad").write_text("no\n")
    assert run(tmp_path / "bad").exit_code == 2
    assert run(tmp_path / "absent").exit_code == 2
