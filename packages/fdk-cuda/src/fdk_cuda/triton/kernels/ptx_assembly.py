# mypy: ignore-errors
"""The inline assembly that decodes: how each width becomes pairs of 16-bit values."""

import triton
import triton.language as tl

from fdk_cuda.triton.kernels.ptx_decode import (
    byte_planes,
    direct,
    eight_units,
    look_up,
    nibbles_of_both,
    one_bit,
    pairs_of_three,
    wide,
)
from fdk_cuda.triton.layout import POSITIONS, STRIDES


@triton.constexpr_function
def table_of(dtype: tl.dtype) -> int:
    """Which of the tables of ``lookup_tables`` is for activations of a dtype."""
    return int(dtype == tl.float16)


@triton.constexpr_function
def is_direct(bits: int, affine: bool) -> bool:
    """Whether codes become numbers by arithmetic on pairs, without a table."""
    return affine and bits in (2, 4, 5, 6, 7)


@triton.constexpr_function
def is_shared(bits: int, affine: bool, shared: bool) -> bool:
    """Whether assembly reads a table in shared memory, in a kernel that may fill one."""
    return shared and bits in STRIDES and (bits in (1, 3) or not affine)


@triton.constexpr_function
def in_assembly(bits: int, affine: bool, shared: bool) -> bool:
    """Whether there is assembly for it, in a kernel that may fill a table in shared memory."""
    return is_shared(bits, affine, shared) or bits <= 5 or (affine and bits < 8)


@triton.constexpr_function
def stride_of(bits: int) -> int:
    """Bytes from one entry of a table in shared memory to the next."""
    return STRIDES[bits]


@triton.constexpr_function
def in_bytes(bits: int, affine: bool, shared: bool) -> bool:
    """Whether the words of a lane are brought into the order of ``to_bytes`` first."""
    return bits == 1 and is_shared(bits, affine, shared)


@triton.constexpr_function
def elements(bits: int, affine: bool, shared: bool) -> int:
    """Units that one piece of assembly decodes."""
    return 8 if in_bytes(bits, affine, shared) else 2


@triton.constexpr_function
def operands(bits: int, affine: bool, shared: bool) -> tuple[int, int, int]:
    """Words of a unit, and words of the table: those of a lane, those that all lanes hold."""
    words = bits * POSITIONS[bits] // 32
    if is_direct(bits, affine):
        return words, 0, 0
    if in_bytes(bits, affine, shared):
        return 2, 1, 2
    if is_shared(bits, affine, shared):
        return words, 1, int(STRIDES[bits] == 256)
    return words, int(bits not in (1, 3)), {1: 2, 3: 4}.get(bits, 0)


@triton.constexpr_function
def constraints(bits: int, count: int, affine: bool, shared: bool) -> str:
    """Results must not share registers with arguments, which are read until the end."""
    units = elements(bits, affine, shared)
    arguments = units * sum(operands(bits, affine, shared))
    return ",".join(["=&r"] * (count * units // 2) + ["r"] * arguments)


@triton.constexpr_function
def results(dtype: tl.dtype, count: int) -> tuple[tl.dtype, ...]:
    """The dtypes of the results."""
    return (dtype,) * count


@triton.constexpr_function
def assembly(bits: int, first: int, count: int, affine: bool, shared: bool, dtype: tl.dtype) -> str:
    """Decodes positions of two units, 4 or 8 from ``first`` on: a result holds one of both.

    Of eight units, and four results, where ``elements`` says so.
    """
    if in_bytes(bits, affine, shared):
        return eight_units(first, count)
    words, of_lane, of_all = operands(bits, affine, shared)
    a = [f"${count + 2 * i}" for i in range(words)]  # words of the first unit
    b = [f"${count + 2 * i + 1}" for i in range(words)]
    lane = f"${count + 2 * words}"
    table = [f"${count + 2 * (words + of_lane + i)}" for i in range(of_all)]
    lines = [".reg .b32 a, b, c, d, m, s, v, w;"]
    if bits >= 5:
        lanes = [lane] * of_lane
        lines += wide(bits, first, count, affine, a, b, [*lanes, *table], dtype)
    elif is_direct(bits, affine):
        lines += direct(bits, first, count, a[0], b[0], dtype)
    elif bits == 1:
        # Halves of 16 bits of both units side by side.
        lines.append(f"prmt.b32 a, {a[0]}, {b[0]}, {'0x5410' if first < 16 else '0x7632'};")
        for p in range(count):
            lines += one_bit("a", (first + p) % 16, table[0], table[1], f"${p}")
    elif bits == 2:
        # Nibbles of the codes of both units, even positions in a, odd ones in b: one shuffle
        # fetches both values.
        lines += [
            f"shl.b32 c, {b[0]}, 2; lop3.b32 a, {a[0]}, c, 0x33333333, 0xE4;",
            f"shr.u32 c, {a[0]}, 2; lop3.b32 b, c, {b[0]}, 0x33333333, 0xE4;",
        ]
        for p in range(count):
            lines += [
                f"shr.u32 c, {'ab'[p % 2]}, {(first + p) // 2 * 4};",
                f"shfl.sync.idx.b32 ${p}, {lane}, c, 31, -1;",
            ]
    elif bits == 3:
        word = min(first // 8, 2)
        low, high = a[word], b[word]
        if first >= 24:
            for unit, planes in (("a", a), ("b", b)):
                lines += [
                    f"shr.u32 c, {planes[0]}, 3;",
                    f"shr.u32 d, {planes[1]}, 2; and.b32 d, d, 0x22222222;",
                    "lop3.b32 c, c, d, 0x11111111, 0xEC;",
                    f"shr.u32 d, {planes[2]}, 1; lop3.b32 {unit}, d, c, 0x44444444, 0xE4;",
                ]
            low, high = "a", "b"
        for odd in (False, True):
            if is_shared(bits, affine, shared):
                lines += pairs_of_three(low, high, odd)
                for p in range(first % 8 + odd, first % 8 + count, 2):
                    lines += look_up(bits, "m", p // 2, [lane, *table], f"${p - first % 8}")
            else:
                planes = byte_planes(table, odd, first % 8, count)
                lines += [x.format(a=low, b=high) for x in planes]
    elif is_shared(bits, affine, shared):
        # The codes of both units side by side in a byte: one look-up fetches both values.
        for odd in (False, True):
            lines.append(nibbles_of_both(a[0], b[0], odd))
            for p in range(first + odd, first + count, 2):
                lines += look_up(bits, "m", p // 2, [lane], f"${p - first}")
    else:
        # Half of the codes by permutes did not help (H200, 28672 x 8192, m = 1: 57.1 to 63.1 us).
        for p in range(first, first + count):
            for index, value, word in (("c", "v", a), ("d", "w", b)):
                lines.append(f"shr.u32 {index}, {word[0]}, {4 * p};")
                lines.append(f"shfl.sync.idx.b32 {value}, {lane}, {index}, 31, -1;")
            lines.append(f"prmt.b32 ${p - first}, v, w, 0x5410;")
    return "{ " + " ".join(lines) + " }"
