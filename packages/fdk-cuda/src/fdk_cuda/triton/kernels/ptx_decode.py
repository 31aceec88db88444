# mypy: ignore-errors
"""Inline PTX that decodes: how the codes of each width become pairs of 16-bit values.

A block of assembly decodes some positions of two units at once, so that each result is a register
of two values, as ``mma`` reads it. By width and format:

    affine, 2 and 4 to 7 bits  the code as the low bits of a power of two, which is then subtracted
    1 bit                      value 0 + bit * (value 1 - value 0), as integers
    2, 4 and 5 bits            a shuffle: lane i of the warp holds value i
    3 bits                     byte permutes of two registers with the low bytes of all values, and
                               of two with the high bytes
    1, 3, 4, 6, 7 and 8 bits   a table in shared memory, where a program is long enough to fill one;
                               see ``layout.INDEX_BITS``
"""

import triton
import triton.language as tl

from fdk_cuda.triton.layout import POSITIONS, STRIDES

# Transposes both units of a lane: their halves, joined, are two neighbours in a row of 8 x 8
# elements of 16 bits. The lane gets two neighbours in a column and separates them again.
TRANSPOSE = tl.constexpr(
    "{ .reg .b32 l, h; prmt.b32 l, $2, $3, 0x5410; prmt.b32 h, $2, $3, 0x7632; "
    "movmatrix.sync.aligned.m8n8.trans.b16 l, l; movmatrix.sync.aligned.m8n8.trans.b16 h, h; "
    "prmt.b32 $0, l, h, 0x5410; prmt.b32 $1, l, h, 0x7632; }"
)


@triton.constexpr_function
def table_of(dtype: tl.dtype) -> int:
    """Returns the index of a dtype in the tables of ``lookup_tables``."""
    return int(dtype == tl.float16)


@triton.constexpr_function
def is_direct(bits: int, affine: bool) -> bool:
    """Returns whether codes become numbers by arithmetic on pairs, without a table."""
    return affine and bits in (2, 4, 5, 6, 7)


@triton.constexpr_function
def is_shared(bits: int, affine: bool, shared: bool) -> bool:
    """Returns whether assembly reads a table in shared memory; ``shared``: the kernel fills one."""
    return shared and bits in STRIDES and (bits in (1, 3) or not affine)


@triton.constexpr_function
def in_assembly(bits: int, affine: bool, shared: bool) -> bool:
    """Returns whether there is assembly; ``shared``: the kernel fills a table in shared memory."""
    return is_shared(bits, affine, shared) or bits <= 5 or (affine and bits < 8)


@triton.constexpr_function
def stride_of(bits: int) -> int:
    """Returns the bytes from one entry of a table in shared memory to the next."""
    return STRIDES[bits]


@triton.constexpr_function
def in_bytes(bits: int, affine: bool, shared: bool) -> bool:
    """Returns whether ``to_bytes`` reorders the words of a lane first."""
    return bits == 1 and is_shared(bits, affine, shared)


@triton.constexpr_function
def elements(bits: int, affine: bool, shared: bool) -> int:
    """Returns the units that one block of assembly decodes."""
    return 8 if in_bytes(bits, affine, shared) else 2


@triton.constexpr_function
def operands(bits: int, affine: bool, shared: bool) -> tuple[int, int, int]:
    """Returns the words of a unit, table words per lane, and table words that all lanes hold."""
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
    """Returns the constraints of ``assembly``: results must not share registers with arguments."""
    units = elements(bits, affine, shared)
    arguments = units * sum(operands(bits, affine, shared))
    return ",".join(["=&r"] * (count * units // 2) + ["r"] * arguments)


@triton.constexpr_function
def results(dtype: tl.dtype, count: int) -> tuple[tl.dtype, ...]:
    """Returns the dtypes of the results."""
    return (dtype,) * count


@triton.constexpr_function
def assembly(bits: int, first: int, count: int, affine: bool, shared: bool, dtype: tl.dtype) -> str:
    """Returns PTX that decodes ``count`` positions (4 or 8) of two units, from ``first`` on.

    A result holds a position of both units. Where ``elements`` is 8 there are eight units, and four
    results per position.
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
        # Join 16-bit halves of both units.
        lines.append(f"prmt.b32 a, {a[0]}, {b[0]}, {'0x5410' if first < 16 else '0x7632'};")
        for p in range(count):
            lines += one_bit("a", (first + p) % 16, table[0], table[1], f"${p}")
    elif bits == 2:
        # Nibbles with a code of each unit, even positions in a, odd ones in b: one shuffle gets
        # both values.
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
        # Bytes with a code of each unit: one look-up gets both values.
        for odd in (False, True):
            lines.append(nibbles_of_both(a[0], b[0], odd))
            for p in range(first + odd, first + count, 2):
                lines += look_up(bits, "m", p // 2, [lane], f"${p - first}")
    else:
        # Decoding half of the codes by permutes was slower (H200, 28672 x 8192: 63.1 us for 57.1).
        for p in range(first, first + count):
            for index, value, word in (("c", "v", a), ("d", "w", b)):
                lines.append(f"shr.u32 {index}, {word[0]}, {4 * p};")
                lines.append(f"shfl.sync.idx.b32 {value}, {lane}, {index}, 31, -1;")
            lines.append(f"prmt.b32 ${p - first}, v, w, 0x5410;")
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def one_bit(codes: str, shift: int, delta: str, value: str, to: str) -> list[str]:
    """Decodes two 1-bit codes at bit ``shift`` of two halves."""
    return [
        f"shr.u32 c, {codes}, {shift};",
        "and.b32 c, c, 0x00010001;",
        # (c0, c0) + (bit, bit) * (c1 - c0), exact as integers: no carry between halves
        f"mad.lo.u32 {to}, c, {delta}, {value};",
    ]


@triton.constexpr_function
def direct(bits: int, first: int, count: int, a: str, b: str, dtype: tl.dtype) -> list[str]:
    """Decodes by a power of two: OR the code into its low bits, subtract it; both are exact."""
    power, one, minus, kind = magic(dtype)
    mask = ((1 << bits) - 1) * 0x00010001
    lines = [f"mov.b32 s, {power}; mov.b32 v, {one}; mov.b32 w, {minus};"]
    for p in range(count):
        shift = (first + p) * bits
        if p == 0 or shift % 16 == 0:
            # Join 16-bit halves of both units.
            lines.append(f"prmt.b32 m, {a}, {b}, {'0x5410' if shift < 16 else '0x7632'};")
        lines += [
            f"shr.u32 c, m, {shift % 16};",
            f"lop3.b32 c, c, {mask}, s, 0xEA;",
            f"fma.rn.{kind} ${p}, c, v, w;",
        ]
    return lines


@triton.constexpr_function
def magic(dtype: tl.dtype) -> tuple[str, str, str, str]:
    """Returns pairs of a power of two, of 1 and of minus the power, and the type of the fma."""
    # 128 in bf16, 1024 in fp16, whose last place is 1. bf16 pairs have no add before sm_90.
    if dtype == tl.float16:
        return "0x64006400", "0x3C003C00", "0xE400E400", "f16x2"
    return "0x43004300", "0x3F803F80", "0xC300C300", "bf16x2"


@triton.constexpr_function
def nibbles_of_both(a: str, b: str, odd: bool) -> str:
    """Joins every second nibble of two words in m: a byte has one of a and, above it, one of b."""
    if odd:
        return f"shr.u32 c, {a}, 4; lop3.b32 m, c, {b}, 0x0F0F0F0F, 0xE4;"
    return f"shl.b32 c, {b}, 4; lop3.b32 m, {a}, c, 0x0F0F0F0F, 0xE4;"


@triton.constexpr_function
def pairs_of_three(a: str, b: str, odd: bool) -> list[str]:
    """Joins every second 3-bit code of two words of nibbles in m, as 6 bits of a byte."""
    lines = [f"shl.b32 c, {b}, 3; lop3.b32 m, {a}, c, 0x07070707, 0xE4;"]
    if odd:
        lines = [
            f"shr.u32 c, {a}, 4; shr.u32 v, {b}, 1;",
            "lop3.b32 m, c, v, 0x07070707, 0xE4;",
        ]
    return [*lines, "and.b32 m, m, 0x3F3F3F3F;"]


@triton.constexpr_function
def byte_planes(table: list[str], odd: bool, first: int, count: int) -> list[str]:
    """Decodes even or odd positions of two units by byte permutes; codes are nibbles of {a}, {b}.

    The nibbles of both units alternate in one word, which selects the low bytes of four values at
    once, and then the high bytes.
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
    """Decodes positions of 5 to 8 bits, whose codes are first assembled in bytes."""
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
def byte_codes(bits: int, word: int, odd: bool, words: list[str], to: str) -> list[str]:
    """Assembles every second of eight codes in bytes, from a word of their lower four bits.

    The order of the upper bits in layout.py allows four codes at a time.
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
def look_up(bits: int, codes: str, byte: int, tables: list[str], to: str) -> list[str]:
    """Looks up the value of the code in a byte, by a shuffle or in shared memory."""
    if bits == 5:  # a shuffle reads its lane from the low five bits
        return [
            f"shr.u32 c, {codes}, {8 * byte};",
            f"shfl.sync.idx.b32 {to}, {tables[0]}, c, 31, -1;",
        ]
    if STRIDES[bits] == 128:
        lines = place_of(bits, codes, byte, tables[0])
    else:
        # 256 times the code, plus this lane's offset in the row
        lines = [
            f"prmt.b32 c, {codes}, {tables[0]}, {0x5504 | byte << 4};",
            f"add.u32 c, c, {tables[1]};",
        ]
    return [*lines, f"ld.shared.b32 {to}, [c];"]


@triton.constexpr_function
def place_of(bits: int, codes: str, byte: int, table: str) -> list[str]:
    """Computes the address of the entry of a byte in c, one instruction on each of two pipes."""
    return [
        f"prmt.b32 c, {codes}, 0, {0x4440 | byte};",
        f"mad.lo.u32 c, c, {STRIDES[bits]}, {table};",
    ]


@triton.constexpr_function
def to_bytes() -> str:
    """Transposes the 1-bit words of the eight units of a lane: bit i of a byte is then of unit i.

    Word j then has positions j, j + 8, j + 16 and j + 24: each byte of all words is transposed as
    8 x 8 bits, in three steps.
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
    """Decodes positions of the eight 1-bit units of a lane, from words, bytes and a table.

    Even positions use one look-up each, odd ones arithmetic on pairs: this balances shared memory
    and arithmetic.
    """
    place, delta, value = (f"${4 * count + 8 * i}" for i in (2, 3, 4))
    lines = [".reg .b32 c, h0, h1, h2, h3;"]
    for r in range(4):
        low, high = f"${4 * count + 2 * r}", f"${4 * count + 2 * r + 1}"
        # Join 16-bit halves of both units.
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
def of_two(first: int, count: int, same: bool) -> str:
    """Selects one of two values for each 1-bit code, in ``count`` positions of two units.

    Arguments are the words of both units, the first value of each unit in both halves, and the bits
    in which the values differ. ``same``: both units have the same values.
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
        # Spread the sign of each half over its bits.
        lines += [
            f"shl.b32 c, a, {shift};",
            "prmt.b32 c, c, c, 0xBB99;",
            f"lop3.b32 ${p}, c, {other}, {value}, 0x6A;",
        ]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def of_two_constraints(count: int) -> str:
    """Returns the constraints of ``of_two``."""
    return ",".join(["=&r"] * count + ["r"] * 6)
