"""A Triton kernel for attention of one token over a short cache: all of it on its way at once.

A key head is one program: no parts, and so nothing to wait for but the kernel ahead. The keys are
where the tensor cores want them before that one has ended.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from fdk_bench.attention_parts import ROWS, entries_of, group_of, step_of, turned_rows
from fdk_bench.launches import launch_options

BLOCK, WARPS = 64, 8
MOST_BLOCKS = 4  # that registers have room for
MOST_PROGRAMS = 32


# See attend_kernel for the tensors; K :: [BLOCK, HEAD_DIM, dtype], and so is V.
@triton.jit  # type: ignore[untyped-decorator]
def attend_short_kernel(  # type: ignore[no-untyped-def] # noqa: D103
    qkv,
    turns,
    position,
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
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channels, rows, entries = tl.arange(0, HEAD_DIM), tl.arange(0, ROWS), tl.arange(0, BLOCK)
    dtype = cache.dtype.element_ty
    # Before the kernel ahead has ended: what the steps before this one have left.
    last, cosine, sine, keys, values = step_of(
        turns, position, cache, length, values_stride, head, b, KV_HEADS, HEAD_DIM
    )
    K, V = (), ()
    for i in tl.static_range(BLOCKS):
        of_block = entries_of(keys, values, i * BLOCK + entries, last, HEAD_DIM)
        K += (of_block[0],)  # type: ignore[assignment]
        V += (of_block[1],)  # type: ignore[assignment]

    if PDL:
        tl.extra.cuda.gdc_wait()
    qkv += b * (GROUP + 2) * KV_HEADS * HEAD_DIM
    q, k, v = turned_rows(qkv, head, cosine, sine, KV_HEADS, GROUP, HEAD_DIM, ROWS)
    tl.store(keys + last * HEAD_DIM + channels, k)
    tl.store(values + last * HEAD_DIM + channels, v)

    # The new entry comes from registers: nobody reads what is stored in this kernel.
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], axis=1) * scale  # [ROWS]
    scores = ()
    most = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
    for i in tl.static_range(BLOCKS):
        product = tl.dot(q, K[i].T, input_precision="ieee") * scale  # [ROWS, BLOCK]
        product = tl.where((i * BLOCK + entries < last)[None, :], product, float("-inf"))
        most = tl.maximum(most, product)
        scores += (product,)  # type: ignore[assignment]
    highest = tl.maximum(tl.max(most, axis=1), score)
    own = tl.exp(score - highest)
    weights = tl.zeros([ROWS, BLOCK], tl.float32)
    y = own[:, None] * v.to(tl.float32)[None, :]  # [ROWS, HEAD_DIM]
    for i in tl.static_range(BLOCKS):
        weight = tl.exp(scores[i] - highest[:, None])
        weights += weight
        y += tl.dot(weight.to(dtype), V[i], input_precision="ieee")
    y /= (tl.sum(weights, axis=1) + own)[:, None]
    mine = out + ((b * KV_HEADS + head) * GROUP + rows[:, None]) * HEAD_DIM + channels[None, :]
    tl.store(mine, y.to(dtype), mask=rows[:, None] < GROUP)


def is_short(cache: Tensor) -> bool:
    """Whether ``attend_short`` is for a cache ``[2, b, kv_heads, length, head_dim]``."""
    _, b, kv_heads, length, _ = cache.shape
    # 256 entries of 128 channels take 68 KiB of shared memory, of float32 264: an H200 has 227.
    fits = length <= BLOCK * MOST_BLOCKS and cache.itemsize == 2
    return fits and b * kv_heads <= MOST_PROGRAMS


def attend_short(qkv: Tensor, turns: Tensor, position: Tensor, cache: Tensor) -> Tensor:
    """``attend`` of attention_kernel.py for a cache of at most ``BLOCK * MOST_BLOCKS`` entries.

    Raises:
        ValueError: see ``group_of``.
    """
    _, b, kv_heads, length, head_dim = cache.shape
    group = group_of(qkv, cache)
    out = qkv.new_empty(b, 1, kv_heads * group * head_dim)
    attend_short_kernel[kv_heads, b](
        qkv,
        turns,
        position,
        cache,
        out,
        length,
        cache.stride(0),
        head_dim**-0.5,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        ROWS=ROWS,
        BLOCK=BLOCK,
        BLOCKS=triton.cdiv(length, BLOCK),
        num_warps=WARPS,
        **launch_options(qkv),
    )
    return out
