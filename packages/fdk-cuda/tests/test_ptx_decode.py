"""The inline assembly that decodes, emulated instruction by instruction on 32 lanes."""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl

from fdk_cuda.triton.kernels.decode import lookup_tables
from fdk_cuda.triton.kernels.ptx_decode import (
    assembly,
    elements,
    is_shared,
    of_two,
    operands,
    to_bytes,
)
from fdk_cuda.triton.kernels.ptx_smem import (
    add_shares,
    add_warps,
    fill,
    lane_place,
    shares_bytes,
    table_bytes,
)
from fdk_cuda.triton.layout import INDEX_BITS, POSITIONS, STRIDES, _words_of

LANES = 32
DTYPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}
TL_DTYPES = (tl.bfloat16, tl.float16)


def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros(LANES, np.uint64)
    for i in range(4):
        nibble = selector.astype(np.uint64) >> np.uint64(4 * i) & np.uint64(15)
        byte = both >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        # The top bit of a selector nibble replicates the sign.
        signs = np.where(byte >= 128, np.uint64(255), np.uint64(0))
        byte = np.where(nibble >= 8, signs, byte)
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
    """Multiplies and adds pairs, rounding once."""
    x, y, z = (
        torch.from_numpy(v.astype(np.uint32)).view(torch.int32).view(dtype).double()
        for v in (a, b, c)
    )
    return (x * y + z).to(dtype).view(torch.int32).numpy().view(np.uint32)


def execute(
    source: str, registers: dict[str, np.ndarray], memory: np.ndarray | None = None
) -> None:
    """Runs one warp; ``memory`` is shared memory, in words."""
    for statement in source.strip("{} ").split(";"):
        if not statement.strip() or ".reg" in statement:
            continue
        name, operands = statement.strip().split(" ", 1)
        if name == "ld.shared.v4.b32":
            assert memory is not None
            targets, at = re.fullmatch(r"\{(.*)\}, \[(\w+)\]", operands).groups()
            banks = registers[at].reshape(-1, 8) // 16 % 8
            assert (np.sort(banks) == np.arange(8)).all(), "lanes of a quarter meet in a bank"
            for i, target in enumerate(targets.split(", ")):
                registers[target] = memory[registers[at] // 4 + i]
            continue
        target, *names = re.split(r",\s*", operands)
        values = [
            registers[n.strip("[]")]
            if n.strip("[]") in registers
            else np.arange(LANES, dtype=np.uint32)
            if n == "%laneid"
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
        elif name in ("mov.b32", "mov.u32", "mov.f32"):
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


def table_rows(bits: int, raw: np.ndarray) -> np.ndarray:
    """Returns shared memory after ``fill``: a row per entry, with copies of its values."""
    entries = np.arange(1 << INDEX_BITS[bits])
    shifts = {1: (0, 1, 4, 5, 2, 3, 6, 7), 3: (0, 3), 4: (0, 4)}.get(bits, (0, 0))
    values = raw[entries[:, None] >> np.array(shifts) & ((1 << bits) - 1)]
    words = values[:, ::2] | values[:, 1::2] << 16
    rows = np.zeros((len(entries), STRIDES[bits] // 4), np.uint32)
    rows[:, :LANES] = np.tile(words, LANES // words.shape[1])
    return rows


def check(bits: int, affine: bool, shared: bool, which: int) -> None:
    """Decodes every position of random codes, 8 and 4 at a time."""
    generator = torch.Generator().manual_seed(bits)
    codebook = torch.randn(1 << bits, generator=generator).sort().values
    if affine:
        codebook = torch.arange(1 << bits, dtype=torch.float32)
    values, lanes = lookup_tables(codebook)
    raw = values[which].numpy().view(np.uint16).astype(np.uint32)
    table = lanes[which].numpy().view(np.uint32)
    units = elements(bits, affine, shared)
    shape = (units, LANES, POSITIONS[bits])  # units of each lane
    codes = torch.randint(1 << bits, shape, generator=generator)
    words = [word.numpy().astype(np.uint32) for word in _words_of(codes, bits)]
    _, of_lane, of_all = operands(bits, affine, shared)
    tables = [table[0]] * of_lane + [np.full(LANES, word) for word in table[1, :of_all]]
    memory = None
    if is_shared(bits, affine, shared):
        start = 1024
        memory = np.concatenate([np.zeros(start // 4, np.uint32), table_rows(bits, raw).ravel()])
        base = 0 if STRIDES[bits] == 256 else start
        place = {"$0": np.zeros(0), "$1": np.full(LANES, base, np.uint32)}
        execute(lane_place(bits), place)
        tables = [place["$0"], np.full(LANES, start, np.uint32)][: of_lane + of_all]
    if units == 8:
        registers = {f"${8 + i}": words[0][i] for i in range(8)}
        execute(to_bytes(), registers)
        words.append(np.stack([registers[f"${i}"] for i in range(8)]))
        tables = [tables[0], *(np.full(LANES, word) for word in table[1, :2])]
    arguments = [unit for word in words for unit in word]
    arguments += [copy for word in tables for copy in [word] * units]
    for count in (4, 8) if bits < 8 else (4,):
        for first in range(0, POSITIONS[bits], count):
            outputs = count * units // 2
            registers = {f"${outputs + i}": argument for i, argument in enumerate(arguments)}
            source = assembly(bits, first, count, affine, shared, TL_DTYPES[which])
            execute(source, registers, memory)
            for p in range(count):
                found = raw[codes[:, :, first + p].numpy()]
                for i in range(units // 2):
                    wanted = found[2 * i] | found[2 * i + 1] << 16
                    assert (registers[f"${p * units // 2 + i}"] == wanted).all(), (count, first, p)


@pytest.mark.parametrize(
    ("bits", "affine", "shared"),
    [
        *((bits, False, True) for bits in range(1, 9)),
        *((bits, False, False) for bits in range(1, 6)),  # values in registers
        *((bits, True, True) for bits in range(1, 8)),
    ],
)
@pytest.mark.parametrize("which", [0, 1], ids=["bf16", "fp16"])
def test_assembly(bits: int, affine: bool, shared: bool, which: int) -> None:
    check(bits, affine=affine, shared=shared, which=which)


@pytest.mark.parametrize("threads", [32, 128, 256, 512])
@pytest.mark.parametrize("bits", STRIDES)
def test_fill(bits: int, threads: int) -> None:
    """Each copy of each value is where the decoder loads it."""
    codebook = torch.randn(1 << bits, generator=torch.Generator().manual_seed(bits))
    raw = lookup_tables(codebook)[0][0].numpy().view(np.uint16).astype(np.uint32)
    memory = np.zeros(table_bytes(bits, False) // 4, np.uint32)
    source = fill(bits, threads)
    for warp in range(threads // LANES):
        run_fill(source, warp, raw, memory)
    assert (memory.reshape(1 << INDEX_BITS[bits], -1) == table_rows(bits, raw)).all()


def run_fill(source: str, warp: int, raw: np.ndarray, memory: np.ndarray) -> None:
    """Runs ``fill``: its own instructions here, the others by ``execute``."""
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
        elif name == "mov.b32" and "{" in rest:
            registers[names[0]] = registers[names[1]] | registers[names[2]] << 16
        elif name == "st.shared.v4.b32":
            for i in range(4):
                memory[registers[names[0]][live] // 4 + i] = registers[names[1 + i]][live]
        elif name not in ("", ".reg", ".shared", ".b16", "bar.sync") and "table" not in rest:
            execute("{ " + statement + " }", registers)


@pytest.mark.parametrize(("tiles", "warps"), [(1, 8), (2, 4)])
@pytest.mark.parametrize("table", [0, 32 << 10])
def test_add_warps(tiles: int, warps: int, table: int) -> None:
    """All warps store, then the first warp adds the sums in order."""
    count = 4 * tiles * tiles
    lines = add_warps(tiles, tiles, warps, table)
    generator = np.random.default_rng(count)
    sums = generator.standard_normal((warps, count, LANES), np.float32)
    statements = [each.strip() for each in lines.strip("{} ").split(";")]
    memory = np.full((table + count * warps * 128) // 4, np.nan, np.float32)
    stored = re.compile(r"st\.shared\.v4\.f32 \[a \+ (\d+)\], \{(.*)\}")
    loaded = re.compile(r"@q ld\.shared\.v4\.f32 \{(.*)\}, \[a \+ (\d+)\]")
    at = [warp * 512 + 16 * np.arange(LANES) for warp in range(warps)]
    for match in filter(None, map(stored.fullmatch, statements)):
        for warp in range(warps):
            for i, name in enumerate(match[2].split(", ")):
                memory[(at[warp] + int(match[1])) // 4 + i] = sums[warp][int(name[1:]) - count]
    registers = {f"${i}": sums[0][i] for i in range(count)}
    for statement in statements[statements.index("bar.sync 0") :]:
        if match := loaded.fullmatch(statement):
            for i, name in enumerate(match[1].split(", ")):
                registers[name] = memory[(at[0] + int(match[2])) // 4 + i]
        elif statement.startswith("@q add.f32"):
            target, a, b = statement.removeprefix("@q add.f32 ").split(", ")
            registers[target] = registers[a] + registers[b]
    wanted = sums[0]
    for own in sums[1:]:
        wanted = wanted + own
    assert (np.stack([registers[f"${i}"] for i in range(count)]) == wanted).all()


@pytest.mark.parametrize(
    ("count", "m_tiles", "warps"), [(8, 1, 8), (8, 1, 4), (8, 2, 4), (8, 4, 8), (4, 4, 2)]
)
def test_add_shares(count: int, m_tiles: int, warps: int) -> None:
    """All warps store, then each warp adds the sums of its positions in order."""
    own, size = count // warps, 4 * m_tiles
    generator = np.random.default_rng(count)
    sums = generator.standard_normal((warps, count * size, LANES), np.float32)
    memory = np.full(shares_bytes(warps) // 4, np.nan, np.float32)
    lanes = 16 * np.arange(LANES)
    found = [{} for _ in range(warps)]
    source = add_shares(count, m_tiles, warps).partition("bar.sync 0;")[2]
    for statement in map(str.strip, source.strip("{} ").split(";")):
        name, _, rest = statement.partition(" ")
        if name == "bar.sync":
            continue
        names = re.findall(r"\$\d+|t\d", rest)
        at = int(match[1]) if (match := re.search(r"\+ (\d+)\]", rest)) else 0
        for warp in range(warps):
            registers = found[warp]
            if name == "st.shared.v4.f32":
                for i, register in enumerate(names):
                    value = sums[warp][int(register[1:]) - own * size]
                    memory[(at + 512 * warp + lanes) // 4 + i] = value
            elif name == "ld.shared.v4.f32":
                for i, register in enumerate(names):
                    registers[register] = memory[(at + 512 * warps * warp + lanes) // 4 + i]
            elif name == "mov.f32":
                registers[names[0]] = registers[names[1]]
            elif name == "add.f32":
                registers[names[0]] = registers[names[1]] + registers[names[2]]
    wanted = sums[0]
    for share in sums[1:]:
        wanted = wanted + share
    for warp in range(warps):
        result = np.stack([found[warp][f"${i}"] for i in range(own * size)])
        assert (result == wanted[warp * own * size : (warp + 1) * own * size]).all()


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("first", [0, 4, 16, 28])
def test_of_two(first: int, same: bool) -> None:
    """One bit selects one of two values, of the same group or of two rows' groups."""
    count = 4
    generator = np.random.default_rng(first)
    words = generator.integers(0, 1 << 32, (2, LANES), dtype=np.uint32)
    values = generator.integers(0, 1 << 16, (2, 2, LANES), dtype=np.uint32)  # [unit, code, lane]
    if same:
        values[1] = values[0]
    registers = {f"${count + i}": words[i] for i in range(2)}
    for unit in range(2):
        low, high = values[unit]
        registers[f"${count + 2 + unit}"] = low * 0x10001
        registers[f"${count + 4 + unit}"] = (low ^ high) * 0x10001
    execute(of_two(first, count, same), registers)
    for p in range(count):
        for unit in range(2):
            code = words[unit] >> (first + p) & 1
            expected = np.where(code, values[unit, 1], values[unit, 0])
            assert (registers[f"${p}"] >> (16 * unit) & 0xFFFF == expected).all()
