"""Builds the C++ tests and the library for C once per run."""

import fcntl
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fdk_cpu

SOURCE = Path(__file__).parents[1]
OPTIONS = ("-DFDK_CPU_PYTHON=OFF", "-DFDK_CPU_TESTS=ON", "-DFDK_CPU_LIBRARY=ON")


@pytest.fixture(params=fdk_cpu.instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this machine, pinned."""
    fdk_cpu.set_instruction_set(request.param)
    yield request.param
    fdk_cpu.set_instruction_set("auto")


@pytest.fixture(scope="session")
def cmake_build() -> Callable[..., None]:
    """Configure the sources in a folder with options for CMake, build and maybe install them."""

    def build(folder: Path, *options: str, prefix: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        install = [] if prefix is None else [["cmake", "--install", folder, "--prefix", prefix]]
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of pytest-xdist wait
            for command in (
                ["cmake", "-S", SOURCE, "-B", folder, *options],
                ["cmake", "--build", folder, "--parallel", "2"],
                *install,
            ):
                done = subprocess.run(command, capture_output=True, text=True)
                assert done.returncode == 0, done.stdout + done.stderr

    return build


@pytest.fixture(scope="session")
def native_folder() -> Path:
    """The build folder of the tests; skips without the sources or a compiler."""
    if not (SOURCE / "CMakeLists.txt").is_file():
        pytest.skip("needs the source of the kernels")
    if missing := [tool for tool in ("cmake", "c++", "cc") if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)} on PATH")
    return SOURCE / "build" / "tests"


@pytest.fixture(scope="session")
def native_build(native_folder: Path, cmake_build: Callable[..., None]) -> Path:
    """A folder with fdk_native_test and libfdk_cpu.so of this checkout."""
    cmake_build(native_folder, "-DBUILD_SHARED_LIBS=ON", *OPTIONS)
    return native_folder


@pytest.fixture(scope="session", params=["shared", "static"])
def prefix(
    request: pytest.FixtureRequest,
    native_folder: Path,
    cmake_build: Callable[..., None],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """An installation of the library, shared or static, from the same objects."""
    installed = tmp_path_factory.mktemp(request.param)
    kind = "ON" if request.param == "shared" else "OFF"
    cmake_build(native_folder, f"-DBUILD_SHARED_LIBS={kind}", *OPTIONS, prefix=installed)
    return installed
