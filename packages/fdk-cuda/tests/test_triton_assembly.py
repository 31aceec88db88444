"""The inline assembly that decodes, run here instruction by instruction on 32 lanes."""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl

from fdk_cuda.triton.arrangement import POSITIONS, STRIDES, _words_of
from fdk_cuda.triton.assembly import assembly, fill, is_shared, operands
from fdk_cuda.triton.decode import lookup_tables

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


def execute(
    source: str, registers: dict[str, np.ndarray], memory: np.ndarray | None = None
) -> None:
    """One warp runs; ``memory`` is shared, in words."""
    for statement in source.strip("{} ").split(";"):
        if not statement.strip() or ".reg" in statement:
            continue
        name, operands = statement.strip().split(" ", 1)
        target, *names = re.split(r",\s*", operands)
        values = [
            registers[n.strip("[]")]
            if n.strip("[]") in registers
            else np.full(LANES, int(n, 0) & 0xFFFFFFFF, np.uint32)
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
        elif name == "add.u32":
            result = values[0] + values[1]
        elif name == "lop3.b32":
            result = logic(*values[:3], int(values[3][0]))
        elif name == "mov.b32":
            result = values[0]
        elif name == "ld.shared.b32":
            assert memory is not None
            assert (values[0] // 4 % LANES == np.arange(LANES)).all(), "two lanes meet in a bank"
            result = memory[values[0] // 4]
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
    memory = None
    if is_shared(bits, affine):
        start, rows = 1024, STRIDES[bits] // 4
        memory = np.zeros(start // 4 + (rows << bits), np.uint32)
        memory[start // 4 :].reshape(-1, rows)[:, :LANES] = raw[:, None] * 0x10001
        lane = np.arange(LANES, dtype=np.uint32) * 4
        tables = [lane + start] if bits == 8 else [lane, np.full(LANES, start, np.uint32)]
    arguments = [unit for word in words for unit in word]
    arguments += [copy for word in tables for copy in (word, word)]
    for count in (4, 8) if bits < 8 else (4,):
        for first in range(0, POSITIONS[bits], count):
            registers = {f"${count + i}": argument for i, argument in enumerate(arguments)}
            execute(assembly(bits, first, count, affine, TL_DTYPES[which]), registers, memory)
            for p in range(count):
                low, high = raw[codes[:, :, first + p].numpy()]
                assert (registers[f"${p}"] == (low | high << 16)).all(), (count, first, p)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("which", [0, 1], ids=["bf16", "fp16"])
def test_assembly(bits: int, which: int) -> None:
    check(bits, affine=False, which=which)


@pytest.mark.parametrize("bits", [2, 4, 5, 6, 7])
@pytest.mark.parametrize("which", [0, 1], ids=["bf16", "fp16"])
def test_assembly_without_a_table(bits: int, which: int) -> None:
    check(bits, affine=True, which=which)


@pytest.mark.parametrize("threads", [32, 128, 256, 512])
@pytest.mark.parametrize("bits", STRIDES)
def test_fill(bits: int, threads: int) -> None:
    """Every thread of a program in turn: all copies of all values are where they are looked for."""
    codebook = torch.randn(1 << bits, generator=torch.Generator().manual_seed(bits))
    raw = lookup_tables(codebook)[0][0].numpy().view(np.uint16).astype(np.uint32)
    rows = STRIDES[bits] // 4
    memory = np.zeros((1 << bits, rows), np.uint32)
    source = fill(bits, threads)
    for warp in range(threads // LANES):
        run_fill(source, warp, raw, memory.reshape(-1))
    assert (memory[:, :LANES] == raw[:, None] * 0x10001).all()
    assert (memory[:, LANES:] == 0).all()


def run_fill(source: str, warp: int, raw: np.ndarray, memory: np.ndarray) -> None:
    """The instructions of ``fill`` that ``execute`` does not know, the others by it."""
    registers = {"$0": np.zeros(LANES, np.uint32), "$1": np.zeros(LANES, np.uint32)}
    live = np.ones(LANES, bool)
    for statement in source.strip("{} ").split(";"):
        name, _, rest = statement.strip().removeprefix("@q ").partition(" ")
        names = [each.strip("[]{} ") for each in rest.split(",")]
        if rest.endswith("%tid.x"):
            registers[names[0]] = warp * LANES + np.arange(LANES, dtype=np.uint32)
        elif name == "setp.lt.u32":
            live = registers[names[1]] < int(names[2])
        elif name == "mad.wide.u32":
            registers[names[0]] = registers[names[1]] * 2
        elif name == "ld.global.b16":
            registers[names[0]] = raw[registers[names[1]] // 2]
        elif "{h, h}" in rest:
            registers[names[0]] = registers["h"] * 0x10001
        elif name == "st.shared.v4.b32":
            for i in range(4):
                memory[registers[names[0]][live] // 4 + i] = registers["v"][live]
        elif name not in ("", ".reg", ".shared", ".b16", "bar.sync") and "table" not in rest:
            execute("{ " + statement + " }", registers)
