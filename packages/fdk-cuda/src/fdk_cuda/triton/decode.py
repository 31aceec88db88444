"""From words to the values of their codes, on the device, one tensor for each position."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Widths that decode through inline assembly: a code selects the lane of a warp that holds its
# value, and one shuffle fetches it. Wider tables do not fit the 32 lanes and are read through L1.
SHUFFLE_BITS = (1, 2, 3, 4, 5)
# Positions that one piece of assembly decodes: more would hold too many registers.
PART = 8
# The activation dtypes, in the order of the tables.
DTYPES = (torch.bfloat16, torch.float16)


def lookup_tables(codebook: Tensor) -> tuple[Tensor, Tensor]:
    """The tables of a codebook ``[2^bits, float32]``.

    Returns:
        values :: [dtype 2, 2^bits, int16] the bits of the rounded values, in each of ``DTYPES``.
        lanes  :: [dtype 2, 2, 32, int32] what each lane holds: at 1 bit the difference of the two
            values as integers, and the first value twice; at 2 bits a pair of values; up to 5
            bits a value. Zero above.
    """
    bits = codebook.numel().bit_length() - 1
    values = torch.stack([codebook.to(dtype).view(torch.int16) for dtype in DTYPES])
    raw = values.to(torch.int32) & 0xFFFF
    lane = torch.arange(32, device=codebook.device)
    lanes = raw.new_zeros(len(DTYPES), 2, 32)
    if bits == 1:
        lanes[:, 0] = (raw[:, 1] - raw[:, 0])[:, None]
        lanes[:, 1] = (raw[:, 0] | raw[:, 0] << 16)[:, None]
    elif bits == 2:
        lanes[:, 0] = raw[:, lane & 3] | raw[:, lane >> 2 & 3] << 16
    elif bits in SHUFFLE_BITS:
        lanes[:, 0] = raw[:, lane & ((1 << bits) - 1)]
    return values, lanes


@triton.constexpr_function
def assembly(bits: int, part: int) -> str:
    """Decodes eight positions of two units: register p of the result holds one of both units."""
    words, PART = 1 if bits in (1, 2, 4) else bits, 8  # noqa: N806
    a = [f"${PART + 2 * i}" for i in range(words)]  # words of the first unit
    b = [f"${PART + 2 * i + 1}" for i in range(words)]
    table, second = f"${PART + 2 * words}", f"${PART + 2 * words + 2}"
    lines = [".reg .b32 a, b, c, d, v, w;"]
    if bits == 1:
        # Halves of 16 bits of both units side by side; an even part lies in their lower bytes.
        lines.append(f"prmt.b32 a, {a[0]}, {b[0]}, {'0x5410' if part < 2 else '0x7632'};")
        for p in range(PART):
            lines += [
                f"shr.u32 c, a, {(part * PART + p) % 16};",
                "and.b32 c, c, 0x00010001;",
                # (c0, c0) + (bit, bit) * (c1 - c0), exact as integers: no carry between halves
                f"mad.lo.u32 ${p}, c, {table}, {second};",
            ]
    elif bits == 2:
        # Nibbles of the codes of both units: even positions in a, odd ones in b.
        lines += [
            f"shl.b32 c, {b[0]}, 2; lop3.b32 a, {a[0]}, c, 0x33333333, 0xE4;",
            f"shr.u32 c, {a[0]}, 2; lop3.b32 b, c, {b[0]}, 0x33333333, 0xE4;",
        ]
        for p in range(PART):
            lines += [
                f"shr.u32 c, {'ab'[p % 2]}, {(part * PART + p) // 2 * 4};",
                f"shfl.sync.idx.b32 ${p}, {table}, c, 31, -1;",
            ]
    else:
        if bits == 3 and part == 3:
            for unit, word in (("c", a), ("d", b)):
                lines += [
                    f"shr.u32 a, {word[0]}, 3; shr.u32 b, {word[1]}, 2; and.b32 b, b, 0x22222222;",
                    "lop3.b32 a, a, b, 0x11111111, 0xEC;",
                    f"shr.u32 b, {word[2]}, 1; lop3.b32 {unit}, b, a, 0x44444444, 0xE4;",
                ]
            a, b = ["c"] * 4, ["d"] * 4
        for p in range(PART):
            for index, value, word in (("a", "v", a), ("b", "w", b)):
                lines.append(f"shr.u32 {index}, {word[part]}, {4 * p};")
                if bits == 5:
                    shift = part * PART + p - 4  # bring the fifth bit to its place
                    move = "shr.u32" if shift >= 0 else "shl.b32"
                    lines.append(f"{move} {value}, {word[4]}, {abs(shift)};")
                    lines.append(f"lop3.b32 {index}, {index}, {value}, 15, 0xE4;")
                lines.append(f"shfl.sync.idx.b32 {value}, {table}, {index}, 31, -1;")
            lines.append(f"prmt.b32 ${p}, v, w, 0x5410;")
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def constraints(bits: int) -> str:
    """Results must not share registers with arguments, which are read until the end."""
    words = 1 if bits in (1, 2, 4) else bits
    return ",".join(["=&r"] * 8 + ["r"] * (2 * words + 4))


@triton.constexpr_function
def eight(dtype: tl.dtype) -> tuple[tl.dtype, ...]:
    """The dtypes of the eight results."""
    return (dtype,) * 8


# What a lane holds of a table: the address is the same in every lane, the value is not.
LANE_ASSEMBLY = tl.constexpr(
    "{ .reg .b32 l; .reg .b64 p; mov.u32 l, %laneid; mad.wide.u32 p, l, 4, $1; "
    "ld.global.b32 $0, [p]; }"
)


@triton.jit
def load_lanes(lanes_ptr, offset: tl.constexpr):
    return tl.inline_asm_elementwise(
        LANE_ASSEMBLY,
        "=r,l",
        [(lanes_ptr + offset).to(tl.int64)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


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
def value_at(words, values_ptr, p: tl.constexpr, BITS: tl.constexpr, AFFINE: tl.constexpr,
             X_DTYPE: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """The values of a position, without the shuffle."""
    code = code_at(words, p, BITS)
    if AFFINE:
        # As the low bits of the float32 2^23: one OR and one difference, both exact.
        value = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    else:
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
    words, lane, second, values_ptr, part: tl.constexpr, COUNT: tl.constexpr,
    BITS: tl.constexpr, AFFINE: tl.constexpr, SHUFFLE: tl.constexpr, X_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """The values of ``COUNT`` positions, each in the shape of a word."""
    if SHUFFLE:
        return tl.inline_asm_elementwise(
            assembly(BITS, part),
            constraints(BITS),
            words + (lane, second),
            dtype=eight(DOT_DTYPE),
            is_pure=True,
            pack=2,
        )
    else:
        values = (value_at(words, values_ptr, part * 8, BITS, AFFINE, X_DTYPE, DOT_DTYPE),)
        for q in tl.static_range(1, COUNT):
            values = values + (
                value_at(words, values_ptr, part * 8 + q, BITS, AFFINE, X_DTYPE, DOT_DTYPE),
            )
        return values


@triton.jit
def decode_scale(raw):
    """A stored scale as float32; a byte is the exponent of a float32."""
    if raw.dtype == tl.uint8:
        return (raw.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        return raw.to(tl.float32)
