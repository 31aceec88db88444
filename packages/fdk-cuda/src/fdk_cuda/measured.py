"""Which backend ``auto`` takes on a GPU: the fastest of those recorded there, by shape.

``measured.json`` holds microseconds of layers, bf16 with groups of 64, by GPU, kind of format,
width and shape, for each number of rows in ``ms``; benchmarks/auto_table.py makes it of what was
recorded.
The shape nearest to a weight's (by the logarithms of n and k) speaks for it, and the backend with
the least sum over ``ms`` of its time over the fastest's comes first. Other groups, scales and
dtypes of x are taken to be alike. Where nothing was recorded, for other GPUs and formats, Marlin
comes before Triton.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from fdk_formats.backends import Problem
from fdk_formats.format import Format

DATA = Path(__file__).with_name("measured.json")
# What ``Backend.priority`` gives: to the fastest measured and the others; and where none was.
FIRST, OTHER = 20, 10
FIXED = {"marlin": FIRST, "triton": OTHER}
BACKENDS = ("marlin", "marlin-lut", "triton")


@dataclass(frozen=True)
class Case:
    """Times recorded for one shape.

    Attributes:
        kind: ``codebook`` or ``affine``.
        bits: width of a code.
        n, k: of the weight.
        us: microseconds for each of ``ms``, by backend; ``marlin`` is ``marlin-lut`` too, for
            they share their kernels.
    """

    kind: str
    bits: int
    n: int
    k: int
    us: dict[str, tuple[float, ...]]

    @property
    def scores(self) -> dict[str, float]:
        """By backend, the mean over ``ms`` of its time over the fastest's, the best first."""
        best = [min(times) for times in zip(*self.us.values(), strict=True)]
        means = {
            name: sum(own / least for own, least in zip(times, best, strict=True)) / len(best)
            for name, times in self.us.items()
        }
        return dict(sorted(means.items(), key=lambda entry: entry[1]))

    def distance(self, n: int, k: int) -> float:
        """From another shape, in doublings; an empty one counts as one row."""
        return math.hypot(math.log2(max(n, 1) / self.n), math.log2(k / self.k))


def measured_case(problem: Problem) -> Case | None:
    """What was recorded on a problem's GPU for the shape nearest to its own, or None."""
    if problem.device.type != "cuda" or not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_name(problem.device)
    near = _cases().get(gpu, {}).get((kind_of(problem.format), problem.format.bits), ())
    return min(near, key=lambda case: case.distance(problem.n, problem.k), default=None)


def priority(backend: str, problem: Problem, *, batch_invariant: bool) -> int:
    """Of ``marlin``, ``marlin-lut`` or ``triton``, see ``Backend``.

    Invariant layers were not recorded: for them the fixed order holds.
    """
    family = backend.removesuffix("-lut")
    case = None if batch_invariant else measured_case(problem)
    if case is None or family not in case.us:
        return FIXED[family]
    return FIRST if family == next(iter(case.scores)) else OTHER


def told(problem: Problem) -> str:
    """Why ``auto`` chooses as it does, in words."""
    case = measured_case(problem)
    if case is None:
        return "fixed order: not measured"
    scores = ", ".join(f"{name} {score:.2f}" for name, score in case.scores.items())
    return f"measured at {case.n} x {case.k}: {scores}"


def kind_of(format: Format) -> str:
    """``codebook`` or ``affine``."""
    return "affine" if format.is_affine else "codebook"


@cache
def _cases() -> dict[str, dict[tuple[str, int], list[Case]]]:
    """By GPU, then kind and bits."""
    found: dict[str, dict[tuple[str, int], list[Case]]] = {}
    for gpu, rows in json.loads(DATA.read_text("utf-8"))["gpus"].items():
        of_gpu = found.setdefault(gpu, {})
        for row in rows:
            us = {name: tuple(times) for name, times in row["us"].items()}
            case = Case(row["kind"], row["bits"], row["n"], row["k"], us)
            of_gpu.setdefault((case.kind, case.bits), []).append(case)
    return found
