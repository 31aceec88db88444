"""docs/formats.md: the worked example of 8 weights, number by number."""

import re
from pathlib import Path

import torch

from fdk_formats import quantise

TEXT = (Path(__file__).parent.parent / "docs/formats.md").read_text()


def row(label: str, occurrence: int = 0) -> list[str]:
    """The cells of a table row that begins with a label."""
    lines = re.findall(rf"^\| {label} \|(.*)\|$", TEXT, flags=re.MULTILINE)
    return [cell.strip() for cell in lines[occurrence].split("|")]


def test_the_worked_example():
    weight = torch.tensor([[float(cell) for cell in row("weight")]])
    q = quantise(weight, "int3-row")
    assert weight.shape == (1, 8)
    assert q.codes()[0].tolist() == [int(cell) for cell in row("code")]
    assert q.codebook is not None
    grid = q.codebook[q.codes()[0].int()].tolist()
    assert grid == [float(cell) for cell in row("grid value")]
    assert row("bits", 1) == [f"{int(cell):03b}" for cell in row("code")]
    stream = "".join(row("bits", 1))
    assert row("bits", 2) == [stream[i : i + 8] for i in range(0, 24, 8)]
    assert q.packed[0].tolist() == [int(cell, 16) for cell in row("byte")]
    assert q.packed[0].tolist() == [int(cell, 2) for cell in row("bits", 2)]
