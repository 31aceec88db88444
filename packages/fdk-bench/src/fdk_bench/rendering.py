"""Markdown tables of recorded rows, and the documents that hold them between two marks."""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fdk_bench.accuracy_cases import AccuracyCase, AccuracyValues
from fdk_bench.accuracy_tables import HEADINGS as ACCURACY_HEADINGS
from fdk_bench.accuracy_tables import accuracy_cells
from fdk_bench.blockwise_tables import HEADINGS as BLOCKWISE_HEADINGS
from fdk_bench.blockwise_tables import BlockwiseCase, BlockwiseValues
from fdk_bench.blockwise_tables import cells_of as blockwise_cells
from fdk_bench.blockwise_tables import summary as blockwise_summary
from fdk_bench.cases import KernelCase
from fdk_bench.goal_tables import goals_table, read_goals
from fdk_bench.kernel_tables import HEADINGS as KERNEL_HEADINGS
from fdk_bench.kernel_tables import cells_of as kernel_cells
from fdk_bench.kernel_tables import markdown
from fdk_bench.kernels import KernelValues
from fdk_bench.model_cases import ModelCase, ModelValues
from fdk_bench.model_tables import HEADINGS as MODEL_HEADINGS
from fdk_bench.model_tables import cells_of as model_cells
from fdk_bench.records import Row, machine_of
from fdk_bench.results import ResultsError, read_records

Cells = Mapping[str, str]
Record = Mapping[str, Any]
# <!-- fdk-bench table FILE --include REGEX --columns a,b --goals FILE --> ... <!-- end -->
START = r"<!-- fdk-bench table (?P<arguments>[^\n]*?) -->[ \t]*(?:\r?\n|\Z)"
# Tables of other programs are marked as <!-- NAME table -->: a body holds the start of none.
BODY = r"(?:(?!<!-- (?:fdk-bench table |[\w -]+ table -->)).)*?"
MARK = re.compile(rf"(?P<start>{START}){BODY}(?P<end><!-- end -->)", re.DOTALL)
TEXT_COLUMNS = ("format", "head", "by", "model", "n x k", "shape", "op")


@dataclass(frozen=True)
class Kind:
    """How rows of a benchmark become lines of a table, and what is said of all below it."""

    headings: Sequence[str]
    load: Callable[[Record], Row[Any, Any]]
    cells: Callable[[Row[Any, Any]], Cells]
    summary: Callable[[Sequence[Row[Any, Any]]], str] | None = None


def _loader(case: type, values: type) -> Callable[[Record], Row[Any, Any]]:
    def load(record: Record) -> Row[Any, Any]:
        measured = None if record["values"] is None else _of(values, record["values"])
        return Row(_of(case, record["case"]), measured, record["error"])

    return load


def _of(type: Any, entries: Record) -> Any:
    """What a newer version added and this one does not know is left out."""
    known = {field.name for field in fields(type)}
    return type(**{name: value for name, value in entries.items() if name in known})


KERNELS = Kind(KERNEL_HEADINGS, _loader(KernelCase, KernelValues), kernel_cells)
KINDS = {
    "kernels": KERNELS,
    "compare": KERNELS,
    "models": Kind(MODEL_HEADINGS, _loader(ModelCase, ModelValues), model_cells),
    "blockwise": Kind(
        BLOCKWISE_HEADINGS,
        _loader(BlockwiseCase, BlockwiseValues),
        blockwise_cells,
        blockwise_summary,
    ),
    "accuracy": Kind(ACCURACY_HEADINGS, _loader(AccuracyCase, AccuracyValues), accuracy_cells),
}


def render(
    files: Sequence[Path],
    include: str = "",
    columns: Sequence[str] = (),
    goals: Path | None = None,
) -> str:
    """The rows of some files as a Markdown table, and below it the runs that they are of.

    Args:
        files: of rows of one benchmark (``kernels`` and ``compare`` count as one).
        include: a regular expression searched in the text of a case.
        columns: headings, in order; all that any row fills where none is named.
        goals: a file of goals, see ``read_goals``, that rows of kernels are shown beside.

    Raises:
        ResultsError: for files that hold no such row, for a column that there is not, and for
            columns beside goals, which have their own.
    """
    if goals is not None and columns:
        raise ResultsError(f"--goals: wanted no --columns beside it, got {', '.join(columns)}")
    try:
        wanted = re.compile(include)
    except re.error as error:
        text = f"--include: wanted a regular expression, got {include!r}: {error}"
        raise ResultsError(text) from None
    records = [
        record
        for record in read_records(files, _check)
        if record["benchmark"] in KINDS and wanted.search(_text(record))
    ]
    names = ", ".join(str(file) for file in files)
    if not records:
        raise ResultsError(f"{names}: wanted rows that match {include!r}, found none")
    kinds = {id(KINDS[r["benchmark"]]): KINDS[r["benchmark"]] for r in records}
    if len(kinds) > 1:
        raise ResultsError(f"{names}: wanted rows of one benchmark")
    (kind,) = kinds.values()
    if goals is not None:
        if kind is not KERNELS:
            raise ResultsError(f"--goals: wanted rows of kernels, {names} has others")
        found = goals_table([kind.load(record) for record in records], read_goals(goals))
        return f"{found}\n{_runs(records)}\n"
    if unknown := [name for name in columns if name not in kind.headings]:
        known = ", ".join(kind.headings)
        raise ResultsError(f"--columns: wanted some of {known}; got {', '.join(unknown)}")
    rows = [kind.load(record) for record in records]
    lines = [kind.cells(row) for row in rows]
    shown = columns or [h for h in kind.headings if any(cells.get(h) for cells in lines)]
    table = markdown(shown, TEXT_COLUMNS, lines)
    if kind.summary is not None:
        table += f"\n{kind.summary(rows)}"
    return f"{table}\n{_runs(records)}\n"


def fill(text: str, root: Path) -> str:
    """A document with every marked table rendered anew; paths in its marks start at ``root``.

    A path may hold ``*``: the parts of a machine that were measured. Lines end as the mark's does.

    Raises:
        ResultsError: see ``render``, and for a mark without its end; the text says which line.
    """

    def anew(match: re.Match[str]) -> str:
        try:
            table = f"\n{_table(match['arguments'], root)}\n"
        except ResultsError as error:
            raise ResultsError(f"line {_line(match)}: {error}") from None
        if match["start"].endswith("\r\n"):
            table = table.replace("\n", "\r\n")
        return f"{match['start']}{table}{match['end']}"

    closed = {match.start() for match in MARK.finditer(text)}
    for match in re.finditer(START, text):
        if match.start() not in closed:
            wanted = "wanted <!-- end --> below this mark, and before the next"
            raise ResultsError(f"line {_line(match)}: {wanted}; got none")
    return MARK.sub(anew, text)


def _line(match: re.Match[str]) -> int:
    return match.string.count("\n", 0, match.start()) + 1


def _table(arguments: str, root: Path) -> str:
    """What a mark asks for."""
    files, include, columns, goals = parse_mark(arguments)
    paths = [path for file in files for path in _matching(root, file)]
    return render(paths, include, columns, root / goals if goals else None)


def _matching(root: Path, file: str) -> list[Path]:
    if "*" not in file:
        return [root / file]
    try:
        found = sorted(root.glob(file))
    except (NotImplementedError, ValueError) as error:  # of an absolute path, of a**
        raise ResultsError(f"{file}: wanted a pattern of paths below {root}: {error}") from None
    if not found:
        raise ResultsError(f"{file}: wanted files, found none")
    return found


def parse_mark(arguments: str) -> tuple[list[str], str, list[str], str]:
    """Files, ``--include``, ``--columns`` and ``--goals`` of a mark.

    Raises:
        ResultsError: for any other option, one without its value, and no file.
    """
    files, options = [], {"--include": "", "--columns": "", "--goals": ""}
    try:
        words = iter(shlex.split(arguments))
    except ValueError as error:
        raise ResultsError(f"wanted words in a mark, got {arguments}: {error}") from None
    for word in words:
        if word in options:
            value = next(words, None)
            if value is None:
                raise ResultsError(f"wanted a value of {word} in a mark, got none")
            options[word] = value
        elif word.startswith("-"):
            raise ResultsError(f"wanted {' or '.join(options)} in a mark, got {word}")
        else:
            files.append(word)
    if not files:
        raise ResultsError(f"wanted files in a mark, got {arguments!r}")
    columns = [name.strip() for name in options["--columns"].split(",") if name.strip()]
    return files, options["--include"], columns, options["--goals"]


def _check(record: Record) -> None:
    """Fails for a row that does not render."""
    if record["benchmark"] in KINDS:
        kind = KINDS[record["benchmark"]]
        kind.cells(kind.load(record))
        _runs([record])


def _text(record: Record) -> str:
    return str(KINDS[record["benchmark"]].load(record).case)


def _runs(records: Iterable[Record]) -> str:
    """The command, machine, date and commit of each run that the rows are of."""
    lines: dict[tuple[str, str], str] = {}
    for record in records:
        commit = ""
        if record["commit"]:
            number, _, dirty = record["commit"].partition("-")
            commit = f", commit {number[:10]}" + (" and changes" if dirty else "")
        lines[record["command"], record["started"]] = (
            f"`{record['command']}` on {machine_of(record)}, "
            f"{record['started'][:10]}, torch {record['versions']['torch']}{commit}"
        )
    return ";\n".join(lines.values()) + "."
