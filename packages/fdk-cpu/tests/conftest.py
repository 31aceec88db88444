"""What is built for tests: the C++ test and the library for C, once a run."""

import fcntl
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def cmake_build() -> Callable[..., None]:
    """Configures the sources in a folder, with options for cmake, and builds them."""

    def build(folder: Path, *options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process of pytest-xdist builds, the others wait
            for command in (
                ["cmake", "-S", SOURCE, "-B", folder, *options],
                ["cmake", "--build", folder, "--parallel", "2"],
            ):
                done = subprocess.run(command, capture_output=True, text=True)
                assert done.returncode == 0, done.stdout + done.stderr

    return build


@pytest.fixture(scope="session")
def native_build(cmake_build: Callable[..., None]) -> Path:
    """A folder with fdk_native_test and libfdk_cpu of this checkout."""
    if not (SOURCE / "CMakeLists.txt").is_file():
        pytest.skip("runs without the source of the kernels")
    if missing := [tool for tool in ("cmake", "c++", "cc") if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)} on PATH")
    build = SOURCE / "build" / "tests"
    wanted = {"PYTHON": "OFF", "TESTS": "ON", "LIBRARY": "ON"}
    options = [f"-DFDK_CPU_{name}={value}" for name, value in wanted.items()]
    cmake_build(build, "-DBUILD_SHARED_LIBS=ON", *options)
    return build
