"""The tables of bitsandbytes: 8-bit dynamic maps, and NF4 and FP4 in the order of their codes."""

from functools import lru_cache

import torch
from torch import Tensor

from fdk_formats.codebooks import NF4

CODES_8BIT = 256
KINDS_4BIT = ("nf4", "fp4")

NF4_CODE = NF4

# A sign bit, two exponent bits and one mantissa bit, in twelfths: not in order of value, and not
# the OCP e2m1 grid (0.0625 stands where that has 0.5, and the codes are permuted). Code 8, zero
# with its sign bit set, is a plain 0.0 in the table of bitsandbytes.
_FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4_CODE = (
    *(value / 12 for value in _FP4_TWELFTHS),
    0.0,
    *(-value / 12 for value in _FP4_TWELFTHS[1:]),
)

# The codes of FP4 from the lowest value to the highest. Two of them stand for zero, and a value is
# searched among 15 midpoints of which one is zero itself: (-0.0026, 0] gets code 0 and (0, 0.0026]
# code 8, the one with the sign bit: turned round, and what bitsandbytes' torch backend stores.
_FP4_ORDER = (11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3)
_ORDER = {"nf4": tuple(range(16)), "fp4": _FP4_ORDER}


@lru_cache
def dynamic_map(signed: bool = True) -> Tensor:
    """The 8-bit dynamic map of bitsandbytes, ``[256, float32]``, ascending, on the CPU.

    Seven decades below 1, each split evenly into twice as many steps as the decade below it; the
    entries are the middles of the steps, and 0 and 1. Signed, half of the steps are negative: the
    lowest entry is -0.993, so that -absmax is not exact. Source: Dettmers, 8-Bit Approximations
    for Parallelism in Deep Learning, https://arxiv.org/abs/1511.04561, and the tables of
    bitsandbytes, which it equals bit for bit. The tensor is shared: clone it to change it.
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
    """The table of ``nf4`` or ``fp4``, ``[16, float32]`` in the order of the codes, on the CPU.

    The tensor is shared: clone it to change it.
    """
    values = NF4_CODE if kind == "nf4" else FP4_CODE
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def ascending_codes(kind: str) -> tuple[int, ...]:
    """The sixteen codes of ``nf4`` or ``fp4`` from the lowest value to the highest."""
    return _ORDER[kind]
