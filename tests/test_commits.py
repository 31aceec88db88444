"""Commits that rows and documents name are of this history."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from documents import documents

ROOT = Path(__file__).parent.parent
ROWS = sorted((ROOT / "docs" / "results").glob("*/*.jsonl"))
LOGS = sorted((ROOT / "docs" / "results").glob("*/*.txt"))
# Seven digits and more that are neither a number nor a word.
ID = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")
FIRST = "3079b889750ee4461db514e98beb7a3096195a56"  # a shallow clone lacks it
BYTES = {"c6c6c6c6", "000080bf", "0000803f"}  # of a file, in files.md


def git(*arguments: str, text: str = "") -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, input=text, capture_output=True, text=True, check=True
    ).stdout


def unknown(ids: set[str]) -> list[str]:
    """Those that name no commit."""
    lines = git("cat-file", "--batch-check=%(objecttype)", text="\n".join(sorted(ids))).splitlines()
    return [name for name, kind in zip(sorted(ids), lines, strict=True) if kind != "commit"]


@pytest.fixture(autouse=True)
def _history() -> None:
    if not (ROOT / ".git").exists() or unknown({FIRST}):
        pytest.skip("needs the whole history")


@pytest.mark.parametrize("path", ROWS, ids=lambda path: "/".join(path.parts[-2:]))
def test_commits_of_rows(path: Path) -> None:
    rows = map(json.loads, path.read_text("utf-8").splitlines())
    found = {row["commit"].removesuffix("-dirty") for row in rows if row.get("commit")}
    assert unknown(found) == []


def test_commits_of_documents() -> None:
    texts = [path.read_text("utf-8") for path in [*documents(ROOT), *LOGS]]
    found = {match for text in texts for match in ID.findall(text)} - BYTES
    assert len(found) > 50
    assert unknown(found) == []
