"""tools/documents.py on documents made for it."""

import pytest
from documents import broken_links, examples, run_examples

RUNS = """
# A title

```python
a = 6
```

Prose, and then:

```python
print(a * 7)
```

```output
42
```

```bash
exit 1
```
"""


def write(tmp_path, text):
    path = tmp_path / "document.md"
    path.write_text(text)
    return path


def test_examples_are_the_python_blocks(tmp_path):
    found = examples(write(tmp_path, RUNS))
    assert [(e.code, e.line, e.output) for e in found] == [
        ("a = 6\n", 4, None),
        ("print(a * 7)\n", 10, "42\n"),
    ]


def test_run_examples_shares_names_within_a_file(tmp_path):
    assert run_examples(write(tmp_path, RUNS)) == 2


def test_run_examples_compares_the_output(tmp_path):
    path = write(tmp_path, RUNS.replace("42", "43"))
    with pytest.raises(AssertionError, match=r"document\.md:10: the document shows\n43"):
        run_examples(path)


def test_run_examples_ignores_output_further_down(tmp_path):
    text = "```python\nprint(1)\n```\n\nProse.\n\n```output\n2\n```\n"
    assert run_examples(write(tmp_path, text)) == 1


def test_run_examples_raises_with_the_line_of_the_document(tmp_path):
    with pytest.raises(ZeroDivisionError) as caught:
        run_examples(write(tmp_path, "Prose.\n\n```python\na = 1\na / 0\n```\n"))
    last = caught.traceback[-1]
    assert (last.path.name, last.lineno + 1) == ("document.md", 5)


@pytest.mark.parametrize(
    ("link", "broken"),
    [
        ("other.md", False),
        ("missing.md", True),
        ("folder", False),
        ("#the-first-heading-k--1", False),
        ("#the-first-heading", True),
        ("other.md#twice", False),
        ("other.md#twice-1", False),
        ("other.md#twice-2", True),
        ("https://example.org/missing", False),
    ],
)
def test_broken_links(tmp_path, link, broken):
    (tmp_path / "folder").mkdir()
    (tmp_path / "other.md").write_text("# Twice\n\n## Twice\n")
    path = write(tmp_path, f"# The *first* heading, `k` > 1\n\nSee [this]({link}).\n")
    assert broken_links(path) == ([link] if broken else [])


def test_broken_links_sees_pictures_and_tables_but_not_code(tmp_path):
    text = "![a](a.png)\n\n| b |\n|---|\n| [b](b.md) |\n\n`[c](c.md)`\n\n```\n[d](d.md)\n```\n"
    assert broken_links(write(tmp_path, text)) == ["a.png", "b.md"]
