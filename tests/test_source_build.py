"""Errors of the source build of fdk-cpu if the compiler is missing or too old."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "packages" / "fdk-cpu"
# CMake asks the preprocessor for the version of a compiler, so this one claims another.
OLD_COMPILER = """#!/bin/sh
exec c++ -U__GNUC__ -D__GNUC__={major} "$@"
"""


def configure(build: Path, **environment: str) -> str:
    """Run CMake, which must fail, and return what it writes as one line."""
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake on PATH; .ci/run installs it")
    command = ["cmake", "-S", SOURCE, "-B", build, "-DFDK_CPU_PYTHON=OFF"]
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")}
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True)
    assert done.returncode != 0, done.stdout
    return " ".join(done.stderr.split())


def test_missing_compiler(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in filter(shutil.which, ("cmake", "ninja", "make")):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    message = configure(tmp_path / "build", PATH=str(tools))
    assert "needs a C++20 compiler (g++ 11, clang 14 or later) and none was found" in message
    assert "apt-get install g++" in message
    assert "uv sync --no-install-package fdk-cpu, then uv run --no-sync" in message


def test_old_compiler(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("needs c++ on PATH; .ci/run installs it")
    version = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=True)
    if "clang" in version.stdout:
        pytest.skip("needs GCC as c++: CMake asks clang for its version in another way")
    compiler = tmp_path / "old"
    compiler.write_text(OLD_COMPILER.format(major=9))
    compiler.chmod(0o755)
    message = configure(tmp_path / "build", CXX=str(compiler))
    assert "needs GNU 11 or later, got 9." in message
    assert str(compiler) in message
