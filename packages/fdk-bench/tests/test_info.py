"""``fdk-bench info``: machine, backends and kernels."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import fdk_formats
from fdk_bench.backend_report import Support, machine, sampled_formats, supports
from fdk_bench.cli import app, kernel_lines
from fdk_bench.machine import caches, cold_bytes


def run(*arguments):
    return CliRunner().invoke(app, ["info", *map(str, arguments)])


def test_json():
    done = run("--json", "--format", "int4,affine3-g32", "-g", "row")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["machine"]["cores"] >= 1
    assert record["versions"]["fdk_formats"] == fdk_formats.__version__
    assert set(record["peers"]) >= {"tinygemm", "llama.cpp", "torch.compile"}
    on_cpu = [s for s in record["supports"] if s["device"] == "cpu"]
    assert [s["format"] for s in on_cpu] == ["int4-row", "affine3-g32"]
    for support in on_cpu:
        reason = support["reasons"]["reference"]
        assert reason == 'chosen by name only: backend="reference"'
        assert support["chosen"] == ("cpu" if "cpu" in fdk_formats.all_backends() else None)


def test_table():
    done = run("--format", "int4-g48")
    assert done.exit_code == 0
    assert machine().cpu in done.stdout
    assert "k must be a positive multiple of 48, got k=4096" in done.stdout
    assert "peers for compare: " in done.stdout


def test_an_instruction_set_that_is_not_there():
    pytest.importorskip("fdk_cpu")
    done = subprocess.run(
        [sys.executable, "-m", "fdk_bench", "info"],
        env={**os.environ, "FDK_CPU_ISA": "sse9"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "FDK_CPU_ISA: this machine runs" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_format_that_is_not_quantised():
    done = run("--format", "bf16")
    assert done.exit_code == 0
    assert "bf16: not quantised; torch computes it" in done.stdout
    assert "auto picks" not in done.stdout
    assert "not quantised" not in run("--format", "int4").stdout


def test_every_backend_is_chosen_or_has_a_reason():
    for support in supports(
        ["custom4-g64", "affine4-g64", "int4-g64-hadamard"], 256, 256, "bf16", ["cpu"]
    ):
        named = {*support.reasons, support.chosen} - {None}
        taking = set(fdk_formats.all_backends()) - set(support.reasons)
        assert named | taking == set(fdk_formats.all_backends())


def test_sampled_formats():
    formats = sampled_formats("32")
    assert len(formats) == 24
    assert {"custom8-g32", "int1-g32", "affine5-g32"} <= set(formats)


def test_cold_bytes_are_more_than_the_caches_hold():
    assert cold_bytes("cpu") >= 2 * max(caches().values(), default=0)
    assert cold_bytes("cpu") >= 192 << 20


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--format", "int9"], "int9"), (["--dtype", "fp8"], "fp8"), (["-k", "0"], "-k")],
)
def test_bad_usage(arguments, said, refused):
    refused(run, *arguments, said=said)


def test_kernels_are_listed_once_for_formats_that_share_them():
    shared = {"device": "cuda", "chosen": "marlin-lut", "reasons": {}, "kernels": "rows of x: some"}
    found = [
        Support("custom4-g64", **shared),
        Support("custom2-g64", **shared),
        Support("custom4-g64", "cpu", "cpu", {}),
    ]
    assert kernel_lines(found) == [
        "kernels by number of rows:",
        "  marlin-lut, custom4-g64, custom2-g64: rows of x: some",
    ]
    assert kernel_lines(found[2:]) == []
