# mypy: ignore-errors
"""What the inline assembly that decodes is made of: see ``assembly.assembly``."""

import triton
import triton.language as tl

from fdk_cuda.triton.layout import POSITIONS, STRIDES


@triton.constexpr_function
def nibbles_of_both(a: str, b: str, odd: bool) -> str:
    """Into m, every second nibble of two words: a byte holds one of a, and above it one of b."""
    if odd:
        return f"shr.u32 c, {a}, 4; lop3.b32 m, c, {b}, 0x0F0F0F0F, 0xE4;"
    return f"shl.b32 c, {b}, 4; lop3.b32 m, {a}, c, 0x0F0F0F0F, 0xE4;"


@triton.constexpr_function
def pairs_of_three(a: str, b: str, odd: bool) -> list[str]:
    """Into m, every second code of 3 bits of two words of nibbles: one of a in a byte, one of b."""
    lines = [f"shl.b32 c, {b}, 3; lop3.b32 m, {a}, c, 0x07070707, 0xE4;"]
    if odd:
        lines = [
            f"shr.u32 c, {a}, 4; shr.u32 v, {b}, 1;",
            "lop3.b32 m, c, v, 0x07070707, 0xE4;",
        ]
    return [*lines, "and.b32 m, m, 0x3F3F3F3F;"]


@triton.constexpr_function
def byte_planes(table: list[str], odd: bool, first: int, count: int) -> list[str]:
    """Even or odd positions of two units by byte permutes; codes are nibbles of {a}, {b}.

    The nibbles of both units alternate in one word, which then selects the low bytes of four
    values at once, and the high ones.
    """
    lines = [nibbles_of_both("{a}", "{b}", odd), "and.b32 s, m, 0x77777777;"]
    for position in range(first, first + count, 4):
        if position % 8:
            lines.append("shr.u32 s, s, 16;")
        lines.append(f"prmt.b32 v, {table[0]}, {table[1]}, s;")
        lines.append(f"prmt.b32 w, {table[2]}, {table[3]}, s;")
        for selector, p in (("0x5140", odd), ("0x7362", 2 + odd)):
            lines.append(f"prmt.b32 ${position - first + p}, v, w, {selector};")
    return lines


@triton.constexpr_function
def magic(dtype: tl.dtype) -> tuple[str, str, str, str]:
    """Pairs of a power of two, of one and of minus the power; the suffix of a multiply-add."""
    # 128 in bf16, 1024 in fp16: one is their last place. Pairs of bf16 have no sum before sm_90.
    if dtype == tl.float16:
        return "0x64006400", "0x3C003C00", "0xE400E400", "f16x2"
    return "0x43004300", "0x3F803F80", "0xC300C300", "bf16x2"


@triton.constexpr_function
def direct(bits: int, first: int, count: int, a: str, b: str, dtype: tl.dtype) -> list[str]:
    """A code as the low bits of a large power of two, which is then taken away: both exact."""
    power, one, minus, kind = magic(dtype)
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
def byte_codes(bits: int, word: int, odd: bool, words: list[str], to: str) -> list[str]:
    """Every second of the eight codes of which a word holds the lower four bits, as bytes.

    By the order of the upper bits that arrangement.py gives: four codes at a time.
    """
    lines = [f"shr.u32 {to}, {words[word]}, 4;"] if odd else [f"mov.b32 {to}, {words[word]};"]
    lines.append(f"and.b32 {to}, {to}, 0x0F0F0F0F;")
    upper = []
    if bits >= 6:
        plane = POSITIONS[bits] // 8 + word // 2
        upper.append((words[plane], 4 - 2 * (2 * (word % 2) + odd), 0x30303030))
    if bits != 6:
        upper.append((words[-1], bits - 1 - (2 * word + odd), 0x01010101 << (bits - 1)))
    for plane, shift, mask in upper:
        lines.append(f"{'shl.b32' if shift >= 0 else 'shr.u32'} c, {plane}, {abs(shift)};")
        lines.append(f"lop3.b32 {to}, c, {mask}, {to}, 0xEA;")
    return lines


@triton.constexpr_function
def place_of(bits: int, codes: str, byte: int, table: str) -> list[str]:
    """Into c, where the entry of a byte is. One instruction for each of two pipes."""
    return [
        f"prmt.b32 c, {codes}, 0, {0x4440 | byte};",
        f"mad.lo.u32 c, c, {STRIDES[bits]}, {table};",
    ]


@triton.constexpr_function
def look_up(bits: int, codes: str, byte: int, tables: list[str], to: str) -> list[str]:
    """The value of the code in a byte, from the lanes of the warp or from shared memory."""
    if bits == 5:  # a shuffle takes its lane from the low five bits
        return [
            f"shr.u32 c, {codes}, {8 * byte};",
            f"shfl.sync.idx.b32 {to}, {tables[0]}, c, 31, -1;",
        ]
    if STRIDES[bits] == 128:
        lines = place_of(bits, codes, byte, tables[0])
    else:
        # 256 times the code, and this lane's place in the row
        lines = [
            f"prmt.b32 c, {codes}, {tables[0]}, {0x5504 | byte << 4};",
            f"add.u32 c, c, {tables[1]};",
        ]
    return [*lines, f"ld.shared.b32 {to}, [c];"]


@triton.constexpr_function
def wide(
    bits: int,
    first: int,
    count: int,
    affine: bool,
    a: list[str],
    b: list[str],
    tables: list[str],
    dtype: tl.dtype,
) -> list[str]:
    """Positions of 5 to 8 bits, by the bytes that their codes are brought to."""
    lines = []
    if affine:
        power, one, minus, kind = magic(dtype)
        lines.append(f"mov.b32 s, {power}; mov.b32 m, {one}; mov.b32 d, {minus};")
    for odd in (0,) if bits == 8 else (0, 1):
        codes = a[0], b[0]
        if bits != 8:
            codes = "a", "b"
            lines += byte_codes(bits, first // 8, bool(odd), a, "a")
            lines += byte_codes(bits, first // 8, bool(odd), b, "b")
        for p in range(first, first + count):
            byte = p % 8 // 2 if bits != 8 else p
            if bits != 8 and p % 2 != odd:
                continue
            if affine:
                lines += [
                    f"prmt.b32 c, a, b, {0x0400 | 0x1111 * byte};",
                    f"lop3.b32 c, c, {((1 << bits) - 1) * 0x00010001}, s, 0xEA;",
                    f"fma.rn.{kind} ${p - first}, c, m, d;",
                ]
            else:
                lines += look_up(bits, codes[0], byte, tables, "v")
                lines += look_up(bits, codes[1], byte, tables, "w")
                lines.append(f"prmt.b32 ${p - first}, v, w, 0x5410;")
    return lines


@triton.constexpr_function
def to_bytes() -> str:
    """The words of the eight units of a lane, 1 bit: bit i of a byte is then of unit i.

    Word j then holds positions j, j + 8, j + 16 and j + 24: each byte of all words is transposed
    as 8 x 8 bits, by halves, quarters and eighths.
    """
    lines = [".reg .b32 c;"]
    now = [f"${8 + i}" for i in range(8)]
    for shift, mask in ((4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        then = [f"${i}" if shift == 1 else f"w{shift}{i}" for i in range(8)]
        if shift > 1:
            lines.append(f".reg .b32 {', '.join(then)};")
        for i in range(8):
            if i & shift:
                continue
            low, high = now[i], now[i + shift]
            lines += [
                f"shl.b32 c, {high}, {shift}; lop3.b32 {then[i]}, {low}, c, {mask}, 0xE4;",
                f"shr.u32 c, {low}, {shift}; lop3.b32 {then[i + shift]}, c, {high}, {mask}, 0xE4;",
            ]
        now = then
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def eight_units(first: int, count: int) -> str:
    """Positions of the eight units of a lane, 1 bit: the arguments are words, bytes and a table.

    Even positions by one look-up each, odd ones by arithmetic on pairs: either alone would keep one
    part of the processor busy, shared memory or the arithmetic.
    """
    place, delta, value = (f"${4 * count + 8 * i}" for i in (2, 3, 4))
    lines = [".reg .b32 c, h0, h1, h2, h3;"]
    for r in range(4):
        low, high = f"${4 * count + 2 * r}", f"${4 * count + 2 * r + 1}"
        # Halves of 16 bits of both units side by side.
        lines.append(f"prmt.b32 h{r}, {low}, {high}, {'0x5410' if first < 16 else '0x7632'};")
    for q in range(count):
        p = first + q
        if p % 2:
            for r in range(4):
                lines += one_bit(f"h{r}", p % 16, delta, value, f"${4 * q + r}")
        else:
            lines += place_of(1, f"${4 * count + 8 + p % 8}", p // 8, place)
            result = 4 * q
            lines.append(
                f"ld.shared.v4.b32 {{${result}, ${result + 2}, ${result + 1}, ${result + 3}}}, [c];"
            )
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def one_bit(codes: str, shift: int, delta: str, value: str, to: str) -> list[str]:
    """The values of two codes of one bit, by the lowest bits of two halves."""
    return [
        f"shr.u32 c, {codes}, {shift};",
        "and.b32 c, c, 0x00010001;",
        # (c0, c0) + (bit, bit) * (c1 - c0), exact as integers: no carry between halves
        f"mad.lo.u32 {to}, c, {delta}, {value};",
    ]


@triton.constexpr_function
def of_two(first: int, count: int, same: bool) -> str:
    """One of two values for each code of one bit, in ``count`` positions of two units.

    The arguments are the words of both units, what has the first value of each unit in both halves,
    and likewise the bits in which the values differ; ``same`` where both units have one pair.
    """
    a, b, value_a, value_b, other_a, other_b = (f"${count + i}" for i in range(6))
    lines = [".reg .b32 a, c, v, d;"]
    lines.append(f"prmt.b32 a, {a}, {b}, {'0x5410' if first < 16 else '0x7632'};")
    value, other = value_a, other_a
    if not same:
        value, other = "v", "d"
        lines.append(f"prmt.b32 v, {value_a}, {value_b}, 0x5410;")
        lines.append(f"prmt.b32 d, {other_a}, {other_b}, 0x5410;")
    for p in range(count):
        shift = 15 - (first + p) % 16
        # The sign of a half, in all of its bits.
        lines += [
            f"shl.b32 c, a, {shift};",
            "prmt.b32 c, c, c, 0xBB99;",
            f"lop3.b32 ${p}, c, {other}, {value}, 0x6A;",
        ]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def of_two_constraints(count: int) -> str:
    """Of ``of_two``."""
    return ",".join(["=&r"] * count + ["r"] * 6)
