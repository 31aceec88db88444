"""Rows recorded in one go, and what Ctrl-C keeps."""

import json
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from fdk_bench.cli import app
from fdk_bench.commands import record as recording
from fdk_bench.commands.common import prepare_environment


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


TINY = ("-n", "32", "-k", "64", "-m", "1,2", "--copies", "2", "--outer-reps", "1", "-b", "16,4")


# Minutes of cases: the signal comes before their end, even if this process waits for its turn.
TOTAL = 2000
MANY = ",".join(map(str, range(1, TOTAL + 1)))


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Two tiny parts, the second of which fails, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    failing = (*TINY, "--backend", "reference", "--format", "int4-g48", "--against", "none")
    found = (
        recording.Part("kernels", "kernels", (*TINY, "--backend", "reference")),
        recording.Part("compare-1-thread", "compare", failing),  # 48 does not divide 64
    )
    monkeypatch.setattr(recording, "ON_CPU", found)
    return found


def test_record(parts, tmp_path):
    done = run("record", "docs/chip", "--device", "cpu", "--json")
    assert done.exit_code == 1
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(r["part"], r["exit"]) for r in found] == [("kernels", 0), ("compare-1-thread", 1)]
    assert "kernels: part 1 of 2" in done.stderr
    folder = tmp_path / "docs" / "chip"
    wanted = {"kernels.jsonl", "compare-1-thread.jsonl", "bits.svg"}
    assert wanted <= {p.name for p in folder.iterdir()}
    first = json.loads((folder / "kernels.jsonl").read_text().splitlines()[0])
    assert first["command"].startswith("fdk-bench kernels -n 32 -k 64")
    for only in ("nothing", "", ","):
        assert run("record", "x", "--device", "cpu", "--only", only).exit_code == 2


def test_parts_are_of_one_commit(parts, tmp_path, monkeypatch):
    commits = iter(["aaaa", "aaaa-dirty", "aaaa-dirty"])
    monkeypatch.setattr(recording, "source_commit", lambda: next(commits))
    recording._commit.cache_clear()
    try:
        assert run("record", "chip", "--device", "cpu").exit_code == 1
    finally:
        recording._commit.cache_clear()
    for part in parts:
        rows = (tmp_path / "chip" / f"{part.name}.jsonl").read_text().splitlines()
        assert {json.loads(row)["commit"] for row in rows} == {"aaaa"}


def test_record_goes_on_after_an_interrupt(parts, tmp_path, monkeypatch, kernel):
    asked = []

    def answer(part, device, end):
        asked.append(part.name)
        folder = recording.WORK / part.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{part.benchmark}.jsonl").write_text(json.dumps(kernel()) + "\n")
        if len(asked) == 2:
            return 130
        (folder / "done.json").write_text(json.dumps([0, *part.arguments]))
        return 0

    monkeypatch.setattr(recording, "_run", answer)
    monkeypatch.setattr(recording, "_plot", lambda *arguments, **named: None)
    assert run("record", "chip", "--device", "cpu").exit_code == 130
    assert [path.name for path in (tmp_path / "chip").iterdir()] == ["kernels.jsonl"]
    assert run("record", "chip", "--device", "cpu", "--resume").exit_code == 0
    assert asked == ["kernels", "compare-1-thread", "compare-1-thread"]
    assert (tmp_path / "chip" / "compare-1-thread.jsonl").is_file()


@pytest.mark.parametrize(
    ("code", "table", "expected"),
    [(0, True, 0), (1, True, 1), (1, False, 130), (-9, False, 130), (2, False, 2)],
    ids=["ended", "failed-rows", "raised", "killed", "usage"],
)
def test_a_part_that_did_not_end_is_not_kept(code, table, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = "import os, pathlib, sys\n"
    script += f"folder = pathlib.Path({str(recording.WORK / 'kernels')!r})\n"
    script += "folder.mkdir(parents=True)\n(folder / 'kernels.jsonl').write_text('half a row')\n"
    script += "(folder / 'kernels.md').write_text('')\n" if table else ""
    script += "os.kill(os.getpid(), 9)\n" if code < 0 else f"sys.exit({code})\n"
    command = [sys.executable, "-S", "-c", script]
    monkeypatch.setattr(recording, "_command", lambda *arguments: command)
    part = recording.Part("kernels", "kernels", ())
    assert recording._run(part, "cpu") == expected


def test_a_part_that_takes_too_long_is_asked_to_stop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(recording, "_command", lambda *arguments: command)
    start = time.perf_counter()
    assert recording._run(recording.Part("kernels", "kernels", (), limit=0.5), "cpu") == 130
    assert time.perf_counter() - start < 60


def test_rows_of_a_part_that_is_cut_are_kept(tmp_path, monkeypatch, kernel):
    """It stops when asked to, as commands do, and the rows until then are in the folder."""
    monkeypatch.chdir(tmp_path)
    script = "import pathlib, signal, sys, time\n"
    script += "signal.signal(signal.SIGINT, lambda *_: sys.exit(130))\n"
    script += (
        f"folder = pathlib.Path({str(recording.WORK / 'kernels')!r})\nfolder.mkdir(parents=True)\n"
    )
    script += f"(folder / 'kernels.jsonl').write_text({json.dumps(kernel())!r})\ntime.sleep(600)\n"
    command = [sys.executable, "-S", "-c", script]
    monkeypatch.setattr(recording, "_command", lambda *arguments: command)
    monkeypatch.setattr(recording, "_plot", lambda *arguments, **named: None)
    monkeypatch.setattr(recording, "ON_CPU", (recording.Part("kernels", "kernels", (), limit=5.0),))
    assert run("record", "chip", "--device", "cpu").exit_code == 130
    assert json.loads((tmp_path / "chip" / "kernels.jsonl").read_text()) == kernel()


@pytest.mark.parametrize(
    ("before", "command", "kept"),
    [
        (0, "fdk-bench kernels -k 64", 2),
        (1, "fdk-bench kernels -k 64", 2),
        (3, "fdk-bench kernels -k 64", 3),
        (3, "fdk-bench kernels -k 128", 2),  # other cases: more of them are not more of ours
    ],
)
def test_a_part_that_is_cut_replaces_no_more_rows(
    before, command, kept, tmp_path, monkeypatch, kernel
):
    monkeypatch.chdir(tmp_path)
    part, line = recording.Part("kernels", "kernels", ()), json.dumps(kernel()) + "\n"
    measured, recorded = recording.WORK / "kernels", tmp_path / "chip" / "kernels.jsonl"
    for folder in (measured, recorded.parent):
        folder.mkdir(parents=True)
    (measured / "kernels.jsonl").write_text(2 * line)
    if before:
        recorded.write_text(before * (json.dumps(kernel(command=command)) + "\n"))
    (measured / recording.CUT).touch()
    recording._keep(part, recorded.parent)
    assert recorded.read_text().count("\n") == kept
    (measured / recording.CUT).unlink()  # one that ended replaces what there is
    recording._keep(part, recorded.parent)
    assert recorded.read_text() == 2 * line


def test_record_compiles_ahead(parts, tmp_path, monkeypatch):
    arguments = parts[0].arguments
    part = recording.Part("kernels", "kernels", arguments, warm=(arguments, ("--no-such",)))
    monkeypatch.setattr(recording, "ON_CPU", (part,))
    done = run("record", "chip", "--device", "cpu", "--compile-seconds", "600", "--jobs", "1")
    assert "not ended well: kernels-warm/1" in done.stderr
    assert "fdk-bench" in (recording.WORK / "kernels-warm" / "1" / "log.txt").read_text()
    assert done.exit_code == 0  # what failed there is compiled when it is timed


def test_record_counts_what_had_no_time_to_compile(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    part = recording.Part("kernels", "kernels", (), warm=((),) * 3)
    monkeypatch.setattr(recording, "run_side_by_side", lambda *given: [1, -9, 0])
    recording._warm([part], "cpu", 2, time.perf_counter() + 60)
    printed = capsys.readouterr().err
    assert printed.endswith(" s, not ended well: kernels-warm/0; 1 of 3 had no time\n")
    monkeypatch.setattr(recording, "run_side_by_side", lambda *given: pytest.fail("started"))
    recording._warm([part], "cpu", 2, time.perf_counter())
    assert capsys.readouterr().err == ""


def test_record_compiles_nothing_ahead_in_no_time(parts, monkeypatch):
    part = recording.Part("kernels", "kernels", parts[0].arguments, warm=(("--help",),))
    monkeypatch.setattr(recording, "ON_CPU", (part,))
    done = run("record", "chip", "--device", "cpu", "--compile-seconds", "0", "--no-figures")
    assert done.exit_code == 0
    assert "ahead" not in done.stderr
    assert not (recording.WORK / "kernels-warm").exists()


# Ctrl-C


def interrupted(command, folder):
    """Runs a command and sends it SIGINT once it wrote two rows; its code and what it printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fdk_bench", *map(str, command), "--out", folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A job in the background ignores SIGINT, and what it starts inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    path = folder / f"{command[0]}.jsonl"
    while process.poll() is None:
        if path.is_file() and path.read_text().count("\n") >= 2:
            process.send_signal(signal.SIGINT)
            break
        time.sleep(0.02)
    output, _ = process.communicate(timeout=600)
    return process.returncode, output


SWALLOWS_SIGINT = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
except BaseException:
    pass
"""


def test_sigint_while_torch_is_imported(tmp_path):
    (tmp_path / "torch.py").write_text(SWALLOWS_SIGINT)
    code = "from fdk_bench.commands.common import prepare_environment as p; p(); print('went on')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_sigint_after_torch_is_imported():
    before = signal.getsignal(signal.SIGINT)
    prepare_environment()
    assert signal.getsignal(signal.SIGINT) is before


ON_CPU = ("--device", "cpu", "--backend", "reference")


@pytest.mark.parametrize(
    "command",
    [
        ("kernels", "-n", "32", "-k", "64", "-m", MANY, "-b", "16,4", "--seconds", "0.1"),
        ("models", "-b", "16", "--batch-size", MANY, "--no-compile", "--context", "4"),
    ],
    ids=lambda command: command[0],
)
def test_sigint_keeps_what_was_measured(command, tmp_path):
    code, output = interrupted((*command, *ON_CPU), tmp_path)
    assert code == 130, output
    assert "Interrupted after" in output
    rows = (tmp_path / f"{command[0]}.jsonl").read_text()
    kept = [json.loads(line) for line in rows.splitlines()]
    assert 2 <= len(kept) < TOTAL
    assert all(row["error"] is None for row in kept)
    table = (tmp_path / f"{command[0]}.md").read_text()
    assert table.count("\n| ") == len(kept) + 1  # and the line of dashes
