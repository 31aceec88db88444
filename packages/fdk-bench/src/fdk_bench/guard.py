"""The regression guard: a short run beside the last one of the same machine class."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fdk_bench.records import replace_text
from fdk_bench.results import read_records

# Slower by more than this and by more than the spread of both runs is said; less is noise.
LEAST_CHANGE = 0.10
SPREADS = 3.0


@dataclass(frozen=True)
class Change:
    """One case of two runs.

    Attributes:
        before, after: time over the read floor of its own run.
        noise: the change that the spread of both runs explains, as a share.
    """

    case: str
    before: float
    after: float
    noise: float

    @property
    def ratio(self) -> float:
        """Above 1 is slower."""
        return self.after / self.before

    @property
    def slower(self) -> bool:
        """By more than the noise."""
        return self.ratio > 1 + self.noise

    @property
    def faster(self) -> bool:
        """By more than the noise."""
        return self.ratio < 1 / (1 + self.noise)


def machine_class(record: Mapping[str, Any]) -> tuple[str, int | None]:
    """What must be alike for runs to compare: the processor's or the GPU's name, and threads.

    Processors that share a name are told apart by what ``cpu_name`` adds to it.
    """
    on_cpu = record["case"]["device"] == "cpu"
    return str(record["device"]), int(record["threads"]) if on_cpu else None


def changes(
    before: Iterable[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> Iterator[Change]:
    """Each measured case of ``after`` that ``before`` has on a machine of the same class.

    Compared are times over the floor of their own run, so that a machine that is busy or slow as
    a whole is no change. Rows that were timed by different methods are not compared.
    """
    known = {_key(record): record["values"] for record in before if record["values"] is not None}
    for record in after:
        old, new = known.get(_key(record)), record["values"]
        if old is None or new is None or old.get("method") != new.get("method"):
            continue
        noise = max(LEAST_CHANGE, SPREADS * (old["spread"] ** 2 + new["spread"] ** 2) ** 0.5)
        case = record["case"]
        name = f"m{case['m']}-n{case['n']}-k{case['k']}-{case['format']}-{new['backend']}"
        yield Change(name, old["time"] / old["floor"], new["time"] / new["floor"], noise)


def check(record: Mapping[str, Any]) -> None:
    """Fails for a row that ``changes`` cannot compare, with itself even."""
    list(changes([record], [record]))


def remember(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Puts rows in the place of those of the same cases in a file, and keeps its others."""
    kept: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    if path.is_file():
        kept = {_key(old): old for old in read_records([path])}
    kept |= {_key(record): record for record in records if record["values"] is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(dict(record), ensure_ascii=False) for record in kept.values())
    replace_text(path, "".join(f"{line}\n" for line in lines))


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    case = {"activations": "float"} | record["case"]  # which older rows do not say
    return (*machine_class(record), *sorted(case.items()))
