"""Paths in documents that `mkdocs build --strict` does not check: they exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OUTSIDE_THE_SITE = [*ROOT.glob("*.md"), *ROOT.glob("packages/*/*.md")]


@pytest.mark.parametrize("path", OUTSIDE_THE_SITE, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_every_file_of_the_map_exists() -> None:
    text = (ROOT / "docs" / "design" / "index.md").read_text()
    names = re.findall(r"\w[\w./*-]*\.(?:cu|py|cpp|h|txt)\b", text)
    missing = [
        name
        for name in names
        if not list((ROOT / "packages").rglob(name.removeprefix("packages/")))
    ]
    assert len(names) > 40
    assert missing == []
