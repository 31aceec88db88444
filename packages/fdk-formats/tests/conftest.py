"""These are the tests of fdk_formats alone: its own kernels, whatever else is installed."""

import pytest
from hypothesis import HealthCheck, settings

from fdk_formats.blockwise import TORCH_KERNELS, kernels

# The same examples in each run, and no limit of time: by default 200 ms for one is a failure.
settings.register_profile(
    "fdk", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fdk")


@pytest.fixture(autouse=True)
def torch_blockwise_kernels(monkeypatch):
    """The blockwise ops in torch."""
    monkeypatch.setattr(kernels, "_REGISTERED", {"cpu": TORCH_KERNELS})
