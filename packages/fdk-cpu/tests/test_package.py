"""The package as it is installed, or as it lies on PYTHONPATH."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import fdk_cpu


def test_offers_what_it_says():
    for name in fdk_cpu.__all__:
        assert hasattr(fdk_cpu, name), name


def test_requires_fdk_formats():
    try:
        requirements = metadata.requires("fdk-cpu") or []
    except metadata.PackageNotFoundError:
        pytest.skip("runs from PYTHONPATH: no metadata of fdk-cpu is installed")
    assert any(line.replace(" ", "").startswith("fdk-formats<0.2,>=0.1") for line in requirements)


def test_types_are_shipped():
    assert (Path(fdk_cpu.__file__).parent / "py.typed").is_file()


def test_import_starts_no_thread():
    code = (
        "import os, torch, fdk_formats; before = len(os.listdir('/proc/self/task'));"
        "import fdk_cpu; assert len(os.listdir('/proc/self/task')) == before"
    )
    if not Path("/proc/self/task").is_dir():
        pytest.skip("needs /proc to count threads")
    subprocess.run([sys.executable, "-c", code], check=True)
