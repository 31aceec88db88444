# ruff: noqa: D103, RUF005
# mypy: ignore-errors
"""From words to the values of their codes, on the device, one tensor for each position."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Widths that decode through inline assembly, without a load: the table is in registers. Wider
# tables do not fit and are read through L1.
SHUFFLE_BITS = (1, 2, 3, 4, 5)
# Positions that one piece of assembly decodes: more would hold too many registers.
PART = 8
# The activation dtypes, in the order of the tables.
DTYPES = (torch.bfloat16, torch.float16)


def lookup_tables(codebook: Tensor) -> tuple[Tensor, Tensor]:
    """The tables of a codebook ``[2^bits, float32]``.

    Returns:
        values :: [dtype 2, 2^bits, int16] the bits of the rounded values, in each of ``DTYPES``.
        lanes  :: [dtype 2, 2, 32, int32] row 0, what lane i holds: a value of the codebook, or at
            2 bits a pair of them. Row 1, what all hold: at 1 bit the difference of the two values
            as integers and the first value twice; at 3 bits the low bytes of all values, then the
            high ones, four to a word.
    """
    bits = codebook.numel().bit_length() - 1
    values = torch.stack([codebook.to(dtype).view(torch.int16) for dtype in DTYPES])
    raw = values.to(torch.int32) & 0xFFFF
    lane = torch.arange(32, device=codebook.device)
    lanes = raw.new_zeros(len(DTYPES), 2, 32)
    if bits == 1:
        lanes[:, 1, 0] = raw[:, 1] - raw[:, 0]
        lanes[:, 1, 1] = raw[:, 0] | raw[:, 0] << 16
    elif bits == 2:
        lanes[:, 0] = raw[:, lane & 3] | raw[:, lane >> 2 & 3] << 16
    elif bits in SHUFFLE_BITS:
        lanes[:, 0] = raw[:, lane & ((1 << bits) - 1)]
    if bits == 3:
        planes = torch.stack([raw & 0xFF, raw >> 8], dim=1).view(len(DTYPES), -1, 4)
        count = planes.shape[1]
        lanes[:, 1, :count] = (planes << torch.arange(0, 32, 8, device=raw.device)).sum(-1)
    return values, lanes


@triton.constexpr_function
def table_of(dtype: tl.dtype) -> int:
    """Which of the tables of ``lookup_tables`` is for activations of a dtype."""
    return int(dtype == tl.float16)


@triton.constexpr_function
def is_direct(bits: int, affine: bool) -> bool:
    """Whether codes become numbers by arithmetic, without a table."""
    return affine and bits in (2, 4)


@triton.constexpr_function
def operands(bits: int, affine: bool) -> tuple[int, int, int]:
    """Words of a unit, and words of the table: those of a lane, those that all lanes hold."""
    words = 1 if bits in (1, 2, 4) else bits
    if is_direct(bits, affine):
        return words, 0, 0
    return words, int(bits in (2, 4, 5)), {1: 2, 3: 4}.get(bits, 0)


@triton.constexpr_function
def constraints(bits: int, count: int, affine: bool) -> str:
    """Results must not share registers with arguments, which are read until the end."""
    return ",".join(["=&r"] * count + ["r"] * (2 * sum(operands(bits, affine))))


@triton.constexpr_function
def results(dtype: tl.dtype, count: int) -> tuple[tl.dtype, ...]:
    """The dtypes of the results."""
    return (dtype,) * count


@triton.constexpr_function
def byte_planes(table: list[str], odd: bool, first: int, count: int) -> list[str]:
    """Even or odd positions of two units by byte permutes; codes are nibbles of {a}, {b}.

    The nibbles of both units alternate in one word, which then selects the low bytes of four
    values at once, and the high ones.
    """
    lines = [
        "shr.u32 c, {a}, 4; lop3.b32 m, c, {b}, 0x0F0F0F0F, 0xE4;"
        if odd
        else "shl.b32 c, {b}, 4; lop3.b32 m, {a}, c, 0x0F0F0F0F, 0xE4;",
        "and.b32 s, m, 0x77777777;",
    ]
    for position in range(first, first + count, 4):
        if position % 8:
            lines.append("shr.u32 s, s, 16;")
        lines.append(f"prmt.b32 v, {table[0]}, {table[1]}, s;")
        lines.append(f"prmt.b32 w, {table[2]}, {table[3]}, s;")
        for selector, p in (("0x5140", odd), ("0x7362", 2 + odd)):
            lines.append(f"prmt.b32 ${position - first + p}, v, w, {selector};")
    return lines


@triton.constexpr_function
def direct(bits: int, first: int, count: int, a: str, b: str, dtype: tl.dtype) -> list[str]:
    """A code as the low bits of a large power of two, which is then taken away: both exact."""
    # 128 in bf16, 1024 in fp16: one is their last place. Pairs of bf16 have no sum before sm_90.
    power = "0x64006400" if dtype == tl.float16 else "0x43004300"
    minus = "0xE400E400" if dtype == tl.float16 else "0xC300C300"
    one = "0x3C003C00" if dtype == tl.float16 else "0x3F803F80"
    kind = "f16x2" if dtype == tl.float16 else "bf16x2"
    mask = ((1 << bits) - 1) * 0x00010001
    lines = [f"mov.b32 s, {power}; mov.b32 v, {one}; mov.b32 w, {minus};"]
    for p in range(count):
        shift = (first + p) * bits
        if p == 0 or shift % 16 == 0:
            # Halves of 16 bits of both units side by side.
            lines.append(f"prmt.b32 m, {a}, {b}, {'0x5410' if shift < 16 else '0x7632'};")
        lines += [
            f"shr.u32 c, m, {shift % 16};",
            f"lop3.b32 c, c, {mask}, s, 0xEA;",
            f"fma.rn.{kind} ${p}, c, v, w;",
        ]
    return lines


@triton.constexpr_function
def assembly(bits: int, first: int, count: int, affine: bool, dtype: tl.dtype) -> str:
    """Decodes positions of two units, 4 or 8 from ``first`` on: a result holds one of both."""
    words, of_lane, of_all = operands(bits, affine)
    a = [f"${count + 2 * i}" for i in range(words)]  # words of the first unit
    b = [f"${count + 2 * i + 1}" for i in range(words)]
    lane = f"${count + 2 * words}"
    table = [f"${count + 2 * (words + of_lane + i)}" for i in range(of_all)]
    lines = [".reg .b32 a, b, c, d, m, s, v, w;"]
    if is_direct(bits, affine):
        lines += direct(bits, first, count, a[0], b[0], dtype)
    elif bits == 1:
        # Halves of 16 bits of both units side by side.
        lines.append(f"prmt.b32 a, {a[0]}, {b[0]}, {'0x5410' if first < 16 else '0x7632'};")
        for p in range(count):
            lines += [
                f"shr.u32 c, a, {(first + p) % 16};",
                "and.b32 c, c, 0x00010001;",
                # (c0, c0) + (bit, bit) * (c1 - c0), exact as integers: no carry between halves
                f"mad.lo.u32 ${p}, c, {table[0]}, {table[1]};",
            ]
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
            planes = byte_planes(table, odd, first % 8, count)
            lines += [x.format(a=low, b=high) for x in planes]
    else:
        # A shuffle takes its lane from the low five bits. Half of the 4-bit codes by permutes did
        # not help (H200, 28672 x 8192, m = 1: 57.1 us -> 63.1 us).
        for p in range(first, first + count):
            for index, value, word in (("c", "v", a), ("d", "w", b)):
                lines.append(f"shr.u32 {index}, {word[p // 8]}, {4 * (p % 8)};")
                if bits == 5:
                    shift = p - 4  # bring the fifth bit to its place
                    move = "shr.u32" if shift >= 0 else "shl.b32"
                    lines.append(f"{move} {value}, {word[4]}, {abs(shift)};")
                    lines.append(f"lop3.b32 {index}, {index}, {value}, 15, 0xE4;")
                lines.append(f"shfl.sync.idx.b32 {value}, {lane}, {index}, 31, -1;")
            lines.append(f"prmt.b32 ${p - first}, v, w, 0x5410;")
    return "{ " + " ".join(lines) + " }"


# What a lane holds of a table: the address is the same in every lane, the value is not.
LANE_ASSEMBLY = tl.constexpr(
    "{ .reg .b32 l; .reg .b64 p; mov.u32 l, %laneid; mad.wide.u32 p, l, 4, $1; "
    "ld.global.b32 $0, [p]; }"
)


@triton.jit
def load_tables(
    lanes_ptr,
    BITS: tl.constexpr,
    AFFINE: tl.constexpr,
    SHUFFLE: tl.constexpr,
    X_DTYPE: tl.constexpr,
):
    """The words of the table that ``assembly`` takes, as a tuple."""
    tables = ()
    lanes_ptr += table_of(X_DTYPE) * 64
    OF_LANE: tl.constexpr = operands(BITS, AFFINE)[1]
    OF_ALL: tl.constexpr = operands(BITS, AFFINE)[2]
    if SHUFFLE:
        if OF_LANE == 1:
            tables = tables + (
                tl.inline_asm_elementwise(
                    LANE_ASSEMBLY,
                    "=r,l",
                    [lanes_ptr.to(tl.int64)],
                    dtype=tl.int32,
                    is_pure=True,
                    pack=1,
                ),
            )
        for i in tl.static_range(OF_ALL):
            tables = tables + (tl.load(lanes_ptr + 32 + i),)
    return tables


@triton.jit
def code_at(words, p: tl.constexpr, BITS: tl.constexpr):
    """The code at a position of each unit, int32."""
    if BITS == 3:
        if p < 24:
            code = (words[p // 8] >> (p % 8 * 4)) & 7
        else:
            code = (words[0] >> (p % 8 * 4 + 3)) & 1
            code |= ((words[1] >> (p % 8 * 4 + 3)) & 1) << 1
            code |= ((words[2] >> (p % 8 * 4 + 3)) & 1) << 2
    elif BITS <= 4 or BITS == 8:
        code = (words[0] >> (p * BITS)) & ((1 << BITS) - 1)
    else:
        code = (words[p // 8] >> (p % 8 * 4)) & 15
        if BITS == 6:
            code |= ((words[2] >> (p * 2)) & 3) << 4
        elif BITS == 7:
            code |= ((words[4 + p // 16] >> (p % 16 * 2)) & 3) << 4
        if BITS != 6:
            code |= ((words[BITS - 1 if BITS == 7 else 4] >> p) & 1) << (BITS - 1)
    return code


@triton.jit
def value_at(
    words,
    values_ptr,
    p: tl.constexpr,
    BITS: tl.constexpr,
    AFFINE: tl.constexpr,
    X_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """The values of a position, without the shuffle."""
    code = code_at(words, p, BITS)
    if AFFINE:
        # As the low bits of the float32 2^23: one OR and one difference, both exact.
        value = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    else:
        values_ptr += table_of(X_DTYPE) * (1 << BITS)
        value = tl.load(values_ptr + code).to(X_DTYPE, bitcast=True).to(tl.float32)
    return value.to(DOT_DTYPE)


@triton.jit
def load_words(words_ptr, offsets, mask, WORDS: tl.constexpr):
    words = (tl.load(words_ptr + offsets, mask=mask, other=0, eviction_policy="evict_first"),)
    for i in tl.static_range(1, WORDS):
        word = tl.load(
            words_ptr + offsets + i * 256, mask=mask, other=0, eviction_policy="evict_first"
        )
        words = words + (word,)
    return words


@triton.jit
def decode_part(
    words,
    tables,
    values_ptr,
    part: tl.constexpr,
    COUNT: tl.constexpr,
    BITS: tl.constexpr,
    AFFINE: tl.constexpr,
    SHUFFLE: tl.constexpr,
    X_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """The values of ``COUNT`` positions, each in the shape of a word."""
    if SHUFFLE:
        return tl.inline_asm_elementwise(
            assembly(BITS, part * COUNT, COUNT, AFFINE, X_DTYPE),
            constraints(BITS, COUNT, AFFINE),
            words + tables,
            dtype=results(DOT_DTYPE, COUNT),
            is_pure=True,
            pack=2,
        )
    else:
        values = (value_at(words, values_ptr, part * COUNT, BITS, AFFINE, X_DTYPE, DOT_DTYPE),)
        for q in tl.static_range(1, COUNT):
            values = values + (
                value_at(words, values_ptr, part * COUNT + q, BITS, AFFINE, X_DTYPE, DOT_DTYPE),
            )
        return values


@triton.jit
def decode_scale(raw):
    """A stored scale as float32; a byte is the exponent of a float32."""
    if raw.dtype == tl.uint8:
        return (raw.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        return raw.to(tl.float32)
