"""Kernels measured on tiny shapes: rows, checks, speed-ups, the command line."""

import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear
from typer.testing import CliRunner

from fdk_bench import kernels
from fdk_bench.cases import KernelCase
from fdk_bench.cli import app
from fdk_bench.kernels import KernelRun, KernelValues, measure, with_speedups
from fdk_bench.peers import Dense, Prepared, WrongAnswerError, check
from fdk_bench.peers.dense import Fdk
from fdk_bench.roofline import CpuFloor
from fdk_bench.rows import Row
from fdk_bench.tables import KERNELS, seconds_text
from fdk_bench.timing import CutShortError

TINY = ("-n", "32", "-k", "64", "--copies", "2", "--inner-reps", "1", "--outer-reps", "2")
# The backend that is always there: wheels of fdk-bench are tested without the others.
DEVICE = ("--device", "cpu", "--backend", "reference")


def tiny_run(**changes):
    run = KernelRun(
        shapes=[(32, 64)],
        ms=[1, 3],
        formats=["bf16", "custom4-g32"],
        dtype="bf16",
        device="cpu",
        backends=["reference"],
        copies=2,
        inner=1,
        outer=2,
    )
    return replace(run, **changes)


def run(*arguments, command="kernels"):
    return CliRunner().invoke(app, [command, *map(str, arguments)])


def records(text):
    return [json.loads(line) for line in text.splitlines()]


def test_values():
    rows = list(measure(tiny_run()))
    assert [str(row.case) for row in rows] == [
        "m1-n32-k64-bf16-bf16-cpu-torch",
        "m1-n32-k64-custom4-g32-bf16-cpu-reference",
        "m3-n32-k64-bf16-bf16-cpu-torch",
        "m3-n32-k64-custom4-g32-bf16-cpu-reference",
    ]
    dense, quantised = rows[2].values, rows[3].values
    assert (dense.weight_bytes, dense.bits_per_weight) == (32 * 64 * 2, 16)
    # Codes 32 * 32, scales 32 * 2 * 2, codebook 16 * 4; x 3 * 64 and y 3 * 32 of 2 bytes.
    assert quantised.weight_bytes == 1024 + 128 + 64
    assert quantised.bytes == 1216 + 3 * (64 + 32) * 2
    assert quantised.bits_per_weight == 4.5
    assert quantised.operations == 2 * 3 * 32 * 64
    assert (quantised.backend, quantised.copies, quantised.samples) == ("reference", 2, 2)
    assert (quantised.method, quantised.eager_time) == ("turns", None)
    for values in (dense, quantised):
        assert values.bandwidth == pytest.approx(values.bytes / values.time)
        assert values.throughput == pytest.approx(values.operations / values.time)
        assert values.floor_share == pytest.approx(values.floor / values.time)
        assert 0 < values.time_min <= values.time
        assert 1e-4 < values.error < 1e-2  # bf16 rounds y
    assert quantised.speedup_16 == pytest.approx(dense.time / quantised.time)
    assert dense.speedup_16 is quantised.best_peer is None


def test_int8_activations():
    run = tiny_run(activations=["float", "int8"])
    rows = [row for row in measure(run) if row.case.quantised]
    assert [str(row.case) for row in rows] == [
        f"m{m}-n32-k64-custom4-g32-bf16{rounded}-cpu-reference"
        for m in (1, 3)
        for rounded in ("", "-int8")
    ]
    for row in rows:
        assert row.error is None
        assert KERNELS.cells(row)["by"].endswith(" int8") == (row.case.activations == "int8")
    # The error of rounding x adds to that of bf16.
    assert rows[2].values.error < 0.004 < rows[3].values.error < 0.02
    assert rows[3].values.backend == "reference int8"


def test_int8_is_checked_against_its_definition():
    case = KernelCase(1, 32, 64, "custom4-g32", "bf16", "cpu", "reference", "int8")
    prepared = Fdk().prepare(case, 1)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    check(prepared, [x])
    exact = Fdk().prepare(replace(case, activations="float"), 1)
    with pytest.raises(WrongAnswerError, match="wrong answer at m=3"):
        check(replace(prepared, calls=exact.calls), [x])


def values_of(time):
    return KernelValues("b", 4, 1, 1, 1, 0, time, time, 0, 1, "calls", None, 1, 1, 1, 1, 1)


def test_with_speedups():
    base = KernelCase(1, 8, 64, "int4-g64", "bf16", "cpu", "auto")
    rows = [
        Row(replace(base, format="bf16", backend="torch"), values_of(12.0)),
        Row(base, values_of(2.0)),
        Row(replace(base, backend="slow"), values_of(8.0)),
        Row(replace(base, backend="fast"), values_of(3.0)),
        Row(replace(base, backend="fast", format="int2-g64"), values_of(1.0)),
        Row(replace(base, backend="fast", format="int4-g32"), values_of(1.0)),
        Row(replace(base, backend="broken"), error="no"),
    ]
    compared = with_speedups(rows, {"slow", "fast", "broken"})
    found = [row.values and (row.values.speedup_16, row.values.best_peer) for row in compared]
    # Peers at other bits or group sizes do not count, and no case is its own peer.
    alone = (12.0, None)
    expected = [(None, None), (6.0, "fast"), (1.5, "fast"), (4.0, "slow"), alone, alone, None]
    assert found == expected
    assert compared[1].values.speedup_peer == 1.5
    assert compared[3].values.speedup_peer == 8 / 3


class Wrong:
    """A contender that computes with a weight that is not its own."""

    name, note = "wrong", ""

    def missing(self):
        return None

    def unsupported(self, case):
        return "needs codes" if case.quantised is None else None

    def prepare(self, case, copies=None):
        W = torch.randn(case.n, case.k, generator=torch.Generator().manual_seed(1)).bfloat16()
        off = W.clone()
        off[3, 5] += 8
        return Prepared([lambda x: linear(x, off)], W.to, W.nbytes, "wrong")


def test_wrong_answer_is_not_timed():
    rows = list(measure(tiny_run(peers=[Wrong()])))
    wrong = [row for row in rows if row.case.backend == "wrong"]
    assert [row.case.m for row in wrong] == [1, 3]
    for row in wrong:
        assert row.values is None
        assert row.error.startswith("WrongAnswerError: wrong answer at m=")
    assert sum(row.values is not None for row in rows) == 4


class Elsewhere(Dense):
    """A contender with a place for its turns, which records what happens there."""

    name = "elsewhere"

    def __init__(self):
        self.seen = []

    def unsupported(self, case):
        return None

    def prepare(self, case, copies=None):
        prepared = super().prepare(case, copies)
        return replace(prepared, place=self.place, rest=lambda: self.seen.append("rest"))

    def place(self, turn):
        self.seen.append("turn")
        return turn()


def test_turns_run_in_the_place_of_their_contender():
    peer = Elsewhere()
    rows = list(measure(tiny_run(ms=[1], formats=["bf16"], peers=[peer])))
    assert [row.case.backend for row in rows if row.values] == ["torch", "elsewhere"]
    assert peer.seen == ["turn", "rest"] * 3  # the warm-up and two turns


def test_check_refuses_another_shape():
    case = KernelCase(1, 32, 64, "bf16", "bf16", "cpu", "torch")
    right = Dense().prepare(case, 1)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert check(right, [x])[0] < 3e-3
    cut = replace(right, calls=[lambda x: linear(x, right.weight(x.dtype))[:, :-1]])
    with pytest.raises(WrongAnswerError, match=r"y must be \[2, 32\], got \[2, 31\]"):
        check(cut, [x])


def test_check_sees_an_output_that_is_not_written():
    case = KernelCase(1, 32, 64, "bf16", "bf16", "cpu", "torch")
    right = Dense().prepare(case, 1)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    answers = [right.calls[0](x)]

    def leaves_the_last_column(x):
        y = torch.empty(2, 32, dtype=x.dtype)
        if y[0, -1].isnan():  # what memory held before may be the answer to the same question
            y[:, :-1] = answers[0][:, :-1]
            return y
        return answers[0].clone()

    with pytest.raises(WrongAnswerError, match="error inf"):
        check(replace(right, calls=[leaves_the_last_column]), [x])


def test_failing_case_is_a_row():
    rows = list(measure(tiny_run(formats=["bf16", "int4-g48", "int4-g64"])))
    failed = [row for row in rows if row.values is None]
    assert [(row.case.format, row.case.m) for row in failed] == [("int4-g48", 1), ("int4-g48", 3)]
    assert all("k must be a positive multiple of 48, got k=64" in row.error for row in failed)
    assert len(rows) == 6


def test_what_memory_does_not_hold_is_a_row():
    run = tiny_run(ms=[1, 10**11], shapes=[(32, 64), (32, 64 * 10**12)])
    rows = list(measure(run))
    assert len(rows) == len(run.cases()) == 8
    assert [(row.case.m, row.case.k) for row in rows if row.error is None] == [(1, 64)] * 2
    rows = list(measure(tiny_run(copies=10**12)))
    assert len(rows) == 4
    assert all("MemoryError: --copies: 1000000000000 of " in row.error for row in rows)


def test_copies_are_of_their_own():
    case = KernelCase(1, 32, 64, "custom4-g32", "bf16", "cpu", "reference")
    prepared = Fdk().prepare(case, 3)
    assert len({layout.packed.data_ptr() for layout in prepared.calls}) == 3
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    first, *others = [layout(x) for layout in prepared.calls]
    assert all(torch.equal(first, y) for y in others)


def test_include_and_exclude():
    assert len(tiny_run().cases()) == 4
    assert len(tiny_run(include="m3-.*custom4").cases()) == 1
    assert len(tiny_run(exclude="custom").cases()) == 2


def test_floor_is_bytes_over_a_measured_rate(monkeypatch):
    monkeypatch.setattr("fdk_bench.roofline.cold_bytes", lambda device: 4000)
    clock = itertools.accumulate([0, 1, 0, 4, 0, 2, 0, 8])  # probes of 1, 4, 2 and 8 seconds
    monkeypatch.setattr("fdk_bench.roofline.time", SimpleNamespace(perf_counter=clock.__next__))
    floor = CpuFloor()
    floor.probe()
    floor.probe()
    # Each probe reads a quarter, 1000 bytes.
    assert floor._rates == [1000, 250, 500]
    assert floor.seconds(2_000_000) == 4000
    floor.begin()  # the machine may have another speed by now
    floor.probe()
    assert floor.seconds(2000) == 16


# Command line


def test_outputs(tmp_path):
    done = run(*TINY, *DEVICE, "-m", "1,2", "-b", "16", "-b", "4,1", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    rows = records((tmp_path / "kernels.jsonl").read_text())
    assert [(r["case"]["m"], r["case"]["format"]) for r in rows] == [
        (m, format) for m in (1, 2) for format in ("bf16", "custom4-g64", "custom1-g64")
    ]
    for r in rows:
        assert KernelCase(**r["case"]).k == 64
        assert KernelValues(**r["values"]).samples == 2
        assert r["versions"]["torch"] == torch.__version__
        assert (r["benchmark"], r["error"], bool(r["device"])) == ("kernels", None, True)
        assert "GOMP_SPINCOUNT" in r["environment"] or "OMP_PROC_BIND" in r["environment"]
    assert re.search(r"32 x 64 +1 ", done.stdout)
    for line in (tmp_path / "kernels.md").read_text().splitlines()[:8]:
        assert line.startswith("| ")
    time = seconds_text(rows[2]["values"]["time"])
    assert f"| {time} |" in (tmp_path / "kernels.md").read_text()
    assert time in done.stdout


def test_json(tmp_path):
    done = run(*TINY, *DEVICE, "-m", "1", "-b", "16,4", "--json", "--out", tmp_path)
    assert done.exit_code == 0
    assert done.stdout == (tmp_path / "kernels.jsonl").read_text()
    assert len(records(done.stdout)) == 2


def test_failed_row(tmp_path):
    formats = ("--format", "int4-g48,int4-g64")
    done = run(*TINY, *DEVICE, "-m", "1", *formats, "-b", "16", "--out", tmp_path)
    assert done.exit_code == 1
    errors = [r["error"] for r in records((tmp_path / "kernels.jsonl").read_text())]
    assert sum(error is not None for error in errors) == 1
    assert "int4-g48" in done.stdout
    assert "failed: " in done.stdout


def test_interrupt_keeps_what_was_measured(tmp_path, monkeypatch):
    measured = kernels._measure_turns

    def interrupted(run, floor, x, checked):
        if x.shape[0] == 2:
            raise KeyboardInterrupt
        return measured(run, floor, x, checked)

    monkeypatch.setattr(kernels, "_measure_turns", interrupted)
    done = run(*TINY, *DEVICE, "-m", "1,2,3", "-b", "16,4", "--out", tmp_path)
    assert done.exit_code == 130
    assert [r["case"]["m"] for r in records((tmp_path / "kernels.jsonl").read_text())] == [1, 1]
    assert "Interrupted after 2 of 6 rows" in done.stdout
    assert (tmp_path / "kernels.md").read_text().count("\n| 32 x 64") == 2


def test_rows_of_turns_that_were_cut_short(tmp_path, monkeypatch):
    timed = kernels.time_calls

    def cut(*arguments, **named):
        raise CutShortError(timed(*arguments, **named))

    monkeypatch.setattr(kernels, "time_calls", cut)
    done = run(*TINY, *DEVICE, "-m", "1,2", "-b", "16,4", "--out", tmp_path)
    assert done.exit_code == 130
    rows = records((tmp_path / "kernels.jsonl").read_text())
    assert [(r["case"]["m"], r["case"]["format"]) for r in rows] == [
        (1, "bf16"),
        (1, "custom4-g64"),
    ]
    assert rows[1]["values"]["speedup_16"] > 0
    assert "Interrupted after 2 of 4 rows" in done.stdout
    assert f"Results are in {tmp_path}" in done.stdout


def test_nothing_was_measured(tmp_path, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "time_calls", stopped)
    done = run(*TINY, *DEVICE, "-m", "1", "-b", "4", "--out", tmp_path)
    assert done.exit_code == 130
    assert f"Nothing was measured: no row was written to {tmp_path}" in done.stdout
    assert "Results are in" not in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_run_without_rows_leaves_those_of_the_last(tmp_path, monkeypatch):
    assert run(*TINY, *DEVICE, "-m", "1", "-b", "4", "--out", tmp_path).exit_code == 0
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}

    def ended(error):
        raise error
        yield

    for error, code in ((KeyboardInterrupt, 130), (RuntimeError, 1)):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "measure", lambda *_, error=error: ended(error))
            done = run(*TINY, *DEVICE, "-m", "1", "-b", "4", "--out", tmp_path, "--overwrite")
        assert done.exit_code == code
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
    done = run(*TINY, *DEVICE, "-m", "2", "-b", "4", "--out", tmp_path, "--overwrite")
    assert done.exit_code == 0
    (row,) = records((tmp_path / "kernels.jsonl").read_text())
    assert row["case"]["m"] == 2


def test_compare_command_names_who_is_absent(tmp_path):
    peers = ("--against", "int4pack,tinygemm")
    done = run(*TINY, *DEVICE, "-m", "1", *peers, "--out", tmp_path, command="compare")
    assert done.exit_code == 0, done.output
    rows = records((tmp_path / "compare.jsonl").read_text())
    assert [r["case"]["backend"] for r in rows] == ["torch", "reference", "int4pack"]
    assert rows[1]["values"]["best_peer"] == "int4pack"
    assert rows[2]["values"]["bits_per_weight"] == 4.5
    assert "not measured: tinygemm: needs " in done.stdout
    assert "int4pack: integer grid with zero points" in done.stdout


def test_compare_goes_on_after_a_shape_that_groups_do_not_divide(tmp_path):
    shapes = ("--shapes", "32x100,32x64", "-b", "4", "--against", "int4pack,tinygemm")
    done = run(*TINY[4:], *DEVICE, "-m", "1", *shapes, "--out", tmp_path, command="compare")
    assert done.exit_code == 1, done.output
    failed, *others = records((tmp_path / "compare.jsonl").read_text())
    assert "k must be a positive multiple of 64, got k=100" in failed["error"]
    assert [r["case"]["backend"] for r in others if r["values"]] == ["reference", "int4pack"]
    assert "not measured: tinygemm: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-m", "0"], "-m: wanted whole numbers from 1"),
        (["-k", "64,x"], "got 'x'"),
        (["-m", ","], "-m: wanted an entry or several"),
        (["--shapes", ""], "--shapes: wanted an entry or several"),
        (["--format", ""], "--format: wanted an entry or several"),
        (["--activations", ""], "--activations: wanted an entry or several"),
        (["--against", "", "--against", ","], "got ',,'"),
        (["--format", "int9"], "int9"),
        (["--dtype", "fp8"], "wanted one of bf16, fp16, fp32"),
        (["--device", "tpu"], "wanted cpu or cuda"),
        (["--backend", "absent"], "wanted one of auto"),
        (["--activations", "int4"], "wanted float or int8, got 'int4'"),
        (["--against", "nobody"], "Invalid value: --against: wanted all, none or "),
        (["-m", "²"], "got '²'"),
        (["-m", "1" * 5000], "of up to 18 digits, got '1111"),
        (["--threads", "100000"], "--threads: wanted at most "),
        (["--threads", "99999999999"], "cores, got 99999999999"),
        (["--shapes", "llama-9b"], "llama-9b"),
        (
            ["--shapes", "64x64", "-k", "64"],
            "--shapes: wanted no -n and -k with it, got --shapes 64x64",
        ),
        (
            ["--shapes", "64x64", "-n", "64"],
            "--shapes: wanted no -n and -k with it, got --shapes 64x64",
        ),
        (["--against", "none,all"], "--against: wanted none alone, or peers; got none, all"),
        (["--seconds", "inf"], "--seconds: wanted a time that ends, got inf"),
        (["--peer-seconds", "inf"], "--peer-seconds: wanted a time that ends, got inf"),
        (["--include", "("], "wanted a regular expression"),
        (["--include", "nothing"], "leave no case"),
        (["--group-size", "x"], "custom"),
    ],
)
def test_bad_usage(arguments, said, refused):
    refused(run, *DEVICE, *arguments, said=said)


@pytest.mark.parametrize("command", ["kernels", "compare", "models", "accuracy"])
def test_no_folder_for_results(command, no_folder):
    done = run("--out", no_folder, command=command)
    assert done.exit_code == 2, done.output
    assert f"wanted a folder that can be written, got {no_folder}" in done.stderr


def test_folder_for_results_that_cannot_be_made(tmp_path):
    (tmp_path / "link").symlink_to("nowhere/else")
    done = run(*TINY, *DEVICE, "--out", tmp_path / "link")
    assert done.exit_code == 2
    assert f"--out: wanted a folder that can be written, got {tmp_path / 'link'}" in done.stderr


def test_help_loads_no_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from fdk_bench.cli import app\n"
        "for command in (['kernels'], ['models'], ['accuracy'], []):\n"
        "    done = CliRunner().invoke(app, [*command, '--help'])\n"
        "    assert done.exit_code == 0, done.output\n"
        "assert not {'torch', 'transformers', 'matplotlib', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cells_of_a_failed_row():
    row = Row(KernelCase(1, 8, 8, "int4-g64", "bf16", "cpu", "auto"), error="ValueError: no")
    assert KERNELS.cells(row)["time"] == "failed"


def test_seconds_text():
    texts = [seconds_text(s) for s in (9.87e-6, 0.00123, 2.5, 1.234e-4)]
    assert texts == ["9.87 us", "1.23 ms", "2.5 s", "123 us"]
