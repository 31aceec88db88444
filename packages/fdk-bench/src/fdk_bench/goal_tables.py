"""Measured kernels beside goals: rows of a file that say how long a case may take."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fdk_bench.kernel_tables import markdown, seconds_text
from fdk_bench.kernels import KernelRow
from fdk_bench.results import ResultsError, read_text

HEADINGS = (
    "n x k",
    "bits",
    "m",
    "by",
    "time",
    "floor",
    "share",
    "x 16 bit",
    "best peer",
    "x best peer",
    "goal",
    "time / goal",
    "met",
)
Key = tuple[int, int, int, int]  # n, k, bits, m


@dataclass(frozen=True)
class ShapeGoals:
    """How the goals of one shape stand.

    Attributes:
        n, k: the shape.
        met, measured, total: numbers of goals; ``total`` is 0 for a shape that has none.
        over: the cases over their goal, each with time over goal.
    """

    n: int
    k: int
    met: int
    measured: int
    total: int
    over: tuple[str, ...]

    def __str__(self) -> str:
        if not self.total:
            return f"- {self.n} x {self.k}: has no goals."
        missing = self.total - self.measured
        told = f"- {self.n} x {self.k}: {self.met} of {self.measured} measured goals met"
        told += f"; {missing} of {self.total} not measured" if missing else ""
        return told + (f"; over: {', '.join(self.over)}." if self.over else ".")


@dataclass(frozen=True)
class Goals:
    """Measured cases beside their goals.

    Attributes:
        table: Markdown lines, one a case of ours: each width and m of a shape.
        shapes: those that were measured, then those that have goals alone.
        ahead: those of the cases beside a peer that are faster than the best one.
        beside: how many cases have a peer.
    """

    table: str
    shapes: tuple[ShapeGoals, ...]
    ahead: int
    beside: int

    def __str__(self) -> str:
        met, measured, total = (
            sum(getattr(shape, name) for shape in self.shapes)
            for name in ("met", "measured", "total")
        )
        lines = "\n".join(map(str, self.shapes))
        return (
            f"{self.table}\nFaster than the best peer: {self.ahead} of {self.beside} cases.\n\n"
            f"{met} of {measured} measured goals met; "
            f"{total - measured} of {total} were not measured.\n\n{lines}\n"
        )


def read_goals(path: Path) -> dict[Key, float]:
    """Seconds by case, from lines of ``{"n", "k", "bits", "m", "goal"}`` in microseconds.

    Raises:
        ResultsError: for a file that cannot be read, and a line that is no goal.
    """
    found = {}
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
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
    lines = []
    ahead = beside = 0
    ratios: dict[Key, float | None] = {}  # time over goal of what was measured
    measured = {key for row in rows if (key := _key(row)) and row.values is not None}
    for key in sorted(measured):
        here = [row for row in rows if _key(row) == key and row.values is not None]
        ours = [row for row in here if not is_peer(row)]
        if not ours:
            continue
        best = min(ours, key=_time)
        peer = min(filter(is_peer, here), key=_time, default=None)
        if peer is not None:
            ahead, beside = ahead + (_time(best) < _time(peer)), beside + 1
        ratios[key] = _time(best) / goals[key] if key in goals else None
        lines.append(_cells(best, peer, goals.get(key)))
    table = markdown(HEADINGS, ("n x k", "by", "best peer"), lines)
    shapes = sorted({key[:2] for key in ratios}) + sorted(
        {key[:2] for key in goals} - {key[:2] for key in ratios}
    )
    told = tuple(_shape_goals(shape, ratios, goals) for shape in shapes)
    return Goals(table, told, ahead, beside)


def _shape_goals(
    shape: tuple[int, int], ratios: Mapping[Key, float | None], goals: Mapping[Key, float]
) -> ShapeGoals:
    found = {key: r for key, r in ratios.items() if key[:2] == shape and r is not None}
    over = tuple(
        f"{bits} bit{'s' if bits > 1 else ''} m={m} ({ratio:.2f})"
        for (_, _, bits, m), ratio in found.items()
        if ratio > 1
    )
    total = sum(key[:2] == shape for key in goals)
    return ShapeGoals(*shape, len(found) - len(over), len(found), total, over)


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


def _cells(row: KernelRow, peer: KernelRow | None, goal: float | None) -> dict[str, str]:
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
        "x 16 bit": "" if values.speedup_16 is None else f"{values.speedup_16:.2f}",
        "best peer": "",
        "x best peer": "",
        "goal": "",
        "time / goal": "",
        "met": "",
    }
    if goal is not None:
        cells["goal"] = seconds_text(goal)
        cells["time / goal"] = f"{values.time / goal:.2f}"
        cells["met"] = "yes" if values.time <= goal else "no"
    if peer is not None:
        cells["best peer"] = f"{seconds_text(_time(peer))} ({peer.case.backend})"
        cells["x best peer"] = f"{_time(peer) / values.time:.2f}"
    return {heading: str(text) for heading, text in cells.items()}
