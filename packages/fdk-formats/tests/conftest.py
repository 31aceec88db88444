"""Tests run on the kernels of fdk_formats, whatever else is installed."""

import pytest
from hypothesis import HealthCheck, settings

import fdk_formats
from fdk_formats.blockwise import TORCH_KERNELS, kernels

# The same examples in each run, and no deadline (the default is 200 ms per example).
settings.register_profile(
    "fdk", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fdk")


@pytest.fixture(autouse=True)
def torch_blockwise_kernels(monkeypatch):
    """Uses the torch kernels for blockwise ops."""
    monkeypatch.setattr(kernels, "_REGISTERED", {"cpu": TORCH_KERNELS})


@pytest.fixture(params=["reference", "auto"])
def backend(request):
    """Name of a backend: the reference, and what is chosen where a package of kernels is."""
    if request.param == "auto" and list(fdk_formats.all_backends()) == ["reference"]:
        pytest.skip("needs fdk-cpu, or another package of kernels")
    return request.param
