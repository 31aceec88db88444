"""Triton kernels for attention of one token: norms of heads, rotary positions, cache and softmax.

``attend_kernel`` cuts a cache into parts, one program each, and the last program of a key head
adds the parts up. ``attend_short_kernel`` has one program for each key head and all of a short
cache in flight at once, so nothing waits for other programs. In both, what earlier steps left in
the cache is read before the previous kernel has ended (see ``pdl``).
"""

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from fdk_transformers.decode.llama_ops import HeadNorm
from fdk_transformers.decode.pdl import launch_options

ROWS = 16  # fewest rows of q for a tensor core; a group has fewer heads
FEWEST_CHANNELS = 16  # minimum for tl.dot
ENOUGH_PROGRAMS = 264  # two for each multiprocessor of an H200
PARTS_AT_ONCE = 8  # parts that the last program of a head loads together
SEVERAL = 16  # fewest sequences times key heads for large programs
LONG = 512  # entries above which a cache is long, see config_for
SHORT_BLOCK, SHORT_WARPS = 64, 8
MOST_SHORT_BLOCKS = 4  # limited by registers
MOST_SHORT_PROGRAMS = 32


class AttendConfig(NamedTuple):
    """Tiling of ``attend_kernel``.

    Attributes:
        block: cache entries of an iteration, a power of two, at least 16.
        warps: number of warps of a program.
        stages: blocks in flight at once.
    """

    block: int
    warps: int
    stages: int


# cos_sin :: [2, length, HEAD_DIM, dtype]    cosines, then sines
@triton.jit  # type: ignore[untyped-decorator]
def rotary_at(cos_sin, place, length, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: D103
    channels = tl.arange(0, HEAD_DIM)
    turn = cos_sin + place * HEAD_DIM + channels
    cosine = tl.load(turn).to(tl.float32)
    sine = tl.load(turn + length * HEAD_DIM).to(tl.float32)
    return cosine, tl.where(channels < HEAD_DIM // 2, -sine, sine)


# positions :: [b, int64]
# cache     :: [2, b, KV_HEADS, length, HEAD_DIM, dtype]
# returns   :: position, cosine and sine [HEAD_DIM, float32], pointers to keys and values of a head
@triton.jit  # type: ignore[untyped-decorator]
def step_inputs(  # type: ignore[no-untyped-def] # noqa: D103
    cos_sin,
    positions,
    cache,
    length,
    values_stride,
    head,
    b,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    place = tl.load(positions + b).to(tl.int32)
    cosine, sine = rotary_at(cos_sin, place, length, HEAD_DIM)
    keys = cache + (b * KV_HEADS + head) * length * HEAD_DIM
    return place, cosine, sine, keys, keys + values_stride


# keys, values :: [length, HEAD_DIM, dtype]    of one sequence and head
# returns      :: [BLOCK, HEAD_DIM, dtype]     both, zeros from entry `end` on
@triton.jit  # type: ignore[untyped-decorator]
def load_entries(keys, values, entry, end, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: D103
    places = entry[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    K = tl.load(keys + places, mask=entry[:, None] < end, other=0.0)
    return K, tl.load(values + places, mask=entry[:, None] < end, other=0.0)


# weight :: [HEAD_DIM, dtype]          factors of a norm
# x      :: [rows, HEAD_DIM, float32]  heads; partner are the channels that each is turned with
@triton.jit  # type: ignore[untyped-decorator]
def turned(  # type: ignore[no-untyped-def] # noqa: D103
    x,
    swapped,
    weight,
    eps,
    channels,
    partner,
    cosine,
    sine,
    dtype: tl.constexpr,
    NORM: tl.constexpr,
):
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / x.shape[1] + eps)[:, None]
        x = (x * scale * tl.load(weight + channels).to(tl.float32)[None, :]).to(dtype)
        swapped = (swapped * scale * tl.load(weight + partner).to(tl.float32)[None, :]).to(dtype)
    turned_x = x.to(tl.float32) * cosine[None, :] + swapped.to(tl.float32) * sine[None, :]
    return turned_x.to(dtype)


# qkv              :: [(GROUP + 2) * KV_HEADS * HEAD_DIM, dtype]    of one sequence
# q_weight, k_weight :: [HEAD_DIM, dtype]                           factors of the norms of heads
# q                :: [ROWS, HEAD_DIM, dtype]                       rotated, zeros from GROUP on
# k, v             :: [HEAD_DIM, dtype]                             k rotated
@triton.jit  # type: ignore[untyped-decorator]
def rotated_rows(  # type: ignore[no-untyped-def] # noqa: D103
    qkv,
    q_weight,
    k_weight,
    eps,
    head,
    cosine,
    sine,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
):
    channels, rows = tl.arange(0, HEAD_DIM), tl.arange(0, ROWS)
    partner = (channels + HEAD_DIM // 2) % HEAD_DIM
    dtype = qkv.dtype.element_ty
    q_rows = qkv + (head * GROUP + rows[:, None]) * HEAD_DIM
    inside = rows[:, None] < GROUP
    q = tl.load(q_rows + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    swapped = tl.load(q_rows + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    q = turned(q, swapped, q_weight, eps, channels, partner, cosine, sine, dtype, NORM)
    k_row = qkv + (GROUP * KV_HEADS + head) * HEAD_DIM
    k = tl.load(k_row + channels).to(tl.float32)[None, :]
    swapped = tl.load(k_row + partner).to(tl.float32)[None, :]
    k = turned(k, swapped, k_weight, eps, channels, partner, cosine, sine, dtype, NORM)
    k = tl.reshape(k, [HEAD_DIM])
    v = tl.load(qkv + ((GROUP + 1) * KV_HEADS + head) * HEAD_DIM + channels)
    return q, k, v


# K, V :: [BLOCK, HEAD_DIM, dtype]
@triton.jit
def attend_block(q, K, V, inside, scale, row_max, row_sum, acc):  # type: ignore[no-untyped-def] # noqa: D103
    scores = tl.dot(q, K.T, input_precision="ieee") * scale  # [ROWS, BLOCK]
    scores = tl.where(inside[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    alpha = tl.exp(row_max - new_max)
    p = tl.exp(scores - new_max[:, None])
    row_sum = row_sum * alpha + tl.sum(p, axis=1)
    acc = acc * alpha[:, None] + tl.dot(p.to(V.dtype), V, input_precision="ieee")
    return new_max, row_sum, acc


# parts :: [PARTS, GROUP, HEAD_DIM + 2, float32]    see attend_kernel
# y     :: [GROUP, HEAD_DIM, dtype]
@triton.jit  # type: ignore[untyped-decorator]
def join_parts(  # type: ignore[no-untyped-def] # noqa: D103
    parts,
    y,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    FEW: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    width: tl.constexpr = HEAD_DIM + 2
    rows, channels = tl.arange(0, FEW), tl.arange(0, HEAD_DIM)
    inside = rows < GROUP
    row_max = tl.full([FEW], float("-inf"), tl.float32)
    row_sum = tl.zeros([FEW], tl.float32)
    acc = tl.zeros([FEW, HEAD_DIM], tl.float32)
    # Part by part, so that no sum is over threads; AT_ONCE parts are loaded together.
    for begin in range(0, PARTS, AT_ONCE):
        loaded = ()
        for i in tl.static_range(AT_ONCE):
            live = inside & (begin + i < PARTS)
            at = parts + ((begin + i) * GROUP + rows) * width
            part_max = tl.load(at + HEAD_DIM, mask=live, other=float("-inf"))
            part_sum = tl.load(at + HEAD_DIM + 1, mask=live, other=0.0)
            places = at[:, None] + channels[None, :]
            part_acc = tl.load(places, mask=live[:, None], other=0.0)
            loaded += ((part_max, part_sum, part_acc),)  # type: ignore[assignment]
        for i in tl.static_range(AT_ONCE):
            part_max, part_sum, part_acc = loaded[i]
            new_max = tl.maximum(row_max, part_max)
            alpha, beta = tl.exp(row_max - new_max), tl.exp(part_max - new_max)
            row_sum = row_sum * alpha + part_sum * beta
            acc = acc * alpha[:, None] + part_acc * beta[:, None]
            row_max = new_max
    places = y + rows[:, None] * HEAD_DIM + channels[None, :]
    tl.store(places, (acc / row_sum[:, None]).to(y.dtype.element_ty), mask=inside[:, None])


# qkv      :: [b, 1, (heads + 2 kv_heads) * head_dim, dtype]
# q_weight :: [head_dim, dtype]                                     k_weight too; used if NORM
# cos_sin  :: [2, length, head_dim, dtype]
# positions :: [b, int64]
# cache    :: [2, b, kv_heads, length, head_dim, dtype]             keys, then values
# out      :: [b, 1, heads * head_dim, dtype]
# parts    :: [b, kv_heads, PARTS, GROUP, head_dim + 2, float32]    acc, row_max, row_sum
# arrived  :: [b, kv_heads, int32]                                  zeros before and after
@triton.jit  # type: ignore[untyped-decorator]
def attend_kernel(  # type: ignore[no-untyped-def] # noqa: D103
    qkv,
    q_weight,
    k_weight,
    eps,
    cos_sin,
    positions,
    cache,
    out,
    parts,
    arrived,
    length,
    values_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    FEW: tl.constexpr,
    AT_ONCE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head, b, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    channels = tl.arange(0, HEAD_DIM)
    rows = tl.arange(0, ROWS)
    entries = tl.arange(0, BLOCK)
    dtype = cache.dtype.element_ty
    # Written by earlier steps, so read before the previous kernel has ended.
    last, cosine, sine, keys, values = step_inputs(
        cos_sin, positions, cache, length, values_stride, head, b, KV_HEADS, HEAD_DIM
    )
    share = tl.cdiv(tl.cdiv(last, BLOCK), PARTS) * BLOCK
    begin, end = part * share, tl.minimum(last, (part + 1) * share)
    entry = begin + entries
    K, V = load_entries(keys, values, entry, end, HEAD_DIM)

    if PDL:
        tl.extra.cuda.gdc_wait()
    qkv += b * (GROUP + 2) * KV_HEADS * HEAD_DIM
    inside = rows[:, None] < GROUP
    q, k, v = rotated_rows(
        qkv, q_weight, k_weight, eps, head, cosine, sine, KV_HEADS, GROUP, HEAD_DIM, ROWS, NORM
    )

    # The first part adds the new entry from registers: no thread reads here what is stored here.
    first = part == 0
    tl.store(keys + last * HEAD_DIM + channels, k, mask=first)
    tl.store(values + last * HEAD_DIM + channels, v, mask=first)
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], axis=1) * scale  # [ROWS]
    row_max = tl.where(first, score, float("-inf"))
    row_sum = tl.where(first, tl.full([ROWS], 1.0, tl.float32), 0.0)
    acc = tl.where(first, row_sum[:, None] * v.to(tl.float32)[None, :], 0.0)  # [ROWS, HEAD_DIM]
    if begin < end:
        row_max, row_sum, acc = attend_block(q, K, V, entry < end, scale, row_max, row_sum, acc)
    for start in range(begin + BLOCK, end, BLOCK):
        entry = start + entries
        K, V = load_entries(keys, values, entry, end, HEAD_DIM)
        row_max, row_sum, acc = attend_block(q, K, V, entry < end, scale, row_max, row_sum, acc)

    y = out + (b * KV_HEADS + head) * GROUP * HEAD_DIM
    if PARTS == 1:
        out_rows = y + rows[:, None] * HEAD_DIM + channels[None, :]
        tl.store(out_rows, (acc / row_sum[:, None]).to(dtype), mask=inside)
    else:
        width: tl.constexpr = HEAD_DIM + 2
        parts += (b * KV_HEADS + head) * PARTS * GROUP * width
        out_rows = parts + (part * GROUP + rows) * width
        tl.store(out_rows[:, None] + channels[None, :], acc, mask=inside)
        tl.store(out_rows + HEAD_DIM, row_max, mask=rows < GROUP)
        tl.store(out_rows + HEAD_DIM + 1, row_sum, mask=rows < GROUP)
        # The stores of every thread come before the count, which one thread adds to.
        tl.debug_barrier()
        arrived += b * KV_HEADS + head
        if tl.atomic_add(arrived, 1, sem="acq_rel") == PARTS - 1:
            tl.debug_barrier()
            tl.store(arrived, 0)
            join_parts(parts, y, GROUP, HEAD_DIM, PARTS, FEW, AT_ONCE)


# Tensors as for attend_kernel; K, V :: [BLOCK, HEAD_DIM, dtype]
@triton.jit  # type: ignore[untyped-decorator]
def attend_short_kernel(  # type: ignore[no-untyped-def] # noqa: D103
    qkv,
    q_weight,
    k_weight,
    eps,
    cos_sin,
    positions,
    cache,
    out,
    length,
    values_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channels, rows, entries = tl.arange(0, HEAD_DIM), tl.arange(0, ROWS), tl.arange(0, BLOCK)
    dtype = cache.dtype.element_ty
    # Written by earlier steps, so read before the previous kernel has ended.
    last, cosine, sine, keys, values = step_inputs(
        cos_sin, positions, cache, length, values_stride, head, b, KV_HEADS, HEAD_DIM
    )
    K, V = (), ()
    for i in tl.static_range(BLOCKS):
        loaded = load_entries(keys, values, i * BLOCK + entries, last, HEAD_DIM)
        K += (loaded[0],)  # type: ignore[assignment]
        V += (loaded[1],)  # type: ignore[assignment]

    if PDL:
        tl.extra.cuda.gdc_wait()
    qkv += b * (GROUP + 2) * KV_HEADS * HEAD_DIM
    q, k, v = rotated_rows(
        qkv, q_weight, k_weight, eps, head, cosine, sine, KV_HEADS, GROUP, HEAD_DIM, ROWS, NORM
    )
    tl.store(keys + last * HEAD_DIM + channels, k)
    tl.store(values + last * HEAD_DIM + channels, v)

    # The new entry comes from registers: no thread reads here what is stored here.
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], axis=1) * scale  # [ROWS]
    scores = ()
    row_max = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
    for i in tl.static_range(BLOCKS):
        product = tl.dot(q, K[i].T, input_precision="ieee") * scale  # [ROWS, BLOCK]
        product = tl.where((i * BLOCK + entries < last)[None, :], product, float("-inf"))
        row_max = tl.maximum(row_max, product)
        scores += (product,)  # type: ignore[assignment]
    new_max = tl.maximum(tl.max(row_max, axis=1), score)
    own_p = tl.exp(score - new_max)
    row_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    y = own_p[:, None] * v.to(tl.float32)[None, :]  # [ROWS, HEAD_DIM]
    for i in tl.static_range(BLOCKS):
        p = tl.exp(scores[i] - new_max[:, None])
        row_sum += p
        y += tl.dot(p.to(dtype), V[i], input_precision="ieee")
    y /= (tl.sum(row_sum, axis=1) + own_p)[:, None]
    out_rows = out + ((b * KV_HEADS + head) * GROUP + rows[:, None]) * HEAD_DIM + channels[None, :]
    tl.store(out_rows, y.to(dtype), mask=rows[:, None] < GROUP)


def config_for(programs: int, length: int, itemsize: int = 2) -> AttendConfig:
    """Choose the tiling, by times measured on an H200.

    Large blocks win with few programs and a short cache; in bf16 models 256 entries lose, because
    the 16-bit layers ahead leave them no registers. Float32 takes half as many entries: 256 would
    take 264 KiB of shared memory, and an H200 has 227.

    Args:
        programs: sequences times key heads.
        length: entries of the cache.
        itemsize: bytes of an element.
    """
    half = itemsize // 2
    if programs >= 1024:
        return AttendConfig(32 // half, 2, 3)
    if programs >= 256:
        return AttendConfig(32 // half, 4, 3)
    if length > LONG:
        return AttendConfig(128 // half, 8, 1 if programs < 64 else 2)
    return AttendConfig((64 if programs < SEVERAL else 256) // half, 8, 1)


def parts_of(programs: int, length: int, block: int) -> int:
    """Choose the number of parts of a cache: more where fewer programs read it."""
    return max(1, min(-(-length // block), ENOUGH_PROGRAMS // programs))


def attend(
    qkv: Tensor,
    norm: HeadNorm | None,
    cos_sin: Tensor,
    positions: Tensor,
    cache: Tensor,
    *,
    counters: Tensor | None = None,
    parts: int | None = None,
    config: AttendConfig | None = None,
) -> Tensor:
    """Rotate q and k of one token of each sequence, add k and v to the cache, and attend.

    The older entries of the cache must come from earlier steps, each of which begins with a kernel
    of torch, which waits for all before it.

    Args:
        qkv: ``[b, 1, (heads + 2 kv_heads) * head_dim]``.
        norm: norms of q and k, or None.
        cos_sin: ``[2, length, head_dim]``, cosines and sines of every position.
        positions: ``[b, int64]``, of the tokens; each sequence attends to those before.
        cache: ``[2, b, kv_heads, length, head_dim]``, keys and values; written in place.
        counters: from ``new_counters``, for one stream at a time: calls that may run at once,
            graphs included, need separate counters. None makes some for this call.
        parts: number of parts of the cache; None chooses.
        config: None chooses.

    Returns:
        ``[b, 1, heads * head_dim]``.

    Raises:
        ValueError: see ``group_of``.
    """
    _, b, kv_heads, length, head_dim = cache.shape
    group = group_of(qkv, cache)
    config = config or config_for(b * kv_heads, length, cache.itemsize)
    parts = parts or parts_of(b * kv_heads, length, config.block)
    out = qkv.new_empty(b, 1, kv_heads * group * head_dim)
    partial = arrived = out
    if parts > 1:
        shape = (b, kv_heads, parts, group, head_dim + 2)
        partial = qkv.new_empty(shape, dtype=torch.float32)
        arrived = new_counters(b, kv_heads, qkv.device) if counters is None else counters
    attend_kernel[kv_heads, b, parts](
        qkv,
        *norm_arguments(norm, qkv),
        cos_sin,
        positions,
        cache,
        out,
        partial,
        arrived,
        length,
        cache.stride(0),
        head_dim**-0.5,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        ROWS=ROWS,
        BLOCK=config.block,
        PARTS=parts,
        FEW=triton.next_power_of_2(group),
        AT_ONCE=min(parts, PARTS_AT_ONCE),
        NORM=norm is not None,
        num_warps=config.warps,
        num_stages=config.stages,
        **launch_options(qkv),
    )
    return out


def norm_arguments(norm: HeadNorm | None, unused: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return the factors and eps of the norms of q and k as kernels take them."""
    return (unused, unused, 0.0) if norm is None else norm


def new_counters(batch: int, kv_heads: int, device: torch.device) -> Tensor:
    """Return the counters of ``attend``: zeros, which the kernel leaves as zeros."""
    return torch.zeros(batch * kv_heads, dtype=torch.int32, device=device)


def is_short(cache: Tensor) -> bool:
    """Return whether ``attend_short`` supports a cache ``[2, b, kv_heads, length, head_dim]``."""
    _, b, kv_heads, length, _ = cache.shape
    # 256 entries of 128 channels take 68 KiB of shared memory, in float32 264; an H200 has 227.
    fits = length <= SHORT_BLOCK * MOST_SHORT_BLOCKS and cache.itemsize == 2
    return fits and b * kv_heads <= MOST_SHORT_PROGRAMS


def attend_short(
    qkv: Tensor, norm: HeadNorm | None, cos_sin: Tensor, positions: Tensor, cache: Tensor
) -> Tensor:
    """Compute ``attend`` for a cache that ``is_short``.

    Raises:
        ValueError: see ``group_of``.
    """
    _, b, kv_heads, length, head_dim = cache.shape
    group = group_of(qkv, cache)
    out = qkv.new_empty(b, 1, kv_heads * group * head_dim)
    attend_short_kernel[kv_heads, b](
        qkv,
        *norm_arguments(norm, qkv),
        cos_sin,
        positions,
        cache,
        out,
        length,
        cache.stride(0),
        head_dim**-0.5,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        ROWS=ROWS,
        BLOCK=SHORT_BLOCK,
        BLOCKS=triton.cdiv(length, SHORT_BLOCK),
        NORM=norm is not None,
        num_warps=SHORT_WARPS,
        **launch_options(qkv),
    )
    return out


def group_of(qkv: Tensor, cache: Tensor) -> int:
    """Return the heads that share a key head.

    Raises:
        ValueError: for more heads, or other numbers of channels, than the kernels support.
    """
    kv_heads, head_dim = cache.shape[2], cache.shape[4]
    group = qkv.shape[-1] // head_dim // kv_heads - 2
    if group > ROWS or head_dim < FEWEST_CHANNELS or head_dim & (head_dim - 1):
        raise ValueError(
            f"attend: wanted at most {ROWS} heads for a key head and a power of two of at least "
            f"{FEWEST_CHANNELS} channels for a head, got {group} and {head_dim}"
        )
    return group
