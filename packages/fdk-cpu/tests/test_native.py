"""The C++ tests, built from this checkout and run; skipped where there is no compiler or source."""

import subprocess
from pathlib import Path

import pytest


@pytest.mark.parametrize("test", ["fdk_native_test", "fdk_fuzz_random"])
def test_kernels_agree_with_plain_loops(native_build: Path, test: str) -> None:
    run = subprocess.run([native_build / test, "2"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[0]) > 50
