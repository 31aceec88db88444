"""Runs the tests that need Triton's interpreter in a separate process.

TRITON_INTERPRET is read when Triton is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize(
    "name", ["interpreted_kernels.py", "interpreted_autotune.py", "interpreted_experts.py"]
)
def test_interpreter(name, pytestconfig):
    if INTERPRETED:
        pytest.skip("already in the interpreter")
    file = Path(__file__).with_name(name)
    # pytest-benchmark, where it is installed, warns within a process of pytest-xdist.
    plugins = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    plugins += [f"--every={pytestconfig.getoption('every')}"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *plugins, str(file)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
