"""The package as it is installed, or as it lies on PYTHONPATH. Its kernels are still to come."""

from importlib import metadata
from pathlib import Path

import pytest

import fdk_cuda


def test_offers_nothing_yet():
    public = [name for name in vars(fdk_cuda) if not name.startswith("_")]
    assert public == []  # kernels, and this test with them, come with the next release


def test_requires_fdk_formats():
    try:
        requirements = metadata.requires("fdk-cuda") or []
    except metadata.PackageNotFoundError:
        pytest.skip("runs from PYTHONPATH: no metadata of fdk-cuda is installed")
    assert any(line.replace(" ", "").startswith("fdk-formats<0.2,>=0.1") for line in requirements)


def test_types_are_shipped():
    assert (Path(fdk_cuda.__file__).parent / "py.typed").is_file()
