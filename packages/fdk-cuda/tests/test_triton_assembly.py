"""The inline assembly that decodes, run here instruction by instruction on 32 lanes."""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl

from fdk_cuda.triton.arrangement import POSITIONS, _words_of
from fdk_cuda.triton.decode import SHUFFLE_BITS, assembly, lookup_tables, operands

LANES = 32
DTYPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}
TL_DTYPES = (tl.bfloat16, tl.float16)


def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros(LANES, np.uint64)
    for i in range(4):
        nibble = selector.astype(np.uint64) >> np.uint64(4 * i) & np.uint64(15)
        assert (nibble < 8).all(), "prmt: the top bit of a selector repeats a sign"
        byte = both >> nibble * np.uint64(8) & np.uint64(255)
        result |= byte << np.uint64(8 * i)
    return result.astype(np.uint32)


def logic(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    result = np.zeros(LANES, np.uint32)
    for row in range(8):
        if table >> row & 1:
            terms = [x if row >> bit & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0))]
            result |= terms[0] & terms[1] & terms[2]
    return result


def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Of pairs, rounded once."""
    x, y, z = (
        torch.from_numpy(v.astype(np.uint32)).view(torch.int32).view(dtype).double()
        for v in (a, b, c)
    )
    return (x * y + z).to(dtype).view(torch.int32).numpy().view(np.uint32)


def execute(source: str, registers: dict[str, np.ndarray]) -> None:
    for statement in source.strip("{} ").split(";"):
        if not statement.strip() or ".reg" in statement:
            continue
        name, operands = statement.strip().split(" ", 1)
        target, *names = re.split(r",\s*", operands)
        values = [
            registers[n] if n in registers else np.full(LANES, int(n, 0) & 0xFFFFFFFF, np.uint32)
            for n in names
        ]
        if name == "shr.u32":
            result = values[0] >> values[1]
        elif name == "shl.b32":
            result = values[0] << values[1]
        elif name == "and.b32":
            result = values[0] & values[1]
        elif name == "mad.lo.u32":
            result = values[0] * values[1] + values[2]
        elif name == "lop3.b32":
            result = logic(*values[:3], int(values[3][0]))
        elif name == "mov.b32":
            result = values[0]
        elif name.startswith("fma.rn."):
            result = multiply_add(*values, DTYPES[name.removeprefix("fma.rn.")])
        elif name == "prmt.b32":
            result = permute(*values)
        else:
            assert name == "shfl.sync.idx.b32", name
            result = values[0][values[1] & 31]
        registers[target] = result.astype(np.uint32)


def check(bits: int, affine: bool, which: int) -> None:
    """Every position of random codes, in pieces of 8 and of 4."""
    generator = torch.Generator().manual_seed(bits)
    codebook = torch.randn(1 << bits, generator=generator).sort().values
    if affine:
        codebook = torch.arange(1 << bits, dtype=torch.float32)
    values, lanes = lookup_tables(codebook)
    raw = values[which].numpy().view(np.uint16).astype(np.uint32)
    table = lanes[which].numpy().view(np.uint32)
    shape = (2, LANES, POSITIONS[bits])  # two units of each lane
    codes = torch.randint(1 << bits, shape, generator=generator)
    words = [word.numpy().astype(np.uint32) for word in _words_of(codes, bits)]
    _, of_lane, of_all = operands(bits, affine)
    tables = [table[0]] * of_lane + [np.full(LANES, word) for word in table[1, :of_all]]
    arguments = [unit for word in words for unit in word]
    arguments += [copy for word in tables for copy in (word, word)]
    for count in (4, 8):
        for first in range(0, POSITIONS[bits], count):
            registers = {f"${count + i}": argument for i, argument in enumerate(arguments)}
            execute(assembly(bits, first, count, affine, TL_DTYPES[which]), registers)
            for p in range(count):
                low, high = raw[codes[:, :, first + p].numpy()]
                assert (registers[f"${p}"] == (low | high << 16)).all(), (count, first, p)


@pytest.mark.parametrize("bits", SHUFFLE_BITS)
@pytest.mark.parametrize("which", [0, 1], ids=["bf16", "fp16"])
def test_assembly(bits: int, which: int) -> None:
    check(bits, affine=False, which=which)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("which", [0, 1], ids=["bf16", "fp16"])
def test_assembly_without_a_table(bits: int, which: int) -> None:
    check(bits, affine=True, which=which)
