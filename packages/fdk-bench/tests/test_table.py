"""Tables of rows, and the documents that hold them."""

import json

import pytest
from typer.testing import CliRunner

from fdk_bench.cli import app
from fdk_bench.rendering import fill, parse_mark, render
from fdk_bench.results import ResultsError


@pytest.fixture
def rows(tmp_path, kernel):
    path = tmp_path / "kernels.jsonl"
    failed = kernel("int2-g64") | {"values": None, "error": "no"}
    records = [kernel(), kernel(m=16, time=4e-6), failed]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


RENDERED = """\
| format | m | time | x 16 bit |
| --- | ---: | ---: | ---: |
| int4-g64 | 1 | 2 us | 3.50 |
| int4-g64 | 16 | 4 us | 3.50 |

`fdk-bench kernels -k 64` on a chip, 2 threads, 2026-11-20, torch 2, commit 0123456789.
"""


def test_render(rows):
    assert render([rows], "int4", ["format", "m", "time", "x 16 bit"]) == RENDERED
    whole = render([rows]).splitlines()
    assert whole[0].startswith("| n x k | m | format | by | time | least | spread | GB/s | floor |")
    assert "eager" not in whole[0]
    assert "| 64 x 64 | 1 | int2-g64 | auto | failed |" in whole[4]


BLOCKWISE = """\
| shape | op | by | time | least | spread | calls | first | result MB | extra MB |
| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| 1024 x 4096 | dequantise nf4 bf16 | fdk C++ | 450 us | 400 us | 5 % | 12 | 900 us | 8 | 3 |
"""
STANDING = """
| by | beside | op | times as fast | ahead | by the least | by the first |
| --- | --- | --- | ---: | ---: | ---: | ---: |
| fdk C++ | bnb C++ | dequantise | 0.80 to 2.00 | 1 of 2 | 2 of 2 | 0 of 1 |
| fdk torch | bnb torch | quantise | 3.00 to 3.00 | 1 of 1 | 1 of 1 |  |

Beyond the result, at most: fdk C++ 3 MB, bnb C++ 0 MB, fdk torch 20 MB.

`fdk-bench kernels -k 64`"""


def blockwise_row(by, time, op="dequantise nf4 bf16", rows=1024, extra=0, **values):
    case = {"op": op, "rows": rows, "columns": 4096, "by": by, "device": "cpu"}
    known = {"time": time, "time_min": time, "spread": 0.05, "samples": 12, "coarse": 0.0}
    known |= {"result_bytes": 8_000_000, "memory": 8_000_000 + extra} | values
    return {"benchmark": "blockwise", "case": case, "values": known, "error": None}


def test_render_blockwise(tmp_path, facts):
    """By hand: 11 MB more, of which 8 are the result; 450 us beside 900, and 1000 beside 800."""
    quantise = "quantise 8-bit fp32"
    rows = [
        blockwise_row("fdk C++", 4.5e-4, extra=3_000_000, time_min=4e-4, time_first=9e-4),
        blockwise_row("bnb C++", 9e-4, time_first=8e-4),
        blockwise_row("fdk C++", 1e-3, rows=4096, time_min=7e-4, time_first=1e-3),
        blockwise_row("bnb C++", 8e-4, rows=4096, extra=-4096),
        blockwise_row("fdk torch", 1e-3, quantise, extra=20_000_000),
        blockwise_row("bnb torch", 3e-3, quantise, memory=None),
        blockwise_row("fdk C++", 1e-3, quantise) | {"values": None, "error": "no"},
    ]
    path = tmp_path / "blockwise.jsonl"
    path.write_text("\n".join(json.dumps(facts | row) for row in rows))
    text = render([path])
    assert text.startswith(BLOCKWISE)
    assert STANDING in text
    without = "| 1024 x 4096 | quantise 8-bit fp32 | bnb torch | 3 ms | 3 ms | 5 % | 12 |  | 8 |  |"
    assert without in text
    assert render([path], "^4096x4096").count("| 1 of 1 |") == 1


def test_render_refuses(rows, tmp_path, facts):
    with pytest.raises(ResultsError, match="wanted rows that match 'nf4', found none"):
        render([rows], "nf4")
    with pytest.raises(ResultsError, match=r"--columns: wanted some of n x k, .*; got tokens/s"):
        render([rows], "", ["tokens/s"])
    other = tmp_path / "accuracy.jsonl"
    case = {"format": "bf16", "model": "m", "backend": "auto", "skip": "", "sentences": 1}
    failed = facts | {"benchmark": "accuracy", "case": case, "values": None, "error": "no"}
    other.write_text(json.dumps(failed))
    with pytest.raises(ResultsError, match="rows of one benchmark"):
        render([rows, other])


DOCUMENT = """# A
<!-- fdk-bench table kernels.jsonl --include int4 --columns 'format,m,time,x 16 bit' -->
| an old table |
<!-- end -->
rest
"""


def test_fill(rows):
    filled = fill(DOCUMENT, rows.parent)
    assert f"-->\n\n{RENDERED}\n<!-- end -->\nrest\n" in filled
    assert "old table" not in filled
    assert fill(filled, rows.parent) == filled
    assert fill("no mark", rows.parent) == "no mark"


START, END = DOCUMENT.splitlines()[1], "<!-- end -->"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"# A\n{START}\nprose\n\n{START}\n{END}\n", 2),
        (f"# A\n{START}\nprose\n<!-- marlin many table -->\n{END}\n", 2),
        (f"{START}\n{END}\n\n{START}\nprose\n", 4),
        (f"prose\r\n\r\n{START} ", 3),
    ],
    ids=["before-another", "before-one-of-others", "last", "last-line"],
)
def test_a_mark_without_its_end(text, line, rows, monkeypatch):
    wanted = f"line {line}: wanted <!-- end --> below this mark, and before the next; got none"
    with pytest.raises(ResultsError, match=wanted):
        fill(text, rows.parent)
    monkeypatch.chdir(rows.parent)
    good, bad = rows.parent / "good.md", rows.parent / "bad.md"
    good.write_text(DOCUMENT)
    bad.write_text(text, newline="")
    for options in ("--fill",), ("--fill", "--check"):
        done = run("table", good, bad, *options)
        assert done.exit_code == 2
        assert f"bad.md: {wanted}" in done.stderr
    assert (good.read_text(), bad.read_bytes()) == (DOCUMENT, text.encode())  # all or none


def test_lines_end_as_they_did(rows, monkeypatch):
    monkeypatch.chdir(rows.parent)
    document = rows.parent / "README.md"
    document.write_text(DOCUMENT, newline="\r\n")
    assert run("table", "--fill", document).exit_code == 0
    wanted = fill(DOCUMENT, rows.parent).replace("\n", "\r\n")
    assert document.read_bytes() == wanted.encode()
    assert run("table", "--fill", "--check", document).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("absent.jsonl", "absent.jsonl: wanted a UTF-8 text file: "),
        ("absent-*.jsonl", "absent-*.jsonl: wanted files, found none"),
        (".", "wanted a UTF-8 text file: "),
        ("kernels.jsonl --goals absent.jsonl", "absent.jsonl: wanted a UTF-8 text file: "),
        ("kernels.jsonl --include (", "--include: wanted a regular expression, got '('"),
        ("kernels.jsonl --include 'a", "wanted words in a mark"),
        ("kernels.jsonl --columns", "wanted a value of --columns in a mark"),
        ("--include int4", "wanted files in a mark"),
        ("kernels.jsonl --goals g --columns m", "--goals: wanted no --columns beside it, got m"),
    ],
)
def test_a_mark_that_asks_amiss(arguments, said, rows, monkeypatch):
    monkeypatch.chdir(rows.parent)
    document = rows.parent / "README.md"
    document.write_text(f"# A\n<!-- fdk-bench table {arguments} -->\n<!-- end -->\n")
    done = run("table", "--fill", document)
    assert done.exit_code == 2
    assert "README.md: line 2: " in done.stderr
    assert said in done.stderr


@pytest.mark.parametrize(
    "changed",
    [{"case": {}}, {"values": {}}, {"versions": {}}, {"commit": 1}, {"started": None}],
    ids=lambda changed: next(iter(changed)),
)
def test_a_row_that_is_not_whole(changed, rows, kernel):
    rows.write_text(f"{json.dumps(kernel())}\n\n{json.dumps(kernel(**changed))}\n")
    done = run("table", rows)
    assert done.exit_code == 2
    assert "kernels.jsonl:3: wanted a whole row of kernels; got " in done.stderr


def test_files_that_are_no_text(rows, tmp_path):
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b"\xe9\n")
    for arguments in ((rows, latin), (tmp_path,), (rows, "--goals", tmp_path), ("--fill", latin)):
        done = run("table", *arguments)
        assert done.exit_code == 2
        assert f"{arguments[-1]}: wanted a UTF-8 text file: " in done.stderr


def test_parse_mark():
    assert parse_mark("a b --include 'x y' --columns 'm, n x k'") == (
        ["a", "b"],
        "x y",
        ["m", "n x k"],
        "",
    )
    assert parse_mark("a --goals g.jsonl") == (["a"], "", [], "g.jsonl")
    with pytest.raises(ResultsError, match="got --other"):
        parse_mark("a --other")


def test_table_command(rows, monkeypatch):
    monkeypatch.chdir(rows.parent)
    asked = ("--include", "int4", "--columns", "format,m,time,x 16 bit")
    assert run("table", rows, *asked).stdout == RENDERED
    assert json.loads(run("table", rows, *asked, "--json").stdout) == RENDERED
    document = rows.parent / "README.md"
    document.write_text(DOCUMENT)
    stale = run("table", "--fill", "--check", document)
    assert (stale.exit_code, document.read_text()) == (1, DOCUMENT)
    assert f"would change: {document}" in stale.stdout
    assert run("table", "--fill", document).exit_code == 0
    done = run("table", "--fill", "--check", document)
    assert (done.exit_code, done.stdout) == (0, "every table is up to date\n")
    assert json.loads(run("table", "--fill", document, "--json").stdout) == []
    assert run("table", rows, "--check").exit_code == 2
    assert run("table", rows, "--columns", "nothing").exit_code == 2


TOLD_1 = ["64 x 64 ", " 4 ", " 1 ", " cpu ", " 2 us ", " 1 us ", " 50 % ", " 3.50 "]
TOLD_16 = ["64 x 64 ", " 4 ", " 16 ", " cpu ", " 4 us ", " 1 us ", " 25 % ", " 3.50 "]


def test_goals(tmp_path, kernel):
    """By hand: 2 us beside a goal of 2.5 is met, 4 beside 3 is not; a peer takes 3."""
    path, goals = tmp_path / "kernels.jsonl", tmp_path / "goals.jsonl"
    slow = kernel(m=1, time=9e-6)
    slow["case"]["backend"] = "reference"  # ours too, and not the fastest
    peer = kernel(m=1, time=3e-6)
    peer["case"]["backend"] = "humming"
    records = [kernel(), slow, peer, kernel(m=16, time=4e-6)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    wanted = [{"n": 64, "k": 64, "bits": 4, "m": m, "goal": g} for m, g in ((1, 2.5), (16, 3))]
    wanted.append({"n": 1, "k": 64, "bits": 4, "m": 1, "goal": 1})
    goals.write_text("".join(json.dumps(goal) + "\n" for goal in wanted))
    lines = run("table", path, "--goals", goals).stdout.splitlines()
    assert [line.strip("| ").split("|") for line in lines[2:4]] == [
        [*TOLD_1, " 3 us (humming) ", " 1.50 ", " 2.5 us ", " 0.80 ", " yes"],
        [*TOLD_16, "  ", "  ", " 3 us ", " 1.33 ", " no"],
    ]
    assert lines[5] == "Faster than the best peer: 1 of 1 cases."
    assert lines[7] == "1 of 2 measured goals met; 1 of 3 were not measured."
    assert lines[9:11] == [
        "- 64 x 64: 1 of 2 measured goals met; over: 4 bits m=16 (1.33).",
        "- 1 x 64: 0 of 0 measured goals met; 1 of 1 not measured.",
    ]
    goals.write_text(json.dumps(wanted[1]) + "\n")  # a case without a goal is shown too
    lines = run("table", path, "--goals", goals).stdout.splitlines()
    assert lines[2].endswith("| 3 us (humming) | 1.50 |  |  |  |")
    goals.write_text(json.dumps(wanted[2]) + "\n")
    assert "- 64 x 64: has no goals." in run("table", path, "--goals", goals).stdout
    both = run("table", path, "--goals", goals, "--columns", "m")
    assert both.exit_code == 2
    assert "--goals: wanted no --columns beside it, got m" in both.stderr
    goals.write_text('\n{"n": 1}\n')
    told = run("table", path, "--goals", goals).output
    assert "goals.jsonl:2: wanted n, k, bits, m and goal" in told
