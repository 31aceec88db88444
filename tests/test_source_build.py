"""What the build of fdk-cpu from source says where a tool is missing or too old."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "packages" / "fdk-cpu"
# A compiler that CMake takes for this version of GCC: it asks the preprocessor, and looks for the
# answer in the object file.
OLD_COMPILER = """#!/bin/sh
exec c++ -U__GNUC__ -D__GNUC__={major} "$@"
"""


def configure(build: Path, **environment: str) -> str:
    """What CMake writes; it must fail."""
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake on PATH; .ci/run installs it")
    # CMake chooses a generator before it looks for a compiler, and needs its tool to be there.
    command = ["cmake", "-S", SOURCE, "-B", build, "-DFDK_CPU_PYTHON=OFF"]
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")}
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True)
    assert done.returncode != 0, done.stdout
    return " ".join(done.stderr.split())


@pytest.fixture
def no_compiler(tmp_path: Path) -> str:
    """A PATH that has CMake's tools, and no compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    tools = [tool for tool in ("cmake", "ninja", "make") if shutil.which(tool)]
    for tool in tools:
        (folder / tool).symlink_to(str(shutil.which(tool)))
    return str(folder)


def test_a_missing_compiler_is_named(tmp_path: Path, no_compiler: str) -> None:
    message = configure(tmp_path / "build", PATH=no_compiler)
    assert "needs a C++20 compiler (g++ 11, clang 14 or later) and none was found" in message
    assert "apt-get install g++" in message


def test_an_old_compiler_is_named(tmp_path: Path) -> None:
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
