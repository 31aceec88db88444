"""A full disk, or a reader that went away: no traceback, and an exit code of ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    """As some starters of jobs leave it."""
    program = [sys.executable, "-m", "fdk_bench", "--version"]
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *program]
    done = subprocess.run(shell, capture_output=True, text=True, cwd=tmp_path)
    assert (done.stderr, done.returncode) == ("", 0)


def start(command, stdout, folder):
    program = [sys.executable, "-m", "fdk_bench", *command]
    return subprocess.Popen(program, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=folder)
