"""What every package's tests share; the `wheels` session copies this file beside them."""

import sys

import pytest


@pytest.fixture(autouse=True)
def seed() -> None:
    """Each test draws the same numbers, whatever ran before it."""
    if torch := sys.modules.get("torch"):  # tests without it start at once
        torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where torch finds no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # here, so that tests without it start at once

    if not torch.cuda.is_available():
        reason = f"needs an NVIDIA GPU: torch {torch.__version__} finds none on this machine"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
