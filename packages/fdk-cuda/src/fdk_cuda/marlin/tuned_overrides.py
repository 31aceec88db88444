"""Measured plans that override the cost models where those rank a slower plan first.

The overrides are data: ``configs/*.json``, a file per kind of GPU. n and k are padded sizes.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fdk_cuda.marlin.layout import Geometry

CONFIG = Path(__file__).parent / "configs" / "hopper_132_sms.json"


class SmallMCut(NamedTuple):
    """Fields of a ``SmallPlan`` by which an override selects it."""

    fragments: int
    k_blocks: int
    n_groups: int
    warps: int
    cluster: int


@dataclass(frozen=True)
class Override:
    """A row of the table: a measured plan, and the weights and rows of x that it is for.

    Attributes:
        zero_point: True for weights with zero points.
        m_first, m_last: range of rows of x, inclusive.
        bits: width of a code.
        n, k: outputs and inputs of the weight, padded.
        cut: the small-m plan to use, or None.
        plan_m: for hopper_gemm.cu, use the plan made for ``plan_m`` rows of x, which also works for
            fewer.
    """

    zero_point: bool
    m_first: int
    m_last: int
    bits: int
    n: int
    k: int
    cut: SmallMCut | None = None
    plan_m: int | None = None

    def applies(self, geometry: Geometry, m: int) -> bool:
        """Returns whether the row is for this weight and number of rows of x."""
        g = geometry
        size = g.has_zero_point, g.bits, g.padded_n, g.padded_k
        is_same = size == (self.zero_point, self.bits, self.n, self.k)
        return is_same and self.m_first <= m <= self.m_last


def is_tuned(*, is_hopper: bool, sm_count: int) -> bool:
    """Returns whether the overrides are for a GPU: for any Hopper with as many SMs."""
    return is_hopper and sm_count == _read()["gpu"]["sm_count"]


@cache
def small_m_overrides() -> tuple[Override, ...]:
    """Reads the overrides for few rows of x.

    Rows with m 1 for 1 and 4 bits were timed in decoding steps of models, where the kernels before
    and after overlap with this one. The others took at least 1.5 % less time than the plan that the
    cost model puts first (2 % for m above 8), replayed back to back.
    """
    return tuple(_override(row) for row in _read()["small_m"])


@cache
def hopper_overrides() -> tuple[Override, ...]:
    """Reads the overrides for hopper_gemm.cu."""
    return tuple(Override(**row) for row in _read()["hopper_gemm"])


def small_m_override(geometry: Geometry, m: int) -> SmallMCut | None:
    """Returns the measured plan for m rows of x, or None."""
    found = (row.cut for row in small_m_overrides() if row.applies(geometry, m))
    return next(found, None)


def hopper_plan_m(geometry: Geometry, m: int) -> int:
    """Returns the number of rows of x whose plan is the fastest for m rows: m, or more."""
    found = (row.plan_m for row in hopper_overrides() if row.applies(geometry, m))
    return next(found, None) or m


def _override(row: dict[str, Any]) -> Override:
    fields = {name: value for name, value in row.items() if name not in SmallMCut._fields}
    return Override(**fields, cut=SmallMCut(*(row[name] for name in SmallMCut._fields)))


@cache
def _read() -> dict[str, Any]:
    config: dict[str, Any] = json.loads(CONFIG.read_text(encoding="utf-8"))
    return config
