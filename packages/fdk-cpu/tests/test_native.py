"""The C++ tests, built from this checkout and run; skipped where there is no compiler or source."""

import subprocess
from pathlib import Path

import pytest


@pytest.mark.parametrize("test", ["fdk_native_test", "fdk_fuzz_random"])
def test_kernels_agree_with_plain_loops(native_build: Path, test: str) -> None:
    command = [native_build / test, "--cases", "300"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("300 cases passed")
