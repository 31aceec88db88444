"""Tables in the documents are what the recorded rows render to."""

from pathlib import Path

import pytest
from documents import documents

from fdk_bench.rendering import MARK, fill

ROOT = Path(__file__).parent.parent
WITH_TABLES = [path for path in documents(ROOT) if MARK.search(path.read_text("utf-8"))]


@pytest.mark.parametrize("path", WITH_TABLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_are_those_of_the_recorded_rows(path):
    text = path.read_text("utf-8")
    assert fill(text, ROOT) == text, f"fdk-bench table --fill {path.relative_to(ROOT)}"


def test_the_readme_has_tables():
    marks = MARK.findall((ROOT / "README.md").read_text("utf-8"))
    # Accuracy, kernels, compare on two threads and on one, models; on a GPU models, compare twice.
    assert len(marks) == 8
