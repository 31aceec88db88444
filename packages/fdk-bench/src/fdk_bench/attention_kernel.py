"""A Triton kernel for what lies between two linear layers of a step: attention of one token."""

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from fdk_bench.launches import launch_options

# Entries of one tile from which on the cache is cut into parts, and how many programs are enough.
ENOUGH_PROGRAMS = 132
LOWEST = tl.constexpr(-1e30)  # below every score, and finite: what nothing was seen with


class AttendConfig(NamedTuple):
    """How a program walks through the cache.

    A row of 128 channels takes half a warp, which keeps a softmax of its own: no warp waits for
    another before the end.

    Attributes:
        heads: of a group that a program takes at most, a power of two; others read the same keys.
        warps: of a program.
        steps: entries that half a warp reads at once.
    """

    heads: int
    warps: int
    steps: int
    ahead: bool = False


FEW, MANY = AttendConfig(1, 8, 8), AttendConfig(4, 4, 8)
HALF_WARP = 16


# keys, values :: pointers to rows of a cache, [SLOTS, HEAD_DIM]
# entry        :: [SLOTS, int32]    the first of each slot; others follow by ``beside``
@triton.jit  # type: ignore[untyped-decorator]
def load_tile(
    keys, values, entry, end, beside: tl.constexpr, STEPS: tl.constexpr, DIM: tl.constexpr
):  # type: ignore[no-untyped-def] # noqa: D103
    # Tensors of two dimensions: how one of three lies over threads differs between Triton 3.6
    # and 3.7, and the kernel took 15 us, or 255 for 64 sequences, with 3.6 (H200).
    K, V = (), ()
    for step in tl.static_range(STEPS):
        place = (entry + step * beside)[:, None]
        K += (tl.load(keys + place * DIM, mask=place < end, other=0.0),)
        V += (tl.load(values + place * DIM, mask=place < end, other=0.0),)
    return K, V


# K, V :: STEPS times [SLOTS, HEAD_DIM, dtype]
@triton.jit  # type: ignore[untyped-decorator]
def attend_tile(q, K, V, entry, end, beside: tl.constexpr, STEPS: tl.constexpr, most, weight, sums):  # type: ignore[no-untyped-def] # noqa: D103
    scores = ()
    highest = most
    for step in tl.static_range(STEPS):
        score = tl.sum(q * K[step].to(tl.float32), axis=1)  # [SLOTS]
        score = tl.where(entry + step * beside < end, score, float("-inf"))
        highest = tl.maximum(highest, score)
        scores += (score,)
    kept = tl.exp(most - highest)
    weight *= kept
    sums *= kept[:, None]
    for step in tl.static_range(STEPS):
        share = tl.exp(scores[step] - highest)
        weight += share
        sums += share[:, None] * V[step].to(tl.float32)
    return highest, weight, sums


# qkv      :: [b, 1, (heads + 2 kv_heads) * head_dim, dtype]
# turns    :: [2, length, head_dim, dtype]                 cosines and sines
# position :: [1, int64]
# cache    :: [2, b, kv_heads, length, head_dim, dtype]    keys, then values
# out      :: [b, 1, heads * head_dim, dtype]
# parts    :: [b, heads / HEADS, PARTS, HEADS, head_dim + 2, float32]    sums, highest score, weight
# arrived  :: [b, heads / HEADS, int32]                    zeros, before and after
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
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    splits: tl.constexpr = (GROUP + HEADS - 1) // HEADS  # programs of a group
    beside: tl.constexpr = SLOTS // HEADS  # entries that the slots of a head read at once
    tile: tl.constexpr = STEPS * beside
    program, b, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    kv_head, split = program // splits, program % splits
    slots, channels = tl.arange(0, SLOTS), tl.arange(0, HEAD_DIM)[None, :]
    half: tl.constexpr = HEAD_DIM // 2
    partner = (channels + half) % HEAD_DIM
    row = split * HEADS + slots // beside  # of the group, [SLOTS]
    entry = slots % beside  # of a tile
    dtype = cache.dtype.element_ty
    nothing = slots[:, None] * 0
    # Before the kernel ahead has ended: what the steps before this one have left.
    last = tl.load(position).to(tl.int32)
    turn = turns + last * HEAD_DIM + channels + nothing  # [SLOTS, HEAD_DIM], as all that follows
    cosine = tl.load(turn).to(tl.float32)
    sine = tl.load(turn + length * HEAD_DIM).to(tl.float32)
    sine = tl.where(channels < half, -sine, sine)
    keys = cache + (b * KV_HEADS + kv_head) * length * HEAD_DIM
    values = keys + values_stride
    share = tl.cdiv(tl.cdiv(last, tile), PARTS) * tile
    begin, end = part * share, tl.minimum(last, (part + 1) * share)
    key_rows, value_rows = keys + channels + nothing, values + channels + nothing
    K, V = load_tile(key_rows, value_rows, begin + entry, end, beside, STEPS, HEAD_DIM)

    if PDL:
        tl.extra.cuda.gdc_wait()
    qkv += b * (GROUP + 2) * KV_HEADS * HEAD_DIM
    q_rows = qkv + (kv_head * GROUP + row)[:, None] * HEAD_DIM
    held = (row < GROUP)[:, None]
    q = tl.load(q_rows + channels, mask=held, other=0.0).to(tl.float32) * cosine
    q += tl.load(q_rows + partner, mask=held, other=0.0).to(tl.float32) * sine
    q = q.to(dtype).to(tl.float32) * scale
    k_rows = qkv + (GROUP * KV_HEADS + kv_head) * HEAD_DIM + nothing
    k = tl.load(k_rows + channels).to(tl.float32) * cosine
    k = (k + tl.load(k_rows + partner).to(tl.float32) * sine).to(dtype)
    v = tl.load(k_rows + KV_HEADS * HEAD_DIM + channels)

    # One slot of each head has the new entry, from registers: nobody reads what is stored here.
    first = (slots % beside == 0) & (part == 0)  # [SLOTS]
    new = last * HEAD_DIM + channels + nothing
    stored = ((slots == 0) & (part == 0) & (split == 0))[:, None] & (channels < HEAD_DIM)
    tl.store(keys + new, k, mask=stored)
    tl.store(values + new, v, mask=stored)
    score = tl.sum(q * k.to(tl.float32), axis=1)
    most = tl.where(first, score, LOWEST)
    weight = tl.where(first, 1.0, 0.0)
    sums = tl.where(first[:, None], v.to(tl.float32), 0.0)  # [SLOTS, HEAD_DIM]
    if AHEAD:
        for start in range(begin, end, tile):
            next_tile = start + tile + entry
            next_K, next_V = load_tile(
                key_rows, value_rows, next_tile, end, beside, STEPS, HEAD_DIM
            )
            most, weight, sums = attend_tile(
                q, K, V, start + entry, end, beside, STEPS, most, weight, sums
            )
            K, V = next_K, next_V
    else:
        most, weight, sums = attend_tile(
            q, K, V, begin + entry, end, beside, STEPS, most, weight, sums
        )
        for start in range(begin + tile, end, tile):
            K, V = load_tile(key_rows, value_rows, start + entry, end, beside, STEPS, HEAD_DIM)
            most, weight, sums = attend_tile(
                q, K, V, start + entry, end, beside, STEPS, most, weight, sums
            )

    most = tl.reshape(most, (HEADS, beside))
    top = tl.max(most, axis=1)  # [HEADS]
    kept = tl.exp(most - top[:, None])
    weight = tl.sum(tl.reshape(weight, (HEADS, beside)) * kept, axis=1)
    sums = tl.sum(tl.reshape(sums, (HEADS, beside, HEAD_DIM)) * kept[:, :, None], axis=1)
    rows = tl.arange(0, HEADS)
    held = split * HEADS + rows < GROUP
    y = out + ((b * KV_HEADS + kv_head) * GROUP + split * HEADS) * HEAD_DIM
    if PARTS == 1:
        mine = y + rows[:, None] * HEAD_DIM + channels
        tl.store(mine, (sums / weight[:, None]).to(dtype), mask=held[:, None])
    else:
        width: tl.constexpr = HEAD_DIM + 2
        program += b * KV_HEADS * splits
        parts += program * PARTS * HEADS * width
        mine = parts + (part * HEADS + rows) * width
        tl.store(mine[:, None] + channels, sums)
        tl.store(mine + HEAD_DIM, top)
        tl.store(mine + HEAD_DIM + 1, weight)
        # Every thread's stores come before the count, which one thread adds to.
        tl.debug_barrier()
        if tl.atomic_add(arrived + program, 1, sem="acq_rel") == PARTS - 1:
            tl.debug_barrier()
            tl.store(arrived + program, 0)
            every = tl.arange(0, PADDED_PARTS)
            among = every < PARTS
            for head in tl.static_range(HEADS):
                theirs = parts + (every * HEADS + head) * width
                top_of = tl.load(theirs + HEAD_DIM, mask=among, other=LOWEST)
                weight_of = tl.load(theirs + HEAD_DIM + 1, mask=among, other=0.0)
                sums_of = tl.load(theirs[:, None] + channels, mask=among[:, None], other=0.0)
                scaled = tl.exp(top_of - tl.max(top_of, axis=0))  # [PADDED_PARTS]
                mean = tl.sum(sums_of * scaled[:, None], axis=0)
                mean /= tl.sum(weight_of * scaled, axis=0)
                place = y + head * HEAD_DIM + tl.arange(0, HEAD_DIM)
                tl.store(place, mean.to(dtype), mask=split * HEADS + head < GROUP)


def config_for(batch: int, kv_heads: int, group: int) -> AttendConfig:
    """Programs of one head each where there are few sequences, of a group where there are many."""
    if batch * kv_heads * group <= ENOUGH_PROGRAMS:
        return FEW
    return MANY._replace(heads=min(MANY.heads, triton.next_power_of_2(group)))


def parts_of(programs: int, length: int, tile: int) -> int:
    """Parts that a cache of ``length`` entries is cut into: 1, unless few programs read much."""
    return max(1, min(-(-length // tile), ENOUGH_PROGRAMS // programs))


def attend(
    qkv: Tensor,
    turns: Tensor,
    position: Tensor,
    cache: Tensor,
    *,
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
        parts: that the cache is cut into; None chooses.
        config: see ``AttendConfig``; None chooses.

    Returns:
        ``[b, 1, heads * head_dim, dtype]``.
    """
    _, b, kv_heads, length, head_dim = cache.shape
    group = qkv.shape[-1] // head_dim // kv_heads - 2
    config = config or config_for(b, kv_heads, group)
    slots = config.warps * 2
    programs = kv_heads * -(-group // config.heads)
    parts = parts or parts_of(b * programs, length, config.steps * slots // config.heads)
    out = qkv.new_empty(b, 1, kv_heads * group * head_dim)
    partial = arrived = out
    if parts > 1:
        shape = (b, programs, parts, config.heads, head_dim + 2)
        partial = qkv.new_empty(shape, dtype=torch.float32)
        arrived = _counters(qkv.device, b * programs)
    attend_kernel[programs, b, parts](
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
        HEADS=config.heads,
        SLOTS=slots,
        STEPS=config.steps,
        PARTS=parts,
        PADDED_PARTS=triton.next_power_of_2(parts),
        AHEAD=config.ahead,
        num_warps=config.warps,
        **launch_options(qkv),
    )
    return out


_kept_counters: dict[tuple[torch.device, int], Tensor] = {}


def _counters(device: torch.device, count: int) -> Tensor:
    """Zeros that the kernel leaves as zeros; made once, for a graph could not fill them again."""
    key = device, count
    if key not in _kept_counters:
        _kept_counters[key] = torch.zeros(count, dtype=torch.int32, device=device)
    return _kept_counters[key]
