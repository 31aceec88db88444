"""What every package's tests share; the `wheels` session copies this file beside them."""

import sys
from collections import Counter

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--every 8`, for `wheels`, and `--shard 1/2`, for machines with a time limit."""
    parser.addoption(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="run each test function's first case, and every Nth after it",
    )
    parser.addoption(
        "--shard",
        type=parse_shard,
        default=(1, 1),
        metavar="I/N",
        help="run the Ith of N equal parts of the tests, counted from 1",
    )


def parse_shard(text: str) -> tuple[int, int]:
    """Parses `1/2`."""
    index, count = map(int, text.split("/"))
    if not 1 <= index <= count:
        raise ValueError(f"wanted 1/{count} to {count}/{count}, got {text}")
    return index, count


@pytest.fixture(autouse=True)
def seed() -> None:
    """Each test draws the same numbers, whatever ran before it."""
    if torch := sys.modules.get("torch"):  # tests without it start at once
        torch.manual_seed(0)


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Applies `--every` and `--shard`; skips tests marked `gpu` where torch finds no GPU."""
    every, seen = config.getoption("every"), Counter[str]()
    index, count = config.getoption("shard")
    kept, dropped = [], []
    for item in items:
        function = item.nodeid.partition("[")[0]
        (dropped if seen[function] % every else kept).append(item)
        seen[function] += 1
    dropped += [item for i, item in enumerate(kept, 1) if i % count != index % count]
    kept = [item for i, item in enumerate(kept, 1) if i % count == index % count]
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
