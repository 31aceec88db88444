"""tools/render_tables.py: tables between marks, and the documents that hold them."""

import json
import subprocess
from pathlib import Path

import pytest
from render_tables import MARK, START, fill, main

ROOT = Path(__file__).parent.parent
TRACKED = subprocess.run(
    ["git", "-C", str(ROOT), "ls-files", "*.md"], capture_output=True, text=True, check=False
)
DOCUMENTS = [ROOT / name for name in TRACKED.stdout.split() if (ROOT / name).is_file()]
WITH_TABLES = [path for path in DOCUMENTS if MARK.search(path.read_text("utf-8"))]


@pytest.mark.parametrize("path", WITH_TABLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_are_those_of_the_recorded_rows(path):
    text = path.read_text("utf-8")
    assert fill(text) == text, f"python tools/render_tables.py {path.relative_to(ROOT)}"


def test_the_results_page_has_tables():
    assert ROOT / "docs" / "results" / "README.md" in WITH_TABLES


def line(m, format, backend, time):
    case = {"m": m, "format": format, "backend": backend}
    return {"case": case, "values": {"backend": backend, "time": time, "floor": 1e-6}}


@pytest.fixture
def root(tmp_path):
    shared = {"benchmark": "compare", "device": "a GPU", "threads": 1, "command": "fdk-bench"}
    shared |= {"started": "2026-11-20T00:00:00+00:00", "commit": "0123456789ab-dirty"}
    shared |= {"versions": {"torch": "2"}, "case": {"n": 64, "k": 32, "device": "cuda"}}
    rows = [line(m, "bf16", "torch", 9.87e-6) for m in (1, 16)]
    rows += [line(1, "int4-g64", "marlin", 2e-6), line(1, "custom4-g64", "triton", 2.5e-6)]
    rows += [line(1, "int4-g64", "humming", 3e-6), line(1, "int4-g64", "gemlite", 4e-6)]
    rows.append({"case": rows[0]["case"], "error": "no"})
    path = tmp_path / "gpu.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in [shared, *rows]))
    return tmp_path


PIVOT = """\
<!-- rows gpu.jsonl --lines m --across series -->

| m | bf16 | 4-bit fdk | 4-bit best peer |
| ---: | ---: | ---: | ---: |
| 1 | 9.87 | 2.00 | 3.00 (humming) |
| 16 | 9.87 |  |  |

Rows: a GPU, 2026-11-20, torch 2, commit 0123456789 and changes.

<!-- end -->
"""
PLAIN = """\
<!-- rows gpu.jsonl --where "m == 1 and bits == 4" --columns "shape,by,time,share" -->

| shape | by | time | share |
| --- | --- | ---: | ---: |
| 64 x 32 | marlin | 2 us | 50 % |
| 64 x 32 | triton | 2.5 us | 40 % |
| 64 x 32 | humming | 3 us | 33 % |
| 64 x 32 | gemlite | 4 us | 25 % |

Rows: a GPU, 2026-11-20, torch 2, commit 0123456789 and changes.

<!-- end -->
"""


@pytest.mark.parametrize("text", [PIVOT, PLAIN], ids=["pivot", "plain"])
def test_fill(text, root):
    start = text.splitlines()[0]
    document = f"# A\n\n{start}\n| an old table |\n<!-- end -->\n\nrest\n"
    assert fill(document, root) == f"# A\n\n{text}\nrest\n"
    assert fill(text, root) == text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("gpu.jsonl --columns nope", "line 1: no column nope; there are "),
        ("gpu.jsonl --where 'm == 7' --columns m", "line 1: no row matches 'm == 7'"),
        ("absent.jsonl --columns m", "wanted a UTF-8 text file"),
        ("gpu.jsonl --nope", "unknown option --nope"),
    ],
)
def test_a_mark_that_cannot_be_filled(arguments, said, root):
    with pytest.raises(ValueError, match=said):
        fill(f"<!-- rows {arguments} -->\n<!-- end -->\n", root)


def test_a_mark_without_its_end(root):
    with pytest.raises(ValueError, match="has no <!-- end -->"):
        fill(f"{START.split('(')[0]}gpu.jsonl --columns m -->\n\n{PIVOT}", root)


def test_command(root, monkeypatch, capsys):
    monkeypatch.setattr("render_tables.ROOT", root)
    path = root / "page.md"
    path.write_text(PIVOT.replace("9.87", "1.23"))
    monkeypatch.setattr(fill, "__defaults__", (root,))
    assert main(["--check", str(path)]) == 1
    assert "1.23" in path.read_text()
    assert main([str(path)]) == 0
    assert path.read_text() == PIVOT
    assert main(["--check", str(path)]) == 0
    assert capsys.readouterr().out == f"differs: {path}\nfilled: {path}\n"
