"""What both kernels for attention of one token are made of: see attention_kernel.py."""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

ROWS = 16  # rows of q that a tensor core takes at least; the heads of a group are fewer
FEWEST_CHANNELS = 16  # that tl.dot takes


# turns :: [2, length, HEAD_DIM, dtype]
@triton.jit  # type: ignore[untyped-decorator]
def turn_at(turns, place, length, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: D103
    channels = tl.arange(0, HEAD_DIM)
    turn = turns + place * HEAD_DIM + channels
    cosine = tl.load(turn).to(tl.float32)
    sine = tl.load(turn + length * HEAD_DIM).to(tl.float32)
    return cosine, tl.where(channels < HEAD_DIM // 2, -sine, sine)


# position :: [1, int64]
# cache    :: [2, b, KV_HEADS, length, HEAD_DIM, dtype]
# returns  :: the place, cosines and sines [HEAD_DIM, float32], keys and values of one head
@triton.jit  # type: ignore[untyped-decorator]
def step_of(  # type: ignore[no-untyped-def] # noqa: D103
    turns,
    position,
    cache,
    length,
    values_stride,
    head,
    b,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    place = tl.load(position).to(tl.int32)
    cosine, sine = turn_at(turns, place, length, HEAD_DIM)
    keys = cache + (b * KV_HEADS + head) * length * HEAD_DIM
    return place, cosine, sine, keys, keys + values_stride


# keys, values :: [length, HEAD_DIM, dtype]    of one sequence and head
# returns      :: [BLOCK, HEAD_DIM, dtype]     both, zeros from the entry `end` on
@triton.jit  # type: ignore[untyped-decorator]
def entries_of(keys, values, seen, end, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: D103
    places = seen[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    K = tl.load(keys + places, mask=seen[:, None] < end, other=0.0)
    return K, tl.load(values + places, mask=seen[:, None] < end, other=0.0)


# qkv  :: [(GROUP + 2) * KV_HEADS * HEAD_DIM, dtype]    of one sequence
# q    :: [ROWS, HEAD_DIM, dtype]                       turned, zeros from GROUP on
# k, v :: [HEAD_DIM, dtype]                             k turned
@triton.jit  # type: ignore[untyped-decorator]
def turned_rows(  # type: ignore[no-untyped-def] # noqa: D103
    qkv,
    head,
    cosine,
    sine,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    channels, rows = tl.arange(0, HEAD_DIM), tl.arange(0, ROWS)
    partner = (channels + HEAD_DIM // 2) % HEAD_DIM
    dtype = qkv.dtype.element_ty
    q_rows = qkv + (head * GROUP + rows[:, None]) * HEAD_DIM
    held = rows[:, None] < GROUP
    q = tl.load(q_rows + channels[None, :], mask=held, other=0.0).to(tl.float32)
    swapped = tl.load(q_rows + partner[None, :], mask=held, other=0.0).to(tl.float32)
    q = (q * cosine[None, :] + swapped * sine[None, :]).to(dtype)
    k_row = qkv + (GROUP * KV_HEADS + head) * HEAD_DIM
    k = tl.load(k_row + channels).to(tl.float32) * cosine
    k = (k + tl.load(k_row + partner).to(tl.float32) * sine).to(dtype)
    v = tl.load(qkv + ((GROUP + 1) * KV_HEADS + head) * HEAD_DIM + channels)
    return q, k, v


def group_of(qkv: Tensor, cache: Tensor) -> int:
    """Heads to a key head.

    Raises:
        ValueError: for more of them, or other channels, than the kernels take.
    """
    kv_heads, head_dim = cache.shape[2], cache.shape[4]
    group = qkv.shape[-1] // head_dim // kv_heads - 2
    if group > ROWS or head_dim < FEWEST_CHANNELS or head_dim & (head_dim - 1):
        raise ValueError(
            f"attend: wanted at most {ROWS} heads to a key head and a power of two of at least "
            f"{FEWEST_CHANNELS} channels a head, got {group} and {head_dim}"
        )
    return group
