"""Files of rows: resumed after a kill, never lost, never mixed with those of another machine."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import pytest
from typer.testing import CliRunner

from fdk_bench.cli import app
from fdk_bench.row_log import RowLog
from fdk_bench.rows import Facts, Row, RowsError, read_records, to_json

HERE = Facts(
    benchmark="kernels",
    started="2026-11-28T00:00:00+00:00",
    command="fdk-bench kernels",
    commit="0123",
    device="a chip",
    threads=2,
    platform="Linux",
    versions={"torch": "2", "numpy": "1"},
    environment={},
)


@dataclass(frozen=True)
class Case:
    name: str
    m: int = 1


@dataclass(frozen=True)
class Values:
    time: float


def log_of(path, facts=HERE, resume=True):
    return RowLog(path, facts, Case, Values, resume=resume)


def written(path, *rows):
    path.write_text("".join(f"{to_json(row, HERE)}\n" for row in rows))
    return path


A, B, FAILED = Row(Case("a"), Values(1.0)), Row(Case("b"), Values(2.0)), Row(Case("c"), error="no")


def test_resumed_rows_stay_as_they_were_written(tmp_path):
    path = written(tmp_path / "rows.jsonl", A, FAILED)
    before = path.read_text()
    later = replace(HERE, started="2027-01-01T00:00:00+00:00", command="fdk-bench kernels --resume")
    log = log_of(path, later)
    assert log.rows == [A, FAILED]
    assert log.measured == {Case("a")}  # what failed is measured again
    log.append(B)
    assert path.read_text().startswith(before)
    assert [record["started"][:4] for record in read_records([path])] == ["2026", "2026", "2027"]
    assert log_of(path).rows == [A, FAILED, B]


def test_whole_case_is_the_key(tmp_path):
    log = log_of(written(tmp_path / "rows.jsonl", A))
    assert Case("a", m=2) not in log.measured


def test_cases_measured_again_are_dropped_with_the_first_new_row(tmp_path):
    path = written(tmp_path / "rows.jsonl", A, FAILED)
    before = path.read_text()
    log = log_of(path)
    log.forget([Case("c")])
    assert path.read_text() == before  # nothing is lost before there is something better
    log.append(B)
    assert [record["case"]["name"] for record in read_records([path])] == ["a", "b"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("cut", [1, 2, 40, -2])
def test_cut_last_line(cut, tmp_path, capsys):
    path = written(tmp_path / "rows.jsonl", A, Row(Case("µ"), Values(2.0)))
    first, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + last[:cut])
    log = log_of(path)
    assert log.rows == [A]
    assert "rows.jsonl:2: the last line was cut short and is left out" in capsys.readouterr().err
    assert path.read_bytes() == first + last[:cut]
    log.append(B)
    assert log_of(path).rows == [A, B]
    assert not capsys.readouterr().err


def test_line_cut_inside_a_letter(tmp_path, capsys):
    path = written(tmp_path / "rows.jsonl", A)
    path.write_bytes(path.read_bytes() + '{"benchmark": "µ'.encode()[:-1])
    assert log_of(path).rows == [A]
    assert "cut short" in capsys.readouterr().err


def test_only_the_newline_was_cut(tmp_path, capsys):
    path = written(tmp_path / "rows.jsonl", A, B)
    path.write_bytes(path.read_bytes()[:-1])
    log = log_of(path)
    assert log.rows == [A, B]
    log.append(FAILED)
    assert log_of(path).rows == [A, B, FAILED]
    assert not capsys.readouterr().err


def test_cut_elsewhere_is_no_row(tmp_path):
    path = written(tmp_path / "rows.jsonl", A)
    path.write_text(path.read_text()[:40] + "\n" + path.read_text())
    with pytest.raises(RowsError, match=r"rows\.jsonl:1: wanted JSON"):
        log_of(path)


def test_text_with_other_separators_of_lines(tmp_path):
    row = Row(Case("a\u2028b\x85c"), Values(1.0))
    assert log_of(written(tmp_path / "rows.jsonl", row)).rows == [row]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"commit": "4567"}, "another commit: wanted 4567, got 0123"),
        ({"device": "a faster chip"}, "another device: wanted a faster chip, got a chip"),
        ({"threads": 8}, "another threads: wanted 8, got 2"),
        ({"versions": {"torch": "3", "numpy": "1"}}, "wanted {'torch': '3'}, got {'torch': '2'}"),
        ({"environment": {"OMP_X": "1"}}, "wanted {'OMP_X': '1'}, got {'OMP_X': None}"),
        ({"benchmark": "compare"}, "another benchmark"),
    ],
)
def test_rows_of_another_run_are_refused(change, said, tmp_path):
    path = written(tmp_path / "rows.jsonl", A)
    before = path.read_text()
    with pytest.raises(RowsError) as refused:
        log_of(path, replace(HERE, **change))
    assert said in str(refused.value)
    assert "name another --out" in str(refused.value)
    assert path.read_text() == before


def test_rows_of_another_version_are_refused(tmp_path):
    path = written(tmp_path / "rows.jsonl", A)
    path.write_text(path.read_text().replace('"m": 1', '"rows": 1'))
    with pytest.raises(RowsError, match="of this version of fdk-bench"):
        log_of(path)


def test_without_resume_the_first_row_replaces_the_file(tmp_path):
    path = written(tmp_path / "rows.jsonl", A)
    path.chmod(0o640)
    log = log_of(path, resume=False)
    assert log.rows == []
    assert len(path.read_text().splitlines()) == 1
    log.append(B)
    assert log_of(path).rows == [B]
    assert path.stat().st_mode & 0o777 == 0o640


# Commands

TINY = ("-n", "32", "-k", "64", "--copies", "2", "--inner-reps", "1", "--outer-reps", "2")
TINY += ("--device", "cpu", "--backend", "reference", "-b", "16,4")


def started(*arguments):
    command = [sys.executable, "-m", "fdk_bench", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def killed_after(rows, path, *arguments):
    """Kill a command when it has written some rows; return the file's bytes."""
    process = started(*arguments)
    end = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < rows:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, "no rows in two minutes"
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    return path.read_bytes()


def finished(*arguments):
    process = started(*arguments)
    return process.communicate()[0], process.returncode


def cases(path):
    return [record["case"] for record in read_records([path])]


def test_killed_kernels_are_resumed(tmp_path):
    path = tmp_path / "kernels.jsonl"
    ms = ",".join(map(str, range(1, 81)))
    command = ("kernels", *TINY, "-m", ms, "--out", tmp_path)
    before = killed_after(5, path, *command)
    count = before.count(b"\n")
    assert 5 <= count < 160
    path.write_bytes(before + b'{"benchmark": "kern')  # as a kill in the middle of a write
    said, code = finished(*command)
    assert code == 2
    assert "holds rows of an earlier run: --resume goes on with them, --overwrite" in said
    assert path.read_bytes() == before + b'{"benchmark": "kern'
    said, code = finished(*command, "--resume")
    assert code == 0, said
    assert "the last line was cut short" in said
    whole = count // 2 * 2  # turns of two contenders; half a turn is measured again
    assert f"Resumed: {whole} rows" in said
    assert path.read_bytes().startswith(b"".join(before.splitlines(keepends=True)[:whole]))
    found = [(case["m"], case["format"]) for case in cases(path)]
    assert found == [(m, f) for m in range(1, 81) for f in ("bf16", "custom4-g64")]
    for record in read_records([path]):  # each compared with the 16 bits of its own turn
        assert (record["values"]["speedup_16"] is None) == (record["case"]["format"] == "bf16")
    assert (tmp_path / "kernels.md").read_text().count("\n| 32 x 64") == 160
    after = path.read_bytes()
    said, code = finished(*command, "--resume")
    assert (code, path.read_bytes()) == (0, after)  # nothing was left to measure


def test_half_a_turn_is_measured_again(tmp_path, monkeypatch):
    # torch sets it in the first run, and both are in this process.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    command = ["kernels", *TINY, "-m", "1,2", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, command).exit_code == 0
    path = tmp_path / "kernels.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]))
    done = CliRunner().invoke(app, [*command, "--resume"])
    assert done.exit_code == 0, done.output
    after = path.read_text().splitlines(keepends=True)
    assert after[:2] == lines[:2]
    assert len(after) == 4
    assert after[2] != lines[2]


@pytest.fixture
def accuracy(bert_folder, tmp_path):
    return (
        *("accuracy", "--model", bert_folder, "--formats", "int8,int4,int3,nf4,int2,int1"),
        *("--out", tmp_path),
    )


def test_killed_accuracy_is_resumed(accuracy, tmp_path):
    path, layers = tmp_path / "accuracy.jsonl", tmp_path / "layers.jsonl"
    before = killed_after(2, path, *accuracy)
    said, code = finished(*accuracy, "--resume")
    assert code == 0, said
    assert path.read_bytes().startswith(before.rpartition(b"\n")[0])
    formats = [case["format"] for case in cases(path)]
    assert formats == [f"{name}-g64" for name in ("int8", "int4", "int3", "nf4", "int2", "int1")]
    of_layers = [(case["format"], case["layer"]) for case in cases(layers)]
    assert len(of_layers) == len(set(of_layers)) == 6 * 12
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


def test_layers_of_a_format_whose_row_was_not_written(accuracy, tmp_path):
    arguments = [str(part) for part in accuracy]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    path = tmp_path / "accuracy.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    assert CliRunner().invoke(app, [*arguments, "--resume"]).exit_code == 0
    assert len(cases(path)) == 6
    assert len(cases(tmp_path / "layers.jsonl")) == 6 * 12


def test_killed_models_are_resumed(tmp_path, hf_folder):
    path = tmp_path / "models.jsonl"
    command = ("models", "--model", hf_folder, "--device", "cpu", "--no-compile", "--reps", "2")
    command += ("--context", "4", "--backend", "reference", "-b", "16,4", "--format", "int")
    command += ("-g", "32", "--batch-size", "1,2,3", "--dtype", "fp32", "--out", tmp_path)
    before = killed_after(1, path, *command)
    said, code = finished(*command, "--resume")
    assert code == 0, said
    assert path.read_bytes().startswith(before)
    found = [(case["format"], case["batch"]) for case in cases(path)]
    assert found == [(f, b) for f in ("fp32", "int4-g32") for b in (1, 2, 3)]
    for record in read_records([path]):
        assert (record["values"]["speedup_16"] is None) == (record["case"]["format"] == "fp32")


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (["kernels"], "kernels.jsonl"),
        (["compare"], "compare.jsonl"),
        (["models"], "models.jsonl"),
        (["accuracy"], "accuracy.jsonl"),
        (["accuracy", "--model", "m", "--text", "t"], "language.jsonl"),
    ],
)
def test_rows_are_not_lost_silently(command, file, tmp_path):
    path = tmp_path / file
    path.write_text("rows of a long night\n")
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "--resume goes on with them, --overwrite replaces them" in done.stderr
    assert path.read_text() == "rows of a long night\n"
    for wrong, said in (
        (["--resume"], "--resume: wanted --out with it"),
        (["--resume", "--overwrite", "--out", str(tmp_path)], "wanted one of them, got both"),
    ):
        done = CliRunner().invoke(app, [*command, *wrong])
        assert done.exit_code == 2
        assert said in done.stderr


def test_rows_of_another_commit_are_refused_by_a_command(tmp_path, monkeypatch):
    command = ["kernels", *TINY, "-m", "1", "--out", str(tmp_path)]
    monkeypatch.setenv("FDK_COMMIT", "0123")
    assert CliRunner().invoke(app, command).exit_code == 0
    monkeypatch.setenv("FDK_COMMIT", "4567")
    before = (tmp_path / "kernels.jsonl").read_text()
    done = CliRunner().invoke(app, [*command, "--resume"])
    assert done.exit_code == 2
    assert "rows of another commit: wanted 4567, got 0123" in done.stderr
    assert (tmp_path / "kernels.jsonl").read_text() == before


def test_plot_says_that_a_line_was_cut(tmp_path, kernel):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(kernel())}\n{json.dumps(kernel(m=2))[:-20]}")
    done = CliRunner().invoke(app, ["plot", str(path), "--out", str(tmp_path / "plots")])
    assert done.exit_code == 0, done.output
    assert "rows.jsonl:2: the last line was cut short and is left out" in done.stderr
    assert (tmp_path / "plots" / "report.html").is_file()
