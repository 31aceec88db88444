"""Golden bytes: codes and their canonical packing, for tests in every language."""

import json
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

# {bits: {"codes": [[...], ...], "packed": ["hex of a row", ...]}}
GOLDEN_FILE = Path(__file__).with_name("golden.json")


@cache
def _golden() -> dict[str, dict[str, list[list[int]] | list[str]]]:
    data: dict[str, dict[str, list[list[int]] | list[str]]] = json.loads(GOLDEN_FILE.read_text())
    return data


def golden_codes(bits: int) -> Tensor:
    """Returns stored codes, ``[3, 19, uint8]``."""
    return torch.tensor(_golden()[str(bits)]["codes"], dtype=torch.uint8)


def golden_packed(bits: int) -> Tensor:
    """Returns the bytes of ``golden_codes``, ``[3, ceil(19 * bits / 8), uint8]``."""
    rows = [list(bytes.fromhex(str(row))) for row in _golden()[str(bits)]["packed"]]
    return torch.tensor(rows, dtype=torch.uint8)
