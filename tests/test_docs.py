"""The project's own documents: links lead somewhere, examples run and print what they show."""

from pathlib import Path

import pytest
from documents import broken_links, documents, examples, run_examples

ROOT = Path(__file__).parent.parent
DOCUMENTS = documents(ROOT)
WITH_EXAMPLES = [path for path in DOCUMENTS if examples(path)]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links(path):
    assert broken_links(path) == []


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=name)
def test_examples(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example may write files
    assert run_examples(path) > 0
