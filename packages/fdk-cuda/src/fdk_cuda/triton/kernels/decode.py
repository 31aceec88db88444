# ruff: noqa: D103, RUF005
# mypy: ignore-errors
"""From words to the values of their codes, on the device, one tensor for each position."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fdk_cuda.triton.kernels.ptx_assembly import (
    assembly,
    constraints,
    elements,
    in_assembly,
    in_bytes,
    is_shared,
    operands,
    results,
    stride_of,
    table_of,
)
from fdk_cuda.triton.kernels.ptx_decode import to_bytes
from fdk_cuda.triton.kernels.ptx_smem import fill, lane_place

# Codebooks of these widths lie in the registers of a warp.
REGISTER_BITS = (1, 2, 3, 4, 5)
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
    elif bits in REGISTER_BITS:
        lanes[:, 0] = raw[:, lane & ((1 << bits) - 1)]
    if bits == 3:
        planes = torch.stack([raw & 0xFF, raw >> 8], dim=1).view(len(DTYPES), -1, 4)
        count = planes.shape[1]
        lanes[:, 1, :count] = (planes << torch.arange(0, 32, 8, device=raw.device)).sum(-1)
    return values, lanes


# What a lane holds of a table: the address is the same in every lane, the value is not.
LANE_ASSEMBLY = tl.constexpr(
    "{ .reg .b32 l; .reg .b64 p; mov.u32 l, %laneid; mad.wide.u32 p, l, 4, $1; "
    "ld.global.b32 $0, [p]; }"
)


_EIGHT_OF_EIGHT = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 8))


@triton.jit
def load_tables(
    values_ptr,
    lanes_ptr,
    CODES: tl.constexpr,
    WARPS: tl.constexpr,
    place=None,
):
    """The words of the table that ``assembly`` takes, as a tuple, and where a table is.

    ``CODES``: see ``decode_part``. With ``SHARED``, where a program is long enough to fill a table
    in shared memory, it is at ``place`` if the kernel has reserved one.
    """
    BITS: tl.constexpr = CODES[0]
    AFFINE: tl.constexpr = CODES[1]
    ASSEMBLY: tl.constexpr = CODES[2]
    SHARED: tl.constexpr = CODES[3]
    X_DTYPE: tl.constexpr = CODES[4]
    tables = ()
    table = 0
    lanes_ptr += table_of(X_DTYPE) * 64
    OF_LANE: tl.constexpr = operands(BITS, AFFINE, SHARED)[1]
    OF_ALL: tl.constexpr = operands(BITS, AFFINE, SHARED)[2]
    if ASSEMBLY and in_assembly(BITS, AFFINE, SHARED):
        if is_shared(BITS, AFFINE, SHARED):
            STRIDE: tl.constexpr = stride_of(BITS)
            values_ptr += table_of(X_DTYPE) * (1 << BITS)
            values_at = (values_ptr.to(tl.int64),)
            table = tl.inline_asm_elementwise(
                fill(BITS, WARPS * 32, place is not None),
                "=&r,l" if place is None else "=&r,l,r",
                values_at if place is None else values_at + (place,),
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
            start = table * 0 if STRIDE == 256 else table
            place = tl.inline_asm_elementwise(
                lane_place(BITS), "=r,r", [start], dtype=tl.int32, is_pure=True, pack=1
            )
            tables = (place, table) if STRIDE == 256 else (place,)
            if in_bytes(BITS, AFFINE, SHARED):
                tables = tables + (tl.load(lanes_ptr + 32), tl.load(lanes_ptr + 33))
        else:
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
    return tables, table


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
        if BITS >= 6:
            upper = words[(2 if BITS == 6 else 4) + p // 16]
            code |= ((upper >> (p % 8 // 2 * 8 + (p // 8 % 2 * 2 + p % 2) * 2)) & 3) << 4
        if BITS != 6:
            upper = words[BITS - 1]
            code |= ((upper >> (p % 8 // 2 * 8 + p // 8 * 2 + p % 2)) & 1) << (BITS - 1)
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
    """The values of a position, without assembly."""
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
def prepare(words, CODES: tl.constexpr):
    """What ``decode_part`` takes, once for all parts of a tile."""
    BITS: tl.constexpr = CODES[0]
    AFFINE: tl.constexpr = CODES[1]
    ASSEMBLY: tl.constexpr = CODES[2]
    SHARED: tl.constexpr = CODES[3]
    if ASSEMBLY and in_bytes(BITS, AFFINE, SHARED):
        return (
            words[0],
            tl.inline_asm_elementwise(
                to_bytes(),
                _EIGHT_OF_EIGHT,
                [words[0]],
                dtype=tl.int32,
                is_pure=True,
                pack=8,
            ),
        )
    else:
        return words


@triton.jit
def decode_part(
    words,
    tables,
    values_ptr,
    part: tl.constexpr,
    COUNT: tl.constexpr,
    CODES: tl.constexpr,
):
    """The values of ``COUNT`` positions, each in the shape of a word.

    ``CODES``: bits, whether affine (2: scaled by one multiply-add), whether by assembly, whether
    with a table in shared memory, the dtype of the activations, and that of the product's operands.
    """
    BITS: tl.constexpr = CODES[0]
    AFFINE: tl.constexpr = CODES[1]
    ASSEMBLY: tl.constexpr = CODES[2]
    SHARED: tl.constexpr = CODES[3]
    X_DTYPE: tl.constexpr = CODES[4]
    DOT_DTYPE: tl.constexpr = CODES[5]
    if ASSEMBLY and in_assembly(BITS, AFFINE, SHARED):
        return tl.inline_asm_elementwise(
            assembly(BITS, part * COUNT, COUNT, AFFINE, SHARED, X_DTYPE),
            constraints(BITS, COUNT, AFFINE, SHARED),
            words + tables,
            dtype=results(DOT_DTYPE, COUNT),
            is_pure=True,
            pack=elements(BITS, AFFINE, SHARED),
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


@triton.jit
def load_pair(scale_at, zero_at, offset, inside, AFFINE: tl.constexpr):
    """Scale and zero point as they are stored; without zero points the second is the first."""
    scale = tl.load(scale_at + offset, mask=inside, other=0)
    zero = scale
    if AFFINE:
        zero = tl.load(zero_at + offset, mask=inside, other=0)
    return scale, zero


@triton.jit
def column_of(position, upper, t, pair, PAIRED: tl.constexpr):
    """The padded column of an element of a unit, in either order of arrangement.py."""
    if PAIRED:
        return position // 2 * 32 + 8 * t + 4 * (position % 2) + 2 * upper + pair
    else:
        return position * 16 + 4 * t + 2 * upper + pair


@triton.jit
def stored_columns(column, k, groups, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr):
    """Which padded columns hold weights, and their places without what groups are padded by."""
    if GROUP == PADDED_GROUP:
        live = column < k
    else:
        live = (column % PADDED_GROUP < GROUP) & (column < groups * PADDED_GROUP)
        column = column // PADDED_GROUP * GROUP + column % PADDED_GROUP
    return column, live
