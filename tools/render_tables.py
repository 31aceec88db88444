"""Render recorded rows as Markdown tables into documents: ``render_tables.py [--check] FILE...``.

A document holds a table between two marks; paths start at the root of the repository::

    <!-- rows docs/results/h200.jsonl --where "n == 8192" --lines m --across series -->
    <!-- end -->

``--where`` is an expression of pandas over the columns of ``frame``; ``--sort`` a column, largest
values first; without it rows come as they are in the files. ``--columns`` lists columns,
a line a row. ``--lines`` and ``--across`` make a table of one cell per value of ``across``; of
several rows in a cell the fastest is shown, and ``--columns`` then names the headings in order.
"""

import argparse
import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]

from fdk_bench.cases import DTYPES
from fdk_bench.peers import PEERS
from fdk_bench.rows import read_records, run_text
from fdk_bench.tables import code_bits, make_markdown, seconds_text, share_text, with_error

ROOT = Path(__file__).parent.parent
START = r"<!-- rows (?P<arguments>[^\n]*) -->\n"
MARK = re.compile(rf"(?P<start>{START})(?:(?!<!-- ).)*?(?P<end><!-- end -->)", re.DOTALL)
LEFT = ("shape", "format", "method", "by", "model", "series", "op", "machine")
PEER_NAMES = {peer.name for peer in PEERS}


def frame(files: list[Path]) -> pd.DataFrame:
    """Return the measured rows of some files: case, values, and texts for the cells of tables.

    Also ``benchmark``, ``machine`` (the file), ``bits``, ``shape``, ``series`` (``bf16``,
    ``4-bit fdk``, ``4-bit best peer``), ``seconds`` (by which a cell's fastest row is chosen),
    ``run``, and the texts ``by``, ``time``, ``us``, ``result`` (``us``, for peers with their name),
    ``share``, ``spread``, ``x 16 bit``, ``tokens/s``, ``first token`` and ``memory GB``; of
    language models ``bits/weight``, ``model bits``, ``perplexity``, ``KL`` and ``same token``.
    """
    rows = [
        {**_line(record), "machine": file.stem}
        for file in files
        for record in read_records([file])
        if record["values"] is not None
    ]
    return pd.DataFrame(rows).convert_dtypes()


def _line(record: dict[str, Any]) -> dict[str, Any]:
    case, values = record["case"], record["values"]
    line = {**case, **values, "benchmark": record["benchmark"]}
    line |= {"run": run_text(record), "seconds": values.get("time", values.get("step_time", 0.0))}
    line["by"] = values.get("backend") or values.get("backends") or case.get("by", "")
    line["time"] = seconds_text(line["seconds"])
    line["us"] = f"{1e6 * line['seconds']:.{_places(1e6 * line['seconds'])}f}"
    line["result"] = line["us"]
    if "format" in case:
        line["bits"] = code_bits(case["format"])
        width = case["format"] if case["format"] in DTYPES else f"{line['bits']}-bit"
        is_peer = case["backend"] in PEER_NAMES
        who = {"models": ""}.get(record["benchmark"], " best peer" if is_peer else " fdk")
        line["series"] = width if case["format"] in DTYPES and not is_peer else width + who
        if is_peer:
            name = re.sub(r" \(.*| repacked| for AMX", "", line["by"])
            line["result"] = f"{line['us']} ({name})"
    for n, k in (("n", "k"), ("rows", "columns")):
        if n in case:
            line["shape"] = f"{case[n]} x {case[k]}"
    if "floor" in values:
        line["share"] = share_text(values["floor"] / line["seconds"])
    if "spread" in values:
        line["spread"] = f"{100 * values['spread']:.0f} %"
    line["x 16 bit"] = f"{values['speedup_16']:.2f}" if values.get("speedup_16") else ""
    if "tokens_per_second" in values:
        rate = values["tokens_per_second"]
        line["tokens/s"] = f"{rate:.{_places(rate)}f}"
        line["first token"] = seconds_text(values["first_token_time"])
        line["memory GB"] = f"{values['memory'] / 1e9:.2f}" if values.get("memory") else ""
    for name, digits in (("weight_error", ".4f"), ("output_error", ".4f"), ("cosine_mean", ".5f")):
        if name in values:
            line[name.replace("_mean", "").replace("_", " ")] = f"{values[name]:{digits}}"
    if record["benchmark"] == "accuracy":
        line["format"] += " +cal" if case.get("calibration") else ""
        line["bits/weight"] = f"{values['bits_per_weight']:.3f}"
        line["file MB"] = f"{values['file_bytes'] / 1e6:.2f}"
    if record["benchmark"] == "language":
        for name, key in (("perplexity", "perplexity"), ("KL", "divergence")):
            line[name] = with_error(values[key], values[f"{key}_error"])
        line["bits/weight"] = f"{values['bits_per_weight']:.2f}"
        line["model bits"] = f"{values['model_bits_per_weight']:.2f}"
        line["same token"] = f"{100 * values['agreement']:.0f} %"
    return line


def _places(value: float) -> int:
    """Return the decimal places that three digits take."""
    return max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0


def render(arguments: str, root: Path) -> str:
    """Return the table that a mark asks for, and below it the runs that its rows are from.

    Raises:
        ValueError: for an unknown option or column, and where no row matches.
    """
    parser = argparse.ArgumentParser(prog="<!-- rows", exit_on_error=False, add_help=False)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--where", default="")
    parser.add_argument("--sort", default="")
    parser.add_argument("--lines", default="")
    parser.add_argument("--across", default="")
    parser.add_argument("--cell", default="result")
    parser.add_argument("--columns", default="")
    try:
        mark, unknown = parser.parse_known_args(shlex.split(arguments))
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    if unknown:
        raise ValueError(f"unknown option {' '.join(unknown)}")
    rows = frame([root / file for file in mark.files])
    rows = rows.query(mark.where) if mark.where else rows
    columns = [name.strip() for name in mark.columns.split(",") if name.strip()]
    lines = [name.strip() for name in mark.lines.split(",") if name.strip()]
    wanted = [*lines, mark.across, mark.cell] if lines else columns
    wanted = [*wanted, mark.sort] if mark.sort else wanted
    if unknown := [name for name in wanted if name not in rows]:
        raise ValueError(f"no column {', '.join(unknown)}; there are {', '.join(rows)}")
    if rows.empty:
        raise ValueError(f"no row matches {mark.where!r}")
    if mark.sort:
        rows = rows.sort_values(mark.sort, ascending=False, kind="stable", ignore_index=True)
    if not lines:
        table = make_markdown(columns, LEFT, _texts(rows, columns))
    else:
        fastest = rows.sort_values("seconds", kind="stable")
        fastest = fastest.drop_duplicates([*lines, mark.across])
        headings = columns or list(dict.fromkeys(rows[mark.across]))
        rows = fastest[fastest[mark.across].isin(headings)].sort_index()
        cells: dict[tuple[str, ...], dict[str, str]] = {}
        for line, row in zip(_texts(rows, lines), rows.to_dict("records"), strict=True):
            key = tuple(line.values())
            cells.setdefault(key, dict.fromkeys(headings, "") | line)
            cells[key][row[mark.across]] = str(row[mark.cell])
        table = make_markdown([*lines, *headings], LEFT, cells.values())
    return f"{table}\nRows: {'; '.join(dict.fromkeys(rows['run']))}.\n"


def _texts(rows: pd.DataFrame, columns: list[str]) -> list[dict[str, str]]:
    texts = rows[columns].astype(object).where(rows[columns].notna(), "")
    return [{name: str(row[name]) for name in columns} for row in texts.to_dict("records")]


def fill(text: str, root: Path = ROOT) -> str:
    """Return a document with every marked table rendered anew.

    Raises:
        ValueError: see ``render``, and for a mark without its end; the message names the line.
    """

    def anew(match: re.Match[str]) -> str:
        try:
            return f"{match['start']}\n{render(match['arguments'], root)}\n{match['end']}"
        except ValueError as error:
            line = text.count("\n", 0, match.start()) + 1
            raise ValueError(f"line {line}: {error}") from None

    if len(MARK.findall(text)) != len(re.findall(START, text)):
        raise ValueError("a mark <!-- rows ... --> has no <!-- end --> before the next comment")
    return MARK.sub(anew, text)


def main(arguments: list[str]) -> int:
    """Fill documents in; with ``--check`` only say which differ. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1")
    parser.add_argument("documents", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    stale = False
    for path in options.documents:
        before = path.read_text("utf-8")
        if (after := fill(before)) != before:
            stale = True
            print(f"{'differs' if options.check else 'filled'}: {path}")
            if not options.check:
                path.write_text(after, "utf-8")
    return int(stale and options.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
