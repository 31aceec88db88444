"""Every Triton kernel in Triton's interpreter, in a process of its own: it is chosen at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def test_interpreter():
    if INTERPRETED:
        pytest.skip("already in the interpreter")
    file = Path(__file__).with_name("interpreted_triton.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
