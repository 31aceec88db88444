"""The option `--every` of conftest.py, in a run of pytest of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest

@pytest.mark.parametrize("b", range(2))
@pytest.mark.parametrize("a", range(5))
def test_many(a, b):
    pass

def test_one():
    pass

class TestSame:
    @pytest.mark.parametrize("a", range(2))
    def test_many(self, a):
        pass
"""
MANY = [f"test_many[{a}-{b}]" for a in range(5) for b in range(2)]
ALL = [*MANY, "test_one", "TestSame::test_many[0]", "TestSame::test_many[1]"]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ([], ALL),
        (["--every=1"], ALL),
        (["--every=4"], [*MANY[::4], "test_one", "TestSame::test_many[0]"]),
        (["--every=99"], [MANY[0], "test_one", "TestSame::test_many[0]"]),
        # The first of those that -k leaves.
        (["--every=99", "-k", "1-1 or Same"], [MANY[3], "TestSame::test_many[0]"]),
    ],
    ids=" ".join,
)
def test_every(tmp_path: Path, options: list[str], left: list[str]) -> None:
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "test_cases.py").write_text(TESTS)
    # pytest-benchmark warns within a process of pytest-xdist.
    command = [sys.executable, "-m", "pytest", "-p", "no:benchmark", "--collect-only", "-q"]
    done = subprocess.run(
        [*command, *options, "test_cases.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ids = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert ids == left
