"""The command line as a whole: help, a full disk, the package as it is installed."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.core import TyperOption
from typer.main import get_command
from typer.testing import CliRunner

import fdk_bench
from fdk_bench.cli import app

COMMANDS = sorted(get_command(app).commands)


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_types_leave_room(command):
    """Help shows no type for a flag, and only the limits of a number."""
    done = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(word in done.stdout for word in ("<bool>", "range>"))
    (shown,) = (line for line in lines if "--help " in line)
    assert "this message" in shown


def test_limits_are_shown():
    if not hasattr(TyperOption, "display_type"):
        pytest.skip("typer is older than 0.29, and words types in its own way")
    done = CliRunner().invoke(app, ["models", "--help"], env={"COLUMNS": "80"})
    (context,) = (line for line in done.stdout.splitlines() if "--context" in line)
    assert "<int> [x>=1]  Tokens of the prompt." in context


FULL = Path("/dev/full")
TINY = ("kernels", "-m", "1", "-k", "64", "-b", "16", "--seconds", "0", "--device", "cpu", "--json")


@pytest.mark.skipif(not FULL.exists(), reason="needs the device /dev/full of Linux")
@pytest.mark.parametrize("command", [("--version",), ("info",), TINY], ids=lambda c: c[0])
def test_full_disk(command, tmp_path):
    with FULL.open("w") as full:
        process = start(command, full, tmp_path)
        said = process.communicate()[1]
    assert process.returncode == 1
    assert "fdk-bench: not everything was written: [Errno 28] No space left on device\n" in said
    assert "Traceback" not in said
    assert "Exception ignored" not in said


@pytest.mark.parametrize("command", [("--version",), ("info", "--json")], ids=lambda c: c[0])
def test_reader_that_went_away(command, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    process = start(command, writer, tmp_path)
    os.close(writer)
    assert (process.communicate()[1], process.returncode) == ("", 1)


def test_closed_standard_output(tmp_path):
    """Some job launchers close standard output."""
    program = [sys.executable, "-m", "fdk_bench", "--version"]
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *program]
    done = subprocess.run(shell, capture_output=True, text=True, cwd=tmp_path)
    assert (done.stderr, done.returncode) == ("", 0)


def start(command, stdout, folder):
    program = [sys.executable, "-m", "fdk_bench", *command]
    return subprocess.Popen(program, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=folder)


def requirements(extra):
    try:
        lines = metadata.requires("fdk-bench") or []
    except metadata.PackageNotFoundError:
        pytest.skip("runs from PYTHONPATH: no metadata of fdk-bench is installed")
    return [line.split(";")[0].strip() for line in lines if (extra in line.partition(";")[2])]


@pytest.mark.parametrize(("extra", "package"), [("cpu", "fdk-cpu"), ("cuda", "fdk-cuda")])
def test_backends_are_extras(extra, package):
    wanted = [line for line in requirements(f'extra == "{extra}"') if line.startswith(package)]
    assert wanted == [f"{package}<0.2,>=0.1"]


def test_types_are_shipped():
    assert (Path(fdk_bench.__file__).parent / "py.typed").is_file()
