"""Rows of the blockwise ops (packages/fdk-formats/benchmarks/blockwise.py), and their table."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fdk_bench.kernel_tables import markdown, seconds_text
from fdk_bench.records import Row

HEADINGS = (
    "shape",
    "op",
    "by",
    "time",
    "least",
    "spread",
    "calls",
    "first",
    "result MB",
    "extra MB",
)
# What is compared: who, beside whom.
PAIRS = (("fdk C++", "bnb C++"), ("fdk C++", "bnb torch"), ("fdk torch", "bnb torch"))
KINDS_OF_OPS = ("quantise", "dequantise")
SUMMARY_HEADINGS = (
    "by",
    "beside",
    "op",
    "times as fast",
    "ahead",
    "by the least",
    "by the first",
)


@dataclass(frozen=True)
class BlockwiseCase:
    """An op on a tensor of ``rows`` by ``columns``: ``quantise 8-bit fp32``, by whom."""

    op: str
    rows: int
    columns: int
    by: str
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}-{self.op}-{self.by}".replace(" ", "-")


@dataclass(frozen=True)
class BlockwiseValues:
    """What it takes.

    Attributes:
        time: seconds of a call, the median.
        time_min: the shortest.
        spread: half the distance between the quartiles over the median.
        samples: calls timed.
        result_bytes: of what it returns.
        memory: bytes that the process grew by at most during one call, the result included; None
            where the system does not tell.
        coarse: share of its codes that are not the nearest, by the nature of the contender.
        time_first: seconds of the first call of a turn, which is not among the calls timed, the
            median; None in older rows.
    """

    time: float
    time_min: float
    spread: float
    samples: int
    result_bytes: int
    memory: int | None
    coarse: float
    time_first: float | None = None

    @property
    def extra(self) -> int | None:
        """Bytes beyond the result."""
        return None if self.memory is None else max(0, self.memory - self.result_bytes)


BlockwiseRow = Row[BlockwiseCase, BlockwiseValues]


def cells_of(row: BlockwiseRow) -> dict[str, str]:
    """The texts of a row by heading."""
    case, values = row.case, row.values
    cells = dict.fromkeys(HEADINGS, "")
    cells |= {"shape": f"{case.rows} x {case.columns}", "op": case.op, "by": case.by}
    if values is None:
        return cells | {"time": "failed"}
    return cells | {
        "time": seconds_text(values.time),
        "least": seconds_text(values.time_min),
        "spread": f"{100 * values.spread:.0f} %",
        "calls": str(values.samples),
        "first": "" if values.time_first is None else seconds_text(values.time_first),
        "result MB": f"{values.result_bytes / 1e6:.0f}",
        "extra MB": "" if values.extra is None else f"{values.extra / 1e6:.0f}",
    }


def summary(rows: Iterable[BlockwiseRow]) -> str:
    """How often each of ``PAIRS`` is ahead, as Markdown, and the most memory that each takes."""
    measured = {row.case: row.values for row in rows if row.values is not None}
    lines = []
    for ours, theirs in PAIRS:
        for kind in KINDS_OF_OPS:
            pairs = [
                (values, other)
                for case, values in measured.items()
                if case.by == ours and case.op.startswith(kind)
                if (other := measured.get(replace(case, by=theirs))) is not None
            ]
            if pairs:
                cells = {"by": ours, "beside": theirs, "op": kind}
                lines.append(cells | _standing(pairs))
    most: dict[str, int] = {}
    for case, values in measured.items():
        if values.extra is not None:
            most[case.by] = max(most.get(case.by, 0), values.extra)
    told = ", ".join(f"{by} {extra / 1e6:.0f} MB" for by, extra in most.items())
    table = markdown(SUMMARY_HEADINGS, ("by", "beside", "op"), lines)
    return f"{table}\nBeyond the result, at most: {told or 'not measured'}.\n"


def _standing(pairs: Sequence[tuple[BlockwiseValues, BlockwiseValues]]) -> dict[str, str]:
    """The range of the medians' ratios, and in how many pairs the first is ahead."""

    def ahead(time: Callable[[BlockwiseValues], float | None]) -> str:
        both = [(a, b) for a, b in ((time(x), time(y)) for x, y in pairs) if a and b]
        return f"{sum(a < b for a, b in both)} of {len(both)}" if both else ""

    ratios = [other.time / values.time for values, other in pairs]
    return {
        "times as fast": f"{min(ratios):.2f} to {max(ratios):.2f}",
        "ahead": ahead(lambda values: values.time),
        "by the least": ahead(lambda values: values.time_min),
        "by the first": ahead(lambda values: values.time_first),
    }
