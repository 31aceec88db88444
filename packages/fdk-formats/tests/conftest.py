"""These are the tests of fdk_formats alone: its own kernels, whatever else is installed."""

import pytest

from fdk_formats.blockwise import TORCH_KERNELS, kernels


@pytest.fixture(autouse=True)
def torch_blockwise_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blockwise ops in torch."""
    monkeypatch.setattr(kernels, "_REGISTERED", {"cpu": TORCH_KERNELS})
