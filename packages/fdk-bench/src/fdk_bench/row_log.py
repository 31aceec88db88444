"""A file of rows that grows during a run, survives a kill, and can be resumed."""

import json
import os
import tempfile
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic

from fdk_bench.rows import Case, Facts, Row, RowsError, Values, read_records, to_json

# Facts that two runs may differ in and still be one benchmark.
OF_A_RUN = {"started", "command"}


class RowLog(Generic[Case, Values]):
    """Rows in a JSONL file. Earlier rows stay as they were written; a row is one line, added whole.

    A resumed file is rewritten once, before the first new row, where its last line was cut or
    rows are to be measured again: into a new file, which then takes its place.

    Args:
        path: path of the file.
        facts: facts of this run.
        case, values: types of the rows.
        resume: whether to go on with the rows that the file holds; else they are replaced by the
            first new row.

    Raises:
        RowsError: for a file that cannot be read, and for rows of another benchmark, commit,
            machine, version or environment.
    """

    def __init__(
        self,
        path: Path,
        facts: Facts,
        case: type[Case],
        values: type[Values],
        *,
        resume: bool = False,
    ) -> None:
        self.path = path
        self._facts = facts
        self._lines: list[tuple[Row[Case, Values], str]] = []
        self._begun = False
        if resume and path.exists():
            for record in read_records([path]):
                _check_facts(path, record, facts)
                line = json.dumps(record, allow_nan=False, ensure_ascii=False)
                self._lines.append((_row(path, record, case, values), line))

    @property
    def rows(self) -> list[Row[Case, Values]]:
        """The rows, earlier ones first."""
        return [row for row, _ in self._lines]

    @property
    def measured(self) -> set[Case]:
        """Cases that have values; those that failed are measured again."""
        return {row.case for row in self.rows if row.values is not None}

    def forget(self, cases: Collection[Case]) -> None:
        """Drop the earlier rows of cases that are measured again."""
        self._lines = [(row, line) for row, line in self._lines if row.case not in cases]

    def append(self, row: Row[Case, Values]) -> str:
        """Add a row; return its line."""
        if not self._begun:
            self._begin()
        line = to_json(row, self._facts)
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(f"{line}\n")
        self._lines.append((row, line))
        return line

    def _begin(self) -> None:
        text = "".join(f"{line}\n" for _, line in self._lines)
        # A special file (/dev/stdout, a pipe) has nothing to keep and cannot be replaced.
        if self.path.exists() and not self.path.is_file():
            self._begun = True
            return
        target = self.path.resolve()
        number, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(number, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
            mode = target.stat().st_mode if target.exists() else 0o666 & ~_umask()
            Path(name).chmod(mode & 0o777)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        self._begun = True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _check_facts(path: Path, record: dict[str, Any], facts: Facts) -> None:
    for name, ours in asdict(facts).items():
        theirs = record.get(name)
        if name in OF_A_RUN or theirs == ours:
            continue
        if isinstance(ours, dict) and isinstance(theirs, dict):
            keys = sorted(k for k in {*ours, *theirs} if ours.get(k) != theirs.get(k))
            theirs, ours = ({k: d.get(k) for k in keys} for d in (theirs, ours))
        raise RowsError(
            f"{path} holds rows of another {name}: wanted {ours}, got {theirs}; resume where "
            "they were measured, or name another --out"
        )


def _row(
    path: Path, record: dict[str, Any], case: type[Case], values: type[Values]
) -> Row[Case, Values]:
    try:
        found = None if record["values"] is None else values(**record["values"])
        return Row(case(**record["case"]), found, record["error"])
    except TypeError as error:
        raise RowsError(f"{path}: wanted rows of this version of fdk-bench: {error}") from None
