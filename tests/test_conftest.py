"""conftest.py at the root, in a run of pytest of its own: the `gpu` marker and `--shard`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SUITE = """
import pytest

@pytest.mark.gpu
def test_on_gpu():
    raise AssertionError("ran without a GPU")

@pytest.mark.parametrize("i", range(5))
def test_anywhere(i):
    pass
"""


@pytest.fixture
def run_pytest(tmp_path):
    """Runs pytest on SUITE where no GPU is visible, and returns what it prints."""
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "test_suite.py").write_text(SUITE)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    # pytest-benchmark warns within a process of pytest-xdist.
    command = [sys.executable, "-m", "pytest", "-p", "no:benchmark", "-v", "test_suite.py"]

    def run(*arguments):
        done = subprocess.run(
            [*command, *arguments],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr

    return run


def test_gpu_tests_skip_with_a_reason_where_there_is_no_gpu(run_pytest):
    printed = run_pytest()
    assert "5 passed, 1 skipped" in printed
    assert "needs an NVIDIA GPU: torch" in printed


def test_shards_are_disjoint_and_complete(run_pytest):
    shards = [run_pytest("--shard", f"{i}/2", "-k", "anywhere") for i in (1, 2)]
    for i in range(5):
        assert sum(f"test_anywhere[{i}] PASSED" in shard for shard in shards) == 1
    assert "argument --shard: invalid parse_shard value: '4/3'" in run_pytest("--shard", "4/3")
