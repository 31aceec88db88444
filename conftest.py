"""What every package's tests share; the `wheels` session copies this file beside them."""

import sys
from collections import Counter

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--every 8`, for `wheels`: a sample of what a package's session runs whole."""
    parser.addoption(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="run each test function's first case, and every Nth after it",
    )


@pytest.fixture(autouse=True)
def seed() -> None:
    """Each test draws the same numbers, whatever ran before it."""
    if torch := sys.modules.get("torch"):  # tests without it start at once
        torch.manual_seed(0)


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what `--every` does; skips tests marked `gpu` where torch finds no GPU."""
    every, seen = config.getoption("every"), Counter[str]()
    kept, dropped = [], []
    for item in items:
        function = item.nodeid.partition("[")[0]
        (dropped if seen[function] % every else kept).append(item)
        seen[function] += 1
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # here, so that tests without it start at once

    if not torch.cuda.is_available():
        reason = f"needs an NVIDIA GPU: torch {torch.__version__} finds none on this machine"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
