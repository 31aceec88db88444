# mypy: ignore-errors
"""Inline PTX that uses shared memory: lookup tables, and sums of warps."""

import triton

from fdk_cuda.triton.configs.gpus import STATIC_SMEM_BYTES
from fdk_cuda.triton.kernels.ptx_decode import is_shared
from fdk_cuda.triton.layout import INDEX_BITS, INDEX_SHIFTS, STRIDES, TABLE_BYTES


@triton.constexpr_function
def entry(bits: int) -> tuple[list[str], list[str]]:
    """Returns PTX that computes the 16 bytes of entry e, and the names of its four words."""
    lines, words = [], []
    for i, shift in enumerate(INDEX_SHIFTS[bits]):
        half = "lh"[i % 2]
        lines.append(
            f"shr.u32 c, e, {shift}; and.b32 c, c, {(1 << bits) - 1}; "
            f"mad.wide.u32 p, c, 2, $1; ld.global.b16 {half}, [p];"
        )
        if i % 2 or len(INDEX_SHIFTS[bits]) == 1:
            words.append(f"v{i // 2}")
            lines.append(f"mov.b32 {words[-1]}, {{l, {half}}};")  # one value twice, or two
    return lines, (words * 4)[:4]


@triton.constexpr_function
def reserved_bytes(name: str, size: int) -> str:
    """Returns PTX that declares shared memory and yields its address."""
    return f".shared .align 16 .b8 {name}[{size}]; mov.u32 $0, {name};"


@triton.constexpr_function
def reserve(size: int) -> str:
    """Returns a block of ``reserved_bytes``, for assembly in several branches."""
    return "{ " + reserved_bytes("place", size) + " }"


@triton.constexpr_function
def fill(bits: int, threads: int, reserved: bool = False) -> str:
    """Returns PTX that fills a table in shared memory from a codebook and yields its address.

    If ``reserved``, the second argument is the address. A thread computes one entry at a time and
    writes its copies, or some of them, in an order in which neighbours use different banks. Reads
    of the table must depend on the address that this yields.
    """
    entries, stride = 1 << INDEX_BITS[bits], STRIDES[bits]
    sharing = min(8, max(1, threads // entries))  # threads that share a row
    values, words = entry(bits)
    lines = [
        ".reg .pred q; .reg .b16 l, h; .reg .b32 e, r, a, c, v0, v1, v2, v3; .reg .b64 p;",
        "mov.u32 $0, $2;" if reserved else reserved_bytes("table", entries * stride),
        "mov.u32 r, %tid.x;",
        f"setp.lt.u32 q, r, {entries * sharing};",
    ]
    for first in range(0, entries, threads):
        lines += [
            f"and.b32 e, r, {entries - 1}; add.u32 e, e, {first};",
            *values,
            f"mad.lo.u32 a, e, {stride}, $0;",
            f"shr.u32 c, r, {INDEX_BITS[bits]}; mad.lo.u32 e, c, {8 // sharing}, e;",
            "shl.b32 e, e, 4;",
        ]
        for chunk in range(8 // sharing):
            lines += [
                f"add.u32 c, e, {16 * chunk}; and.b32 c, c, 112; add.u32 c, c, a;",
                f"@q st.shared.v4.b32 [c], {{{', '.join(words)}}};",
            ]
    return "{ " + " ".join([*lines, "bar.sync 0;"]) + " }"


@triton.constexpr_function
def lane_place(bits: int) -> str:
    """Returns PTX that adds this lane's offset in a row of a table to an address."""
    size, copies = (16, 8) if bits == 1 else (4, 32)
    return (
        "{ .reg .b32 l; mov.u32 l, %laneid; "
        f"and.b32 l, l, {copies - 1}; mad.lo.u32 $0, l, {size}, $1; }}"
    )


@triton.constexpr_function
def sums_bytes(n_tiles: int, m_tiles: int, warps: int) -> int:
    """Returns the bytes of the sums of all warps."""
    return 512 * n_tiles * m_tiles * warps


@triton.constexpr_function
def gemv_smem_bytes(n_tiles: int, m_tiles: int, warps: int, table: int) -> tuple[int, bool]:
    """Returns the most shared memory that a program of ``gemv_kernel`` uses, for any format.

    The second result is whether the sums replace the table: where both do not fit the static limit,
    and the table has room for the sums.
    """
    sums = sums_bytes(n_tiles, m_tiles, warps)
    # Triton's own buffers, one after the other: 16-bit results, and x of two positions where its
    # columns are not known to be contiguous.
    buffers = max(sums // 2, 512 * m_tiles * warps)
    replaces = sums <= table and table + sums + buffers > STATIC_SMEM_BYTES
    return table + (0 if replaces else sums) + buffers, replaces


@triton.constexpr_function
def fits_gemv(n_tiles: int, m_tiles: int, warps: int, table: int) -> bool:
    """Returns whether a program of ``gemv_kernel`` fits the static limit."""
    return gemv_smem_bytes(n_tiles, m_tiles, warps, table)[0] <= STATIC_SMEM_BYTES


@triton.constexpr_function
def add_warps(n_tiles: int, m_tiles: int, warps: int, table: int) -> str:
    """Returns PTX that adds the sums of all warps, in order, in the first warp.

    Every thread has ``4 * n_tiles * m_tiles`` sums, of elements that depend on its lane only. If
    both do not fit, the sums replace a table of ``table`` bytes, whose address is the second
    argument.
    """
    count, step = 4 * n_tiles * m_tiles, 512 * warps
    assert fits_gemv(n_tiles, m_tiles, warps, table)
    lines = [".reg .pred q; .reg .b32 a, c; .reg .f32 t0, t1, t2, t3;"]
    if gemv_smem_bytes(n_tiles, m_tiles, warps, table)[1]:
        # Other warps may still read the table.
        lines.append(f"mov.b32 a, ${2 * count}; bar.sync 0;")
    else:
        size = sums_bytes(n_tiles, m_tiles, warps)
        lines.append(f".shared .align 16 .b8 sums[{size}]; mov.u32 a, sums;")
    lines.append("mov.u32 c, %tid.x; setp.lt.u32 q, c, 32; mad.lo.u32 a, c, 16, a;")
    for i in range(0, count, 4):
        values = ", ".join(f"${count + i + j}" for j in range(4))
        lines.append(f"st.shared.v4.f32 [a + {i // 4 * step}], {{{values}}};")
    lines.append("bar.sync 0;")
    for i in range(count):
        lines.append(f"mov.f32 ${i}, ${count + i};")
    for warp in range(1, warps):
        for i in range(0, count, 4):
            at = i // 4 * step + 512 * warp
            lines.append(f"@q ld.shared.v4.f32 {{t0, t1, t2, t3}}, [a + {at}];")
            lines += [f"@q add.f32 ${i + j}, ${i + j}, t{j};" for j in range(4)]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def add_constraints(count: int) -> str:
    """Returns the constraints of ``add_warps``."""
    return ",".join(["=&f"] * count + ["f"] * count + ["r"] * count)


@triton.constexpr_function
def shares_bytes(warps: int) -> int:
    """Returns the bytes of sums that go through shared memory at once.

    16 bytes per thread and warp; with few warps twice as many.
    """
    return 512 * warps * warps * (2 if warps <= 4 else 1)


@triton.constexpr_function
def add_shares(count: int, m_tiles: int, warps: int) -> str:
    """Returns PTX that adds the sums of all warps, in order, ``count // warps`` positions in each.

    Every thread has ``4 * m_tiles`` sums of each of ``count`` positions. Warp w gets the positions
    from ``w * count // warps`` on. The last argument is the address of ``shares_bytes`` bytes.
    """
    own, size = count // warps, 4 * m_tiles
    assert own * warps == count
    lines = [".reg .b32 a, b, c; .reg .f32 t0, t1, t2, t3;"]
    # Other warps may still read a table there.
    lines.append(f"mov.b32 a, ${(own + count) * size}; bar.sync 0;")
    lines += [
        "mov.u32 c, %tid.x; shr.u32 b, c, 5;",
        f"mad.lo.u32 b, b, {512 * warps}, a; mad.lo.u32 a, c, 16, a;",
        "and.b32 c, c, 31; mad.lo.u32 b, c, 16, b;",
    ]
    tiles = [(j, i) for j in range(own) for i in range(m_tiles)]
    at_once = shares_bytes(warps) // (512 * warps * warps)
    for first in range(0, len(tiles), at_once):
        if first:
            lines.append("bar.sync 0;")
        now = range(first, min(first + at_once, len(tiles)))
        for tile in now:
            j, i = tiles[tile]
            for warp in range(warps):
                at = 512 * warps * ((tile - first) * warps + warp)
                argument = (own + warp * own + j) * size + 4 * i
                values = ", ".join(f"${argument + e}" for e in range(4))
                lines.append(f"st.shared.v4.f32 [a + {at}], {{{values}}};")
        lines.append("bar.sync 0;")
        for tile in now:
            j, i = tiles[tile]
            result = j * size + 4 * i
            for warp in range(warps):
                at = 512 * (warps * warps * (tile - first) + warp)
                lines.append(f"ld.shared.v4.f32 {{t0, t1, t2, t3}}, [b + {at}];")
                for e in range(4):
                    sums = f"${result + e}"
                    lines.append(
                        f"add.f32 {sums}, {sums}, t{e};" if warp else f"mov.f32 {sums}, t{e};"
                    )
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def shares_constraints(count: int, m_tiles: int, warps: int) -> str:
    """Returns the constraints of ``add_shares``."""
    size = 4 * m_tiles
    results, arguments = count // warps * size, count * size
    return ",".join(["=&f"] * results + ["f"] * arguments + ["r"] * size)


@triton.constexpr_function
def exchange_halves(count: int, threads: int) -> str:
    """Returns PTX that adds the sums of a cluster of two programs; each gets one half.

    Every thread has ``count`` sums of either half. The first program adds the first half, the
    second the other; each receives its neighbour's sums from the same thread there. They are
    written to the start of the neighbour's dynamic shared memory, Triton's ``global_smem``, which
    must no longer be in use. One cluster barrier ensures that, a second that the sums have arrived;
    no program writes to the other after it.
    """
    lines = [
        ".reg .pred p; .reg .b32 r, a, b; .reg .f32 t0, t1, t2, t3;",
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;",
        "mov.u32 r, %cluster_ctarank; setp.eq.u32 p, r, 0; xor.b32 r, r, 1;",
        "mov.u32 b, global_smem; mov.u32 a, %tid.x; mad.lo.u32 a, a, 16, b;",
        "mapa.shared::cluster.u32 b, a, r;",
    ]
    low, high = count, 2 * count
    for i in range(0, count, 4):
        for j in range(4):
            lines.append(f"selp.f32 t{j}, ${high + i + j}, ${low + i + j}, p;")
            lines.append(f"selp.f32 ${i + j}, ${low + i + j}, ${high + i + j}, p;")
        at = i // 4 * 16 * threads
        lines.append(f"st.shared::cluster.v4.f32 [b + {at}], {{t0, t1, t2, t3}};")
    lines.append("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;")
    for i in range(0, count, 4):
        lines.append(f"ld.shared.v4.f32 {{t0, t1, t2, t3}}, [a + {i // 4 * 16 * threads}];")
        lines += [f"add.f32 ${i + j}, ${i + j}, t{j};" for j in range(4)]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def exchange_constraints(count: int) -> str:
    """Returns the constraints of ``exchange_halves``."""
    return ",".join(["=&f"] * count + ["f"] * (2 * count))


@triton.constexpr_function
def table_bytes(bits: int, affine: bool) -> int:
    """Returns the bytes of the table of a kernel that fills one."""
    return TABLE_BYTES[bits] if is_shared(bits, affine, True) else 0


@triton.constexpr_function
def dgrad_smem_bytes(bits: int, affine: bool, table: bool, warps: int) -> int:
    """Returns the bytes of a program of ``dgrad_kernel``: a table, later the sums of all warps."""
    return max(shares_bytes(warps), table_bytes(bits, affine) if table else 0)
