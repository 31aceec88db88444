"""Rows of the blockwise ops (packages/fdk-formats/benchmarks/blockwise.py), and their table."""

from dataclasses import dataclass

from fdk_bench.kernel_tables import seconds_text
from fdk_bench.records import Row

HEADINGS = ("shape", "op", "by", "time", "least", "spread", "calls", "result MB", "extra MB")


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
    """

    time: float
    time_min: float
    spread: float
    samples: int
    result_bytes: int
    memory: int | None
    coarse: float


BlockwiseRow = Row[BlockwiseCase, BlockwiseValues]


def cells_of(row: BlockwiseRow) -> dict[str, str]:
    """The texts of a row by heading."""
    case, values = row.case, row.values
    cells = dict.fromkeys(HEADINGS, "")
    cells |= {"shape": f"{case.rows} x {case.columns}", "op": case.op, "by": case.by}
    if values is None:
        return cells | {"time": "failed"}
    extra = None if values.memory is None else max(0, values.memory - values.result_bytes)
    return cells | {
        "time": seconds_text(values.time),
        "least": seconds_text(values.time_min),
        "spread": f"{100 * values.spread:.0f} %",
        "calls": str(values.samples),
        "result MB": f"{values.result_bytes / 1e6:.0f}",
        "extra MB": "" if extra is None else f"{extra / 1e6:.0f}",
    }
