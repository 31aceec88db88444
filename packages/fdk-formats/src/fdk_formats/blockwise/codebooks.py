"""Tables of bitsandbytes: 8-bit dynamic maps, and NF4 and FP4 in the order of their codes."""

from functools import lru_cache

import torch
from torch import Tensor

from fdk_formats.codebooks import NF4

CODES_8BIT = 256
KINDS_4BIT = ("nf4", "fp4")

NF4_CODE = NF4

# Sign, two exponent bits and one mantissa bit, in twelfths. Not ascending, and not the OCP e2m1
# grid: 0.0625 replaces its 0.5, and the codes are permuted. Code 8, a negative zero, is 0.0 here.
_FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4_CODE = (
    *(value / 12 for value in _FP4_TWELFTHS),
    0.0,
    *(-value / 12 for value in _FP4_TWELFTHS[1:]),
)

# FP4 codes from the lowest value to the highest. Two stand for zero, so one of the 15 midpoints is
# zero: (-0.0026, 0] gets code 0 and (0, 0.0026] code 8, as in bitsandbytes' torch backend.
_FP4_ORDER = (11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3)
_ORDER = {"nf4": tuple(range(16)), "fp4": _FP4_ORDER}


@lru_cache
def dynamic_map(signed: bool = True) -> Tensor:
    """Returns the 8-bit dynamic map of bitsandbytes, bit for bit.

    Seven decades below 1 are split evenly, each into twice as many steps as the decade below it;
    the entries are the middles of the steps, and 0 and 1. In the signed map half of the steps are
    negative, and the lowest entry is -0.993. (Dettmers 2015, 8-Bit Approximations for Parallelism
    in Deep Learning, https://arxiv.org/abs/1511.04561.)

    Args:
        signed: True for values in [-1, 1], False for [0, 1].

    Returns:
        ``[256, float32]``, ascending, on the CPU. Callers share it: clone it before changing it.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        steps = 2 ** (decade if signed else decade + 1)
        edges = torch.linspace(0.1, 1, steps + 1, dtype=torch.float32, device="cpu")
        middles = (10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += middles
        if signed:
            values += [-value for value in middles]
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu")


@lru_cache
def four_bit_code(kind: str) -> Tensor:
    """Returns the table of ``nf4`` or ``fp4``.

    Returns:
        ``[16, float32]`` in the order of the codes, on the CPU. Callers share it: clone it before
        changing it.
    """
    values = NF4_CODE if kind == "nf4" else FP4_CODE
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def ascending_codes(kind: str) -> tuple[int, ...]:
    """Returns the sixteen codes of ``nf4`` or ``fp4`` from the lowest value to the highest."""
    return _ORDER[kind]
