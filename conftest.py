"""Options, markers and fixtures of every package's tests; `wheels` copies this file beside them."""

import sys
from collections import Counter
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--every N`, with which `wheels` samples the tests."""
    parser.addoption(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="run each test function's first case, and every Nth after it",
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the Python blocks of Markdown files."""
    if file_path.suffix != ".md":
        return None
    from markdown_examples import collect  # in tools/; only this needs Sybil

    return collect(file_path, parent)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> None:
    """Seed torch, so that a test draws the same numbers whatever ran before it."""
    # Examples in Markdown seed themselves; tests that never import torch start at once.
    if request.path.suffix == ".py" and (torch := sys.modules.get("torch")):
        torch.manual_seed(0)


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sample the tests for `--every`; skip those marked `gpu` where torch finds no GPU."""
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
