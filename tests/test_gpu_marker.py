"""The `gpu` marker of conftest.py, in a run of pytest of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARKED = """
import pytest

@pytest.mark.gpu
def test_on_gpu():
    raise AssertionError("ran without a GPU")

def test_anywhere():
    pass
"""


def test_gpu_tests_skip_with_a_reason_where_there_is_no_gpu(tmp_path):
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "test_marked.py").write_text(MARKED)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    # pytest-benchmark warns within a process of pytest-xdist.
    command = [sys.executable, "-m", "pytest", "-p", "no:benchmark", "test_marked.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert "1 passed, 1 skipped" in done.stdout
    assert "needs an NVIDIA GPU: torch" in done.stdout
