"""The root's conftest.py, in a separate run of pytest: the marker `gpu`, `--every`, `--shard`."""

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


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ("", ["5 passed, 1 skipped", "needs an NVIDIA GPU: torch"]),
        ("--every=4 -k anywhere", ["[0] PASSED", "[4] PASSED", "2 passed"]),
        ("--shard=1/2 -k anywhere", ["[0] PASSED", "[2] PASSED", "[4] PASSED", "3 passed"]),
        ("--shard=2/2 -k anywhere", ["[1] PASSED", "[3] PASSED", "2 passed"]),
        ("--shard=4/3", ["argument --shard: invalid parse_shard value: '4/3'"]),
    ],
)
def test_options_and_the_marker(tmp_path: Path, options: str, printed: list[str]) -> None:
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "test_suite.py").write_text(SUITE)
    # Within pytest-xdist, pytest-benchmark warns.
    command = [sys.executable, "-m", "pytest", "-p", "no:benchmark", "-v", "test_suite.py"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, *options.split()], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert [text for text in printed if text not in done.stdout + done.stderr] == []
