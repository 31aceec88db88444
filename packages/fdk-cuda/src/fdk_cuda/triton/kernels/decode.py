# ruff: noqa: RUF005
# mypy: ignore-errors
"""Decode words to the values of their codes, or to scaled weights, one tensor per position."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fdk_cuda.triton.kernels.ptx_decode import (
    assembly,
    constraints,
    elements,
    in_assembly,
    in_bytes,
    is_shared,
    of_two,
    of_two_constraints,
    operands,
    results,
    stride_of,
    table_of,
    to_bytes,
)
from fdk_cuda.triton.kernels.ptx_smem import fill, lane_place

# Codebooks of these widths fit the registers of a warp.
REGISTER_BITS = (1, 2, 3, 4, 5)
# Positions that one assembly block decodes: more would need too many registers.
BLOCK_POSITIONS = 8
# Activation dtypes, in the order of the tables.
DTYPES = (torch.bfloat16, torch.float16)


def lookup_tables(codebook: Tensor) -> tuple[Tensor, Tensor]:
    """Builds the lookup tables of a codebook ``[2^bits, float32]``.

    Returns:
        values :: [dtype 2, 2^bits, int16]: the rounded values as bits, for each of ``DTYPES``.
        lanes  :: [dtype 2, 2, 32, int32]: row 0 has the word that lane i holds, a value of the
            codebook or at 2 bits a pair. Row 1 has the words that all lanes hold: at 1 bit the
            difference of the two values as integers, and the first value twice; at 3 bits the low
            bytes of all values, then the high bytes, four to a word.
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


# Loads a lane's word of a table: the address is uniform, the value is not.
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
    """Loads the table operands of ``assembly``; returns them and the address of a shared table.

    ``CODES``: see ``decode_positions``. With SHARED it fills a table in shared memory, at ``place``
    if the kernel reserved room.
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
    """Extracts the code at a position of each unit, int32."""
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
    """Decodes a position without assembly."""
    code = code_at(words, p, BITS)
    if AFFINE:
        # The code as the low bits of the float32 2^23: an OR and a subtraction, both exact.
        value = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    else:
        values_ptr += table_of(X_DTYPE) * (1 << BITS)
        value = tl.load(values_ptr + code).to(X_DTYPE, bitcast=True).to(tl.float32)
    return value.to(DOT_DTYPE)


@triton.jit
def load_words(words_ptr, offsets, mask, WORDS: tl.constexpr):
    """Loads the words of each unit, which are read once: they are evicted first."""
    words = (tl.load(words_ptr + offsets, mask=mask, other=0, eviction_policy="evict_first"),)
    for i in tl.static_range(1, WORDS):
        word = tl.load(
            words_ptr + offsets + i * 256, mask=mask, other=0, eviction_policy="evict_first"
        )
        words = words + (word,)
    return words


@triton.jit
def prepare(words, CODES: tl.constexpr):
    """Prepares words for ``decode_positions``, once for all parts of a tile."""
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
def decode_positions(
    words,
    tables,
    values_ptr,
    part: tl.constexpr,
    COUNT: tl.constexpr,
    CODES: tl.constexpr,
):
    """Decodes ``COUNT`` positions, each in the shape of a word.

    ``CODES``: bits; affine (2: scaled by one multiply-add); by assembly; with a table in shared
    memory; dtype of the activations; dtype of the operands of the product.
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
    """Converts a stored scale to float32; a byte is the exponent of a float32."""
    if raw.dtype == tl.uint8:
        return (raw.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        return raw.to(tl.float32)


@triton.jit
def load_pair(scale_at, zero_at, offset, inside, AFFINE: tl.constexpr):
    """Loads scale and zero point undecoded; without zero points the second is the scale."""
    scale = tl.load(scale_at + offset, mask=inside, other=0)
    zero = scale
    if AFFINE:
        zero = tl.load(zero_at + offset, mask=inside, other=0)
    return scale, zero


@triton.jit
def column_of(step, t, upper, pair, PAIRED: tl.constexpr):
    """Returns the padded column of an element: ``fragment_order.column_of`` on the device."""
    if PAIRED:
        return step // 2 * 32 + 8 * t + 4 * (step % 2) + 2 * upper + pair
    else:
        return step * 16 + 4 * t + 2 * upper + pair


@triton.jit
def stored_columns(column, k, groups, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr):
    """Maps padded columns to columns of W; returns these and a mask of those that exist."""
    if GROUP == PADDED_GROUP:
        live = column < k
    else:
        live = (column % PADDED_GROUP < GROUP) & (column < groups * PADDED_GROUP)
        column = column // PADDED_GROUP * GROUP + column % PADDED_GROUP
    return column, live


# Products of pairs, each rounded once, as float32 arithmetic and a cast give them. bf16 adds -0:
# there is no product of bf16 pairs before sm_90.
_PRODUCT = {
    tl.bfloat16: "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }",
    tl.float16: "mul.rn.f16x2 $0, $1, $2;",
}


@triton.constexpr_function
def product(dtype: tl.dtype) -> str:
    """Returns the assembly that multiplies pairs."""
    return _PRODUCT[dtype]


@triton.jit
def load_scale(
    scale_ptr,
    zero_ptr,
    at,
    inside,
    N_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    AFFINE: tl.constexpr,
):
    """Loads scales and zero points for ``scaled``.

    ``at :: [N_TILES, (warp, g, t, half)]``; the results are ``[N_TILES, half, warp, g, t, 1]``. A
    16-bit scale keeps its dtype. Without zero points the second result is the scale again.
    """
    scale = tl.load(scale_ptr + at, mask=inside, other=0)
    if scale.dtype == tl.uint8:
        scale = decode_scale(scale)
    scale = tl.permute(tl.reshape(scale, [N_TILES, WARPS, 8, 4, 2]), [0, 4, 1, 2, 3])
    scale = scale[:, :, :, :, :, None]
    zero = scale
    if AFFINE:
        zero = tl.load(zero_ptr + at, mask=inside, other=0).to(tl.float32)
        zero = tl.permute(tl.reshape(zero, [N_TILES, WARPS, 8, 4, 2]), [0, 4, 1, 2, 3])
        zero = zero[:, :, :, :, :, None]
    return scale, zero


@triton.jit
def scaled(value, scale, zero, CODES: tl.constexpr):
    """Returns ``(value - zero) * scale``, rounded once; the last dimension is pairs."""
    AFFINE: tl.constexpr = CODES[1]
    ASSEMBLY: tl.constexpr = CODES[2]
    X_DTYPE: tl.constexpr = CODES[4]
    DOT_DTYPE: tl.constexpr = CODES[5]
    if ASSEMBLY and not AFFINE and scale.dtype == X_DTYPE:
        return tl.inline_asm_elementwise(
            product(X_DTYPE), "=r,r,r", [value, scale], dtype=scale.dtype, is_pure=True, pack=2
        )
    else:
        w = value.to(tl.float32)
        if AFFINE == 2:
            # Both products are exact (``PackedWeight.fused``). The result is that of the other
            # formula wherever value - zero is exact: for all but tiny zero points other than 0.
            scale = scale.to(tl.float32)
            minus = tl.broadcast_to(-(zero.to(tl.float32) * scale), w.shape)
            return tl.fma(w, tl.broadcast_to(scale, w.shape), minus).to(DOT_DTYPE)
        if AFFINE:
            w = w - zero.to(tl.float32)
        return (w * scale.to(tl.float32)).to(DOT_DTYPE)


@triton.jit
def two_values(values_ptr, scale, zero, CODES: tl.constexpr):
    """Scales both values of affine 1-bit codes.

    Returns the first value twice in a word, and the bits in which the second differs, in the shape
    of scale and zero.
    """
    X_DTYPE: tl.constexpr = CODES[4]
    values_ptr += table_of(X_DTYPE) * 2
    scale = scale.to(tl.float32)
    low = tl.load(values_ptr).to(X_DTYPE, bitcast=True).to(tl.float32)
    high = tl.load(values_ptr + 1).to(X_DTYPE, bitcast=True).to(tl.float32)
    zero = zero.to(tl.float32)
    low = (low - zero) * scale
    high = (high - zero) * scale
    low = low.to(X_DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = high.to(X_DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low * 0x10001, (low ^ high) * 0x10001


@triton.jit
def select_scaled(
    word,
    values_ptr,
    scale,
    zero,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    SAME: tl.constexpr,
    CODES: tl.constexpr,
):
    """Decodes ``COUNT`` positions of affine 1-bit codes, each in the shape of ``word``.

    ``SAME``: neighbouring words share scale and zero point.
    """
    value, other = two_values(values_ptr, scale, zero, CODES)
    return tl.inline_asm_elementwise(
        of_two(FIRST, COUNT, SAME),
        of_two_constraints(COUNT),
        [word, value, other],
        dtype=results(CODES[4], COUNT),
        is_pure=True,
        pack=2,
    )


@triton.jit
def scaled_positions(
    words,
    tables,
    values_ptr,
    scale_ptr,
    zero_ptr,
    scale_at,
    has_scale,
    first_column,
    groups,
    part: tl.constexpr,
    COUNT: tl.constexpr,
    CODES: tl.constexpr,
    GROUPING: tl.constexpr,
    N_TILES: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Decodes and scales ``COUNT`` positions, each ``[N_TILES, half, WARPS, g, t, 4]``.

    ``scale_at :: [N_TILES, (WARPS, g, t, half)]`` is the offset of group 0 of each row,
    ``first_column`` (a scalar, or of that shape) the first padded column. ``CODES``: see
    ``decode_positions``. ``GROUPING``: padded group size, columns of a segment, whether a row is
    one group.
    """
    AFFINE: tl.constexpr = CODES[1]
    PADDED_GROUP: tl.constexpr = GROUPING[0]
    SEGMENT: tl.constexpr = GROUPING[1]
    ONE_GROUP: tl.constexpr = GROUPING[2]
    values = decode_positions(words, tables, values_ptr, part, COUNT, CODES)
    weights = ()
    for q in tl.static_range(COUNT):
        if q == 0 or q * 16 % SEGMENT == 0:
            group = first_column * 0
            if not ONE_GROUP:
                group = (first_column + q * 16) // PADDED_GROUP
            inside = has_scale & (group < groups)
            at = scale_at + group * 16
            scale, zero = load_scale(scale_ptr, zero_ptr, at, inside, N_TILES, WARPS, AFFINE)
        w = tl.reshape(values[q], [N_TILES, 2, WARPS, 8, 4, 4])
        w = scaled(w, scale, zero, CODES)
        weights = weights + (w,)
    return weights


@triton.jit
def join_positions(weights, COUNT: tl.constexpr, N_TILES: tl.constexpr, WARPS: tl.constexpr):
    """Stacks positions: ``[N_TILES, half, WARPS, g, t, upper, pair, p0, p1(, p2)]``."""
    low = tl.join(tl.join(weights[0], weights[1]), tl.join(weights[2], weights[3]))
    if COUNT == 8:
        high = tl.join(tl.join(weights[4], weights[5]), tl.join(weights[6], weights[7]))
        return tl.reshape(tl.join(low, high), [N_TILES, 2, WARPS, 8, 4, 2, 2, 2, 2, 2])
    else:
        return tl.reshape(low, [N_TILES, 2, WARPS, 8, 4, 2, 2, 2, 2])
