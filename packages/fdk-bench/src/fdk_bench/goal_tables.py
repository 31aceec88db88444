"""Measured kernels beside goals: rows of a file that say how long a case may take."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fdk_bench.kernel_tables import markdown, seconds_text
from fdk_bench.kernels import KernelRow
from fdk_bench.results import ResultsError

HEADINGS = (
    "n x k",
    "bits",
    "m",
    "by",
    "time",
    "floor",
    "share",
    "best peer",
    "x best peer",
    "goal",
    "time / goal",
    "met",
)
Key = tuple[int, int, int, int]  # n, k, bits, m


@dataclass(frozen=True)
class Goals:
    """Markdown lines of the cases that were measured, and how many there are.

    Attributes:
        table: a line for each goal that a row was measured for.
        met, measured, total: numbers of goals.
    """

    table: str
    met: int
    measured: int
    total: int

    def __str__(self) -> str:
        return (
            f"{self.table}\n{self.met} of {self.measured} measured goals met; "
            f"{self.total - self.measured} of {self.total} were not measured.\n"
        )


def read_goals(path: Path) -> dict[Key, float]:
    """Seconds by case, from lines of ``{"n", "k", "bits", "m", "goal"}`` in microseconds.

    Raises:
        ResultsError: for a line that is no goal.
    """
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            goal = json.loads(line)
            key = (int(goal["n"]), int(goal["k"]), int(goal["bits"]), int(goal["m"]))
            found[key] = float(goal["goal"]) / 1e6
        except (ValueError, TypeError, KeyError) as error:
            wanted = "n, k, bits, m and goal"
            raise ResultsError(f"{path}:{number}: wanted {wanted}; got {error!r}") from None
    return found


def goals_table(rows: Sequence[KernelRow], goals: Mapping[Key, float]) -> Goals:
    """Ours, the fastest where there are several, beside the floor, the best peer and the goal."""
    lines, met = [], 0
    for key in sorted(goals):
        here = [row for row in rows if _key(row) == key and row.values is not None]
        ours = [row for row in here if not is_peer(row)]
        if not ours:
            continue
        best = min(ours, key=_time)
        peer = min(filter(is_peer, here), key=_time, default=None)
        met += _time(best) <= goals[key]
        lines.append(_cells(best, peer, goals[key]))
    table = markdown(HEADINGS, ("n x k", "by", "best peer"), lines)
    return Goals(table, met, len(lines), len(goals))


def is_peer(row: KernelRow) -> bool:
    """Whether somebody else's kernel computed a row."""
    from fdk_bench.peers import PEERS

    return row.case.backend in {peer.name for peer in PEERS}


def _key(row: KernelRow) -> Key | None:
    case = row.case
    return None if case.quantised is None else (case.n, case.k, case.bits, case.m)


def _time(row: KernelRow) -> float:
    assert row.values is not None
    return row.values.time


def _cells(row: KernelRow, peer: KernelRow | None, goal: float) -> dict[str, str]:
    case, values = row.case, row.values
    assert values is not None
    cells: dict[str, Any] = {
        "n x k": f"{case.n} x {case.k}",
        "bits": case.bits,
        "m": case.m,
        "by": values.backend,
        "time": seconds_text(values.time),
        "floor": seconds_text(values.floor),
        "share": f"{100 * values.floor_share:.0f} %",
        "best peer": "",
        "x best peer": "",
        "goal": seconds_text(goal),
        "time / goal": f"{values.time / goal:.2f}",
        "met": "yes" if values.time <= goal else "no",
    }
    if peer is not None:
        cells["best peer"] = f"{seconds_text(_time(peer))} ({peer.case.backend})"
        cells["x best peer"] = f"{_time(peer) / values.time:.2f}"
    return {heading: str(text) for heading, text in cells.items()}
