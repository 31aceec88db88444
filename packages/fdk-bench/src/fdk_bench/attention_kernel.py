"""A Triton kernel for what lies between two linear layers of a step: attention of one token."""

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from fdk_bench.attention_parts import ROWS, entries_of, group_of, step_of, turned_rows
from fdk_bench.launches import launch_options

ENOUGH_PROGRAMS = 264  # two for each processor of an H200
PARTS_AT_ONCE = 8  # that the last program of a head has on their way when it adds them up
SEVERAL = 16  # sequences times key heads from which on programs may be large
LONG = 512  # entries above which a cache is long, see config_for


class AttendConfig(NamedTuple):
    """How a program walks through the cache.

    Attributes:
        block: entries at a time, a power of two from 16 on.
        warps: of a program.
        stages: blocks under way at once.
    """

    block: int
    warps: int
    stages: int


# K, V :: [BLOCK, HEAD_DIM, dtype]
@triton.jit
def attend_block(q, K, V, there, scale, most, weight, sums):  # type: ignore[no-untyped-def] # noqa: D103
    scores = tl.dot(q, K.T, input_precision="ieee") * scale  # [ROWS, BLOCK]
    scores = tl.where(there[None, :], scores, float("-inf"))
    highest = tl.maximum(most, tl.max(scores, axis=1))
    kept = tl.exp(most - highest)
    weights = tl.exp(scores - highest[:, None])
    weight = weight * kept + tl.sum(weights, axis=1)
    sums = sums * kept[:, None] + tl.dot(weights.to(V.dtype), V, input_precision="ieee")
    return highest, weight, sums


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
    there = rows < GROUP
    most = tl.full([FEW], float("-inf"), tl.float32)
    weight = tl.zeros([FEW], tl.float32)
    sums = tl.zeros([FEW, HEAD_DIM], tl.float32)
    # Part by part, so that no sum is over threads; those of AT_ONCE are on their way together.
    for begin in range(0, PARTS, AT_ONCE):
        loaded = ()
        for i in tl.static_range(AT_ONCE):
            live = there & (begin + i < PARTS)
            at = parts + ((begin + i) * GROUP + rows) * width
            most_of = tl.load(at + HEAD_DIM, mask=live, other=float("-inf"))
            weight_of = tl.load(at + HEAD_DIM + 1, mask=live, other=0.0)
            places = at[:, None] + channels[None, :]
            sums_of = tl.load(places, mask=live[:, None], other=0.0)
            loaded += ((most_of, weight_of, sums_of),)  # type: ignore[assignment]
        for i in tl.static_range(AT_ONCE):
            most_of, weight_of, sums_of = loaded[i]
            highest = tl.maximum(most, most_of)
            kept, new = tl.exp(most - highest), tl.exp(most_of - highest)
            weight = weight * kept + weight_of * new
            sums = sums * kept[:, None] + sums_of * new[:, None]
            most = highest
    places = y + rows[:, None] * HEAD_DIM + channels[None, :]
    tl.store(places, (sums / weight[:, None]).to(y.dtype.element_ty), mask=there[:, None])


# qkv      :: [b, 1, (heads + 2 kv_heads) * head_dim, dtype]
# turns    :: [2, length, head_dim, dtype]                 cosines and sines
# position :: [1, int64]
# cache    :: [2, b, kv_heads, length, head_dim, dtype]    keys, then values
# out      :: [b, 1, heads * head_dim, dtype]
# parts    :: [b, kv_heads, PARTS, GROUP, head_dim + 2, float32]    sums, highest score, weight
# arrived  :: [b, kv_heads, int32]                         zeros, before and after
@triton.jit  # type: ignore[untyped-decorator]
def attend_kernel(  # type: ignore[no-untyped-def] # noqa: D103
    qkv,
    turns,
    position,
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
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head, b, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    channels = tl.arange(0, HEAD_DIM)
    rows = tl.arange(0, ROWS)
    entries = tl.arange(0, BLOCK)
    dtype = cache.dtype.element_ty
    # Before the kernel ahead has ended: what the steps before this one have left.
    last, cosine, sine, keys, values = step_of(
        turns, position, cache, length, values_stride, head, b, KV_HEADS, HEAD_DIM
    )
    share = tl.cdiv(tl.cdiv(last, BLOCK), PARTS) * BLOCK
    begin, end = part * share, tl.minimum(last, (part + 1) * share)
    seen = begin + entries
    K, V = entries_of(keys, values, seen, end, HEAD_DIM)

    if PDL:
        tl.extra.cuda.gdc_wait()
    qkv += b * (GROUP + 2) * KV_HEADS * HEAD_DIM
    held = rows[:, None] < GROUP
    q, k, v = turned_rows(qkv, head, cosine, sine, KV_HEADS, GROUP, HEAD_DIM, ROWS)

    # The first part has the new entry, from registers: nobody reads what is stored in this kernel.
    first = part == 0
    tl.store(keys + last * HEAD_DIM + channels, k, mask=first)
    tl.store(values + last * HEAD_DIM + channels, v, mask=first)
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], axis=1) * scale  # [ROWS]
    most = tl.where(first, score, float("-inf"))
    weight = tl.where(first, tl.full([ROWS], 1.0, tl.float32), 0.0)
    sums = tl.where(first, weight[:, None] * v.to(tl.float32)[None, :], 0.0)  # [ROWS, HEAD_DIM]
    if begin < end:
        most, weight, sums = attend_block(q, K, V, seen < end, scale, most, weight, sums)
    for start in range(begin + BLOCK, end, BLOCK):
        seen = start + entries
        K, V = entries_of(keys, values, seen, end, HEAD_DIM)
        most, weight, sums = attend_block(q, K, V, seen < end, scale, most, weight, sums)

    y = out + (b * KV_HEADS + head) * GROUP * HEAD_DIM
    if PARTS == 1:
        mine = y + rows[:, None] * HEAD_DIM + channels[None, :]
        tl.store(mine, (sums / weight[:, None]).to(dtype), mask=held)
    else:
        width: tl.constexpr = HEAD_DIM + 2
        parts += (b * KV_HEADS + head) * PARTS * GROUP * width
        mine = parts + (part * GROUP + rows) * width
        tl.store(mine[:, None] + channels[None, :], sums, mask=held)
        tl.store(mine + HEAD_DIM, most, mask=rows < GROUP)
        tl.store(mine + HEAD_DIM + 1, weight, mask=rows < GROUP)
        # Every thread's stores come before the count, which one thread adds to.
        tl.debug_barrier()
        arrived += b * KV_HEADS + head
        if tl.atomic_add(arrived, 1, sem="acq_rel") == PARTS - 1:
            tl.debug_barrier()
            tl.store(arrived, 0)
            join_parts(parts, y, GROUP, HEAD_DIM, PARTS, FEW, AT_ONCE)


def config_for(programs: int, length: int, itemsize: int = 2) -> AttendConfig:
    """For so many sequences times key heads, and a cache of so many entries.

    Of float32 a block has half as many: 256 entries would take 264 KiB of shared memory, where an
    H200 has 227; 128 take 136 (compiled for it by Triton 3.7).

    Times of 8 blocks with the head (H200, us), in as many parts as ``parts_of`` says. With 128
    tokens and one sequence, 64 / 128 / 256 entries and 8 warps: 12b at 4 bits 619 / 620 / 616, 31b
    at 1 bit 767 / 775 / 774, 12b in bf16 1138 / 1138 / 1181: the programs of a layer before it
    leave no room for those of 256 entries, which need most of a processor's registers. 4 sequences
    of 12b at 4 bits 637 / 634 / 627, 16 of them 794 / 803 / 794. With 2048 tokens 128 entries take
    693, 256 entries 704, 64 with 4 warps 708 (1); 745, 776, 754 (4); 128 with 2 stages 1063, with
    one 1131 (16).
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
    """Parts that a cache of ``length`` entries is cut into: more where few programs read it."""
    return max(1, min(-(-length // block), ENOUGH_PROGRAMS // programs))


def attend(
    qkv: Tensor,
    turns: Tensor,
    position: Tensor,
    cache: Tensor,
    *,
    counters: Tensor | None = None,
    parts: int | None = None,
    config: AttendConfig | None = None,
) -> Tensor:
    """Turns q and k of one token of each sequence, adds k and v to the cache and attends.

    On Hopper the kernel reads position, turns and older entries of the cache while the one ahead
    still runs. They are the work of earlier steps, and each step begins with a kernel of torch,
    which waits for all before it.

    Args:
        qkv: see ``attend_kernel``, as ``turns`` and ``cache``.
        turns: of every position.
        position: of the token.
        cache: written in place.
        counters: ``arrived`` of the kernel, of one stream at a time: calls that may run at once,
            graphs included, need counters of their own. None makes some for this call.
        parts: that the cache is cut into; None chooses.
        config: None chooses.

    Returns:
        ``[b, 1, heads * head_dim, dtype]``.

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
        turns,
        position,
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
        num_warps=config.warps,
        num_stages=config.stages,
        **launch_options(qkv),
    )
    return out


def new_counters(batch: int, kv_heads: int, device: str | torch.device) -> Tensor:
    """Zeros for ``arrived`` of the kernel, which leaves them as zeros."""
    return torch.zeros(batch * kv_heads, dtype=torch.int32, device=device)
