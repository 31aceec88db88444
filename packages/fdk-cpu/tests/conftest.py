"""What is built for tests: the C++ test and the library for C, once a run."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def native_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with fdk_native_test and libfdk_cpu of this checkout."""
    if not (SOURCE / "CMakeLists.txt").is_file():
        pytest.skip("runs without the source of the kernels")
    if missing := [tool for tool in ("cmake", "c++", "cc") if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)} on PATH")
    build = tmp_path_factory.mktemp("native")
    wanted = {"PYTHON": "OFF", "TESTS": "ON", "LIBRARY": "ON"}
    options = [f"-DFDK_CPU_{name}={value}" for name, value in wanted.items()]
    for command in (
        ["cmake", "-S", SOURCE, "-B", build, "-DBUILD_SHARED_LIBS=ON", *options],
        ["cmake", "--build", build, "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return build
