"""Options, markers and fixtures of every package's tests; `wheels` copies this file to them."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--every 8`, which samples for `wheels`, and `--shard 1/2`."""
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
    """Parse `1/2`."""
    index, count = map(int, text.split("/"))
    if not 1 <= index <= count:
        raise ValueError(f"wanted 1/{count} to {count}/{count}, got {text}")
    return index, count


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the Python blocks of Markdown files, where Sybil is installed."""
    # pytest calls this for every file next to the tests, even when it runs a single package.
    if file_path.suffix != ".md" or importlib.util.find_spec("sybil") is None:
        return None
    from markdown_examples import collect  # in tools/

    return collect(file_path, parent)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> None:
    """Seed torch, so that a test draws the same numbers whatever ran before it."""
    # Examples in Markdown seed themselves; tests that never import torch start at once.
    if request.path.suffix == ".py" and (torch := sys.modules.get("torch")):
        torch.manual_seed(0)


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Apply `--every` and `--shard`; skip tests marked `gpu` where torch finds no GPU."""
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
