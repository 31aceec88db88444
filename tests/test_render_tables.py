"""tools/render_tables.py: the tables in documents are those of the recorded rows."""

from pathlib import Path

import pytest
from render_tables import MARK, fill, main

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/*.md")]
WITH_TABLES = [path for path in DOCUMENTS if MARK.search(path.read_text("utf-8"))]
RESULTS = ROOT / "docs" / "results" / "README.md"


@pytest.mark.parametrize("path", WITH_TABLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_are_those_of_the_recorded_rows(path):
    text = path.read_text("utf-8")
    assert fill(text) == text, f"python tools/render_tables.py {path.relative_to(ROOT)}"


def test_a_changed_table_is_found_and_mended(tmp_path, capsys):
    text, page = RESULTS.read_text("utf-8"), tmp_path / "page.md"
    page.write_text(text.replace("| 1 | ", "| 1 | 12345 | ", 1))
    assert main(["--check", str(page)]) == 1
    assert main([str(page)]) == 0
    assert page.read_text() == text
    assert capsys.readouterr().out == f"differs: {page}\nfilled: {page}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--columns nope", "line 1: no column nope; there are "),
        ("--where 'm == 7' --columns m", "line 1: no row matches 'm == 7'"),
        ("--nope", "unknown option --nope"),
    ],
)
def test_a_mark_that_cannot_be_filled(arguments, said):
    with pytest.raises(ValueError, match=said):
        fill(f"<!-- rows docs/results/h200.jsonl {arguments} -->\n<!-- end -->\n")
