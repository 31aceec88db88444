"""A Triton kernel for what lies between two linear layers of a step: attention of one token."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

BLOCK = 64  # entries of the cache at a time
ROWS = 16  # rows of q that a tensor core takes at least; the heads of a group are fewer
# Entries from which on the cache is cut into parts, and how many programs are enough then.
LONG, ENOUGH_PROGRAMS = 512, 132
HOPPER = 9  # the first that has programmatic dependent launch


# qkv      :: [b, 1, (heads + 2 kv_heads) * head_dim, dtype]
# turn     :: [2, 1, head_dim, dtype]
# position :: [1, int64]
# cache    :: [2, b, kv_heads, length, head_dim, dtype]    keys, then values
# out      :: [b, 1, heads * head_dim, dtype], or [parts, b, heads, head_dim + 2, float32]
@triton.jit  # type: ignore[untyped-decorator]
def attend_kernel(  # type: ignore[no-untyped-def] # noqa: D103
    qkv,
    turn,
    position,
    cache,
    out,
    values_stride,
    sequence_stride,
    head_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        # What follows waits for this kernel before it reads its output, and may load weights now.
        tl.extra.cuda.gdc_launch_dependents()
    head, b, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    channels = tl.arange(0, HEAD_DIM)
    rows = tl.arange(0, ROWS)
    entries = tl.arange(0, BLOCK)
    half = HEAD_DIM // 2
    partner = (channels + half) % HEAD_DIM
    cosine = tl.load(turn + channels).to(tl.float32)
    sine = tl.load(turn + HEAD_DIM + channels).to(tl.float32)
    sine = tl.where(channels < half, -sine, sine)
    last = tl.load(position).to(tl.int32)
    dtype = cache.dtype.element_ty

    qkv += b * (GROUP + 2) * KV_HEADS * HEAD_DIM
    q_rows = qkv + (head * GROUP + rows[:, None]) * HEAD_DIM
    held = rows[:, None] < GROUP
    q = tl.load(q_rows + channels[None, :], mask=held, other=0.0).to(tl.float32)
    swapped = tl.load(q_rows + partner[None, :], mask=held, other=0.0).to(tl.float32)
    q = (q * cosine[None, :] + swapped * sine[None, :]).to(dtype)  # [ROWS, HEAD_DIM]
    k_row = qkv + (GROUP * KV_HEADS + head) * HEAD_DIM
    k = tl.load(k_row + channels).to(tl.float32) * cosine
    k = (k + tl.load(k_row + partner).to(tl.float32) * sine).to(dtype)
    v = tl.load(k_row + KV_HEADS * HEAD_DIM + channels)

    keys = cache + b * sequence_stride + head * head_stride
    values = keys + values_stride
    # The first part has the new entry, from registers: nobody reads what is stored in this kernel.
    first = part == 0
    tl.store(keys + last * HEAD_DIM + channels, k, mask=first & (channels < HEAD_DIM))
    tl.store(values + last * HEAD_DIM + channels, v, mask=first & (channels < HEAD_DIM))
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], axis=1) * scale  # [ROWS]
    most = tl.where(first, score, float("-inf"))
    weight = tl.where(first, tl.full([ROWS], 1.0, tl.float32), 0.0)
    sums = tl.where(first, weight[:, None] * v.to(tl.float32)[None, :], 0.0)  # [ROWS, HEAD_DIM]

    share = tl.cdiv(tl.cdiv(last, BLOCK), PARTS) * BLOCK
    end = tl.minimum(last, (part + 1) * share)
    for start in range(part * share, end, BLOCK):
        seen = start + entries
        places = seen[:, None] * HEAD_DIM + channels[None, :]
        inside = seen[:, None] < last
        K = tl.load(keys + places, mask=inside, other=0.0)  # [BLOCK, HEAD_DIM]
        V = tl.load(values + places, mask=inside, other=0.0)
        scores = tl.dot(q, K.T) * scale  # [ROWS, BLOCK]
        scores = tl.where(seen[None, :] < last, scores, float("-inf"))
        highest = tl.maximum(most, tl.max(scores, axis=1))
        kept = tl.exp(most - highest)
        weights = tl.exp(scores - highest[:, None])
        weight = weight * kept + tl.sum(weights, axis=1)
        sums = sums * kept[:, None] + tl.dot(weights.to(dtype), V)
        most = highest

    if PARTS == 1:
        y = out + (b * KV_HEADS * GROUP + head * GROUP + rows[:, None]) * HEAD_DIM
        tl.store(y + channels[None, :], (sums / weight[:, None]).to(dtype), mask=held)
    else:
        whole = (part * tl.num_programs(1) + b) * KV_HEADS * GROUP + head * GROUP
        y = out + (whole + rows[:, None]) * (HEAD_DIM + 2)
        tl.store(y + channels[None, :], sums, mask=held)
        y = out + (whole + rows) * (HEAD_DIM + 2) + HEAD_DIM
        tl.store(y, most, mask=rows < GROUP)
        tl.store(y + 1, weight, mask=rows < GROUP)


def parts_of(batch: int, kv_heads: int, length: int) -> int:
    """Parts that a cache of ``length`` entries is cut into: 1, unless few programs read much."""
    if length <= LONG:
        return 1
    return max(1, min(-(-length // BLOCK), ENOUGH_PROGRAMS // (batch * kv_heads)))


# One cache, not keys and values: of two inputs in one memory torch's compiler makes copies.
@torch.library.custom_op("fdk_bench::attend", mutates_args=("cache",))
def attend_parts(qkv: Tensor, turn: Tensor, positions: Tensor, cache: Tensor, parts: int) -> Tensor:
    """Turns q and k, adds k and v to the cache and attends; see ``attend_kernel`` for shapes.

    Returns:
        With one part y, else of each part its sums, its highest score and its weight.
    """
    _, b, kv_heads, _, head_dim = cache.shape
    out = _output(qkv, cache, parts)
    pdl = qkv.is_cuda and torch.cuda.get_device_capability(qkv.device)[0] >= HOPPER
    launch = {"launch_pdl": True} if pdl else {}
    with torch.cuda.device_of(qkv):
        attend_kernel[kv_heads, b, parts](
            qkv.contiguous(),
            turn.contiguous(),
            positions,
            cache,
            out,
            cache.stride(0),
            cache.stride(1),
            cache.stride(2),
            head_dim**-0.5,
            KV_HEADS=kv_heads,
            GROUP=qkv.shape[-1] // head_dim // kv_heads - 2,
            HEAD_DIM=head_dim,
            ROWS=ROWS,
            BLOCK=BLOCK,
            PARTS=parts,
            PDL=pdl,
            num_warps=4,
            num_stages=3,
            **launch,
        )
    return out


@attend_parts.register_fake
def _(qkv: Tensor, turn: Tensor, positions: Tensor, cache: Tensor, parts: int) -> Tensor:
    return _output(qkv, cache, parts)


def _output(qkv: Tensor, cache: Tensor, parts: int) -> Tensor:
    _, b, kv_heads, _, head_dim = cache.shape
    heads = qkv.shape[-1] // head_dim - 2 * kv_heads
    if parts == 1:
        return qkv.new_empty(b, 1, heads * head_dim)
    return qkv.new_empty(parts, b, heads, head_dim + 2, dtype=torch.float32)


def attend(qkv: Tensor, turn: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    """Attention of one token of each sequence, ``[b, 1, heads * head_dim]``."""
    _, b, kv_heads, length, head_dim = cache.shape
    parts = parts_of(b, kv_heads, length)
    found: Tensor = attend_parts(qkv, turn, positions, cache, parts)
    if parts == 1:
        return found
    sums, most, weight = found.split([head_dim, 1, 1], dim=-1)
    kept = (most - most.amax(0)).exp()
    y: Tensor = (sums * kept).sum(0) / (weight * kept).sum(0)  # [b, heads, head_dim]
    return y.view(b, 1, -1).to(qkv.dtype)
