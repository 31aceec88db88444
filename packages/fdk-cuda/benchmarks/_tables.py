"""Tables of documents from recorded rows, between ``<!-- NAME table -->`` and ``<!-- end -->``."""

import argparse
import json
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
NEAR = 1.05  # of a time over its goal
WIDTH = 120


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def read_goals(path: Path | None) -> dict[tuple[int, ...], float]:
    """Microseconds by (n, k, bits, m); none without a file."""
    rows = [] if path is None else read_rows(path)
    return {(row["n"], row["k"], row["bits"], row["m"]): row["goal"] for row in rows}


def markdown(lines: Iterable[Iterable[object]]) -> str:
    """Lines of cells, the first two the headings and what follows them."""
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def paragraph(text: str) -> str:
    """Prose in the width of documents."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def goals_met(ratios: Sequence[float]) -> str:
    """How many times over goals are met, or nearly."""
    met = sum(ratio <= 1 for ratio in ratios)
    near = sum(1 < ratio <= NEAR for ratio in ratios)
    over = len(ratios) - met - near
    told = f"{met} are met, {near} are within {100 * (NEAR - 1):.0f} %, {over} are over"
    return f"of {len(ratios)} goals {told}."


def least_to_most(ratios: Collection[float]) -> str:
    """The span of times over others."""
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def over_goals(ratios: dict[tuple[int, ...], float]) -> str:
    """The names of the cases, by (n, k, bits, m), whose times over goals are above 1, by shape.

    Those that are near are in brackets.
    """
    shapes: dict[str, list[str]] = {}
    for (n, k, bits, m), ratio in ratios.items():
        if ratio > 1:
            told = f"{bits}b m{m} {ratio:.2f}"
            shapes.setdefault(f"{n} x {k}", []).append(f"({told})" if ratio <= NEAR else told)
    return "; ".join(f"{shape}: {', '.join(cases)}" for shape, cases in shapes.items()) or "-"


def filled(text: str, name: str, table: str) -> str:
    """A document with a table between the marks of that name.

    Raises:
        ValueError: it has no such marks.
    """
    mark = re.compile(rf"(<!-- {name} table -->\n).*?(<!-- end -->)", re.DOTALL)
    if mark.search(text) is None:
        raise ValueError(f"wanted a document with <!-- {name} table --> and <!-- end -->; got none")
    return mark.sub(lambda match: f"{match[1]}\n{table.strip()}\n\n{match[2]}", text)


def show(name: str, table: str, document: Path | None) -> None:
    """Prints a table, or puts it into a document."""
    if document is None:
        print(table)
    else:
        document.write_text(filled(document.read_text("utf-8"), name, table), "utf-8")


def main(description: str, name: str, writer: str, table: Callable[[list[Row]], str]) -> None:
    """Reads the command line of a script that makes one table from what another wrote."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("rows", type=Path, help=f"JSONL, written by {writer} --out")
    parser.add_argument("--fill", type=Path, help="a document with marks")
    args = parser.parse_args()
    show(name, table(read_rows(args.rows)), args.fill)
