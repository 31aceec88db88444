"""The C++ test, built from this checkout and run; skipped where there is no compiler or source."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def executable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (SOURCE / "CMakeLists.txt").is_file():
        pytest.skip("runs without the source of the kernels")
    missing = [tool for tool in ("cmake", "c++") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)} on PATH")
    build = tmp_path_factory.mktemp("native")
    options = ["-DFDK_CPU_PYTHON=OFF", "-DFDK_CPU_TESTS=ON"]
    subprocess.run(["cmake", "-S", SOURCE, "-B", build, *options], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", build, "--parallel", "2"], check=True, capture_output=True)
    return build / "fdk_native_test"


def test_kernels_agree_with_plain_loops(executable: Path) -> None:
    run = subprocess.run([executable, "2"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[0]) > 50
