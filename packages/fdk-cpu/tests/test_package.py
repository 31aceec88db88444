"""The package as installed, or as found on PYTHONPATH."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import fdk_cpu


def test_exported_names_exist():
    for name in fdk_cpu.__all__:
        assert hasattr(fdk_cpu, name), name


def test_requires_fdk_formats():
    try:
        requirements = metadata.requires("fdk-cpu") or []
    except metadata.PackageNotFoundError:
        pytest.skip("runs from PYTHONPATH: no metadata of fdk-cpu is installed")
    assert any(line.replace(" ", "").startswith("fdk-formats<0.2,>=0.1") for line in requirements)


def test_ships_type_information():
    assert (Path(fdk_cpu.__file__).parent / "py.typed").is_file()


def test_import_starts_no_thread():
    code = (
        "import os, torch, fdk_formats; before = set(os.listdir('/proc/self/task'));"
        "import fdk_cpu; assert set(os.listdir('/proc/self/task')) <= before"
    )
    if not Path("/proc/self/task").is_dir():
        pytest.skip("needs /proc to count threads")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_workers_do_not_share_the_core_that_openmp_binds():
    cores = getattr(os, "sched_getaffinity", lambda _: ())(0)
    if len(cores) < 2 or not Path("/proc/self/task").is_dir():
        pytest.skip("needs Linux, /proc and two cores")
    # A worker resets its affinity when it first runs, perhaps after the call that started it.
    code = """
import os, time, torch, fdk_cpu
fdk_cpu.set_num_threads(2)
assert torch.ones(9).sum() == 9
end, widest = time.monotonic() + 600, 0
while widest < 2 and time.monotonic() < end:
    fdk_cpu.read_sum(torch.ones(1 << 22))
    widest = max(len(os.sched_getaffinity(int(i))) for i in os.listdir("/proc/self/task"))
print(widest)
"""
    environment = {**os.environ, "OMP_PROC_BIND": "true"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert int(done.stdout) >= len(cores)
