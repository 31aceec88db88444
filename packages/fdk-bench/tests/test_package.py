"""The package as it is installed, or as it lies on PYTHONPATH."""

from importlib import metadata
from pathlib import Path

import pytest

import fdk_bench


def requirements(extra):
    try:
        lines = metadata.requires("fdk-bench") or []
    except metadata.PackageNotFoundError:
        pytest.skip("runs from PYTHONPATH: no metadata of fdk-bench is installed")
    return [line.split(";")[0].strip() for line in lines if (extra in line.partition(";")[2])]


@pytest.mark.parametrize(("extra", "package"), [("cpu", "fdk-cpu"), ("cuda", "fdk-cuda")])
def test_back_ends_are_extras(extra, package):
    wanted = [line for line in requirements(f'extra == "{extra}"') if line.startswith(package)]
    assert wanted == [f"{package}<0.2,>=0.1"]


def test_types_are_shipped():
    assert (Path(fdk_bench.__file__).parent / "py.typed").is_file()
