"""Triton kernels of a llama block: residual sum with RMSNorm, SwiGLU, rotary positions."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from fdk_transformers.decode.attention import norm_arguments, turned
from fdk_transformers.decode.llama_ops import HeadNorm
from fdk_transformers.decode.pdl import launch_options

NORM_CHANNELS = 512  # per warp
GATE_BLOCK = 1024  # channels per program
HEADS_AT_ONCE = 8


# x, added, out, normed :: [rows, dim, dtype]    out is x + added
# weight                :: [dim, dtype]
@triton.jit  # type: ignore[untyped-decorator]
def add_norm_kernel(  # type: ignore[no-untyped-def] # noqa: D103
    x,
    added,
    weight,
    out,
    normed,
    eps,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    channels = tl.arange(0, BLOCK)
    inside = channels < DIM
    places = tl.program_id(0).to(tl.int64) * DIM + channels
    factors = tl.load(weight + channels, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + places, mask=inside, other=0.0)
    values += tl.load(added + places, mask=inside, other=0.0)
    tl.store(out + places, values, mask=inside)
    values = values.to(tl.float32)
    mean = tl.sum(values * values, axis=0) / DIM
    y = values * tl.rsqrt(mean + eps) * factors
    tl.store(normed + places, y.to(normed.dtype.element_ty), mask=inside)


def add_rmsnorm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``x + added`` and its RMSNorm, both ``[..., dim]`` as ``x``."""
    dim = x.shape[-1]
    out, normed = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(dim)
    add_norm_kernel[(x.numel() // dim,)](
        x,
        added,
        weight,
        out,
        normed,
        eps,
        DIM=dim,
        BLOCK=block,
        num_warps=max(1, min(16, block // NORM_CHANNELS)),
        **launch_options(x),
    )
    return out, normed


# gate_up :: [rows, 2 * ffn, dtype]
# out     :: [rows, ffn, dtype]
@triton.jit  # type: ignore[untyped-decorator]
def gated_kernel(gate_up, out, FFN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: D103
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < FFN
    row = tl.program_id(0).to(tl.int64)
    gate_up += row * 2 * FFN
    if PDL:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up + channels, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + FFN + channels, mask=inside, other=0.0)
    # Round as torch does after silu, which is a separate op there.
    gate = (gate * tl.sigmoid(gate)).to(up.dtype)
    tl.store(out + row * FFN + channels, gate * up, mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``: ``[..., 2 * ffn]`` to ``[..., ffn]``."""
    ffn = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], ffn)
    gated_kernel[(out.numel() // ffn, triton.cdiv(ffn, GATE_BLOCK))](
        gate_up, out, FFN=ffn, BLOCK=GATE_BLOCK, num_warps=4, **launch_options(gate_up)
    )
    return out


# qkv      :: [b, t, (heads + 2 kv_heads) * head_dim, dtype]
# q_weight :: [head_dim, dtype]                             k_weight too; used if NORM
# cos_sin  :: [2, length, head_dim, dtype]
# cache    :: [2, b, kv_heads, length, head_dim, dtype]     keys, then values
# q        :: [b, t, heads, head_dim, dtype]
@triton.jit  # type: ignore[untyped-decorator]
def rotate_kernel(  # type: ignore[no-untyped-def] # noqa: D103
    qkv,
    q_weight,
    k_weight,
    eps,
    cos_sin,
    cache,
    q,
    tokens,
    start,
    length,
    values_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    b, place = row // tokens, start + row % tokens
    heads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    channels = tl.arange(0, HEAD_DIM)
    half: tl.constexpr = HEAD_DIM // 2
    partner = (channels + half) % HEAD_DIM
    qkv += row * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    inside = heads < HEADS + 2 * KV_HEADS
    cosine = tl.load(cos_sin + place * HEAD_DIM + channels).to(tl.float32)
    sine = tl.load(cos_sin + (length + place) * HEAD_DIM + channels).to(tl.float32)
    sine = tl.where(channels < half, -sine, sine)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(qkv + heads * HEAD_DIM + channels[None, :], mask=inside, other=0.0)
    swapped = tl.load(qkv + heads * HEAD_DIM + partner[None, :], mask=inside, other=0.0)
    dtype: tl.constexpr = qkv.dtype.element_ty
    y = x.to(tl.float32)
    swapped = swapped.to(tl.float32)
    turned_q = turned(y, swapped, q_weight, eps, channels, partner, cosine, sine, dtype, NORM)
    turned_k = turned_q
    if NORM:
        turned_k = turned(y, swapped, k_weight, eps, channels, partner, cosine, sine, dtype, NORM)
    tl.store(q + (row * HEADS + heads) * HEAD_DIM + channels[None, :], turned_q, mask=heads < HEADS)
    kv = heads - HEADS
    keys = cache + ((b * KV_HEADS + kv) * length + place) * HEAD_DIM + channels[None, :]
    tl.store(keys, turned_k, mask=(kv >= 0) & (kv < KV_HEADS))
    values = keys - KV_HEADS * length * HEAD_DIM + values_stride
    tl.store(values, x, mask=(kv >= KV_HEADS) & inside)


def rotate_prompt(
    qkv: Tensor, norm: HeadNorm | None, cos_sin: Tensor, start: int, cache: Tensor
) -> Tensor:
    """Rotate q and k of tokens of prompts and write k and v to the cache.

    Args:
        qkv: ``[b, t, (heads + 2 kv_heads) * head_dim]``, of tokens ``start`` to ``start + t``.
        norm: norms of q and k, or None.
        cos_sin: ``[2, length, head_dim]``, cosines and sines of every position.
        start: position of the first token.
        cache: ``[2, b, kv_heads, length, head_dim]``, keys and values; written in place.

    Returns:
        q, ``[b, t, heads, head_dim, dtype]``.
    """
    b, t, _ = qkv.shape
    _, _, kv_heads, length, head_dim = cache.shape
    heads = qkv.shape[-1] // head_dim - 2 * kv_heads
    q = qkv.new_empty(b, t, heads, head_dim)
    rotate_kernel[(b * t, triton.cdiv(heads + 2 * kv_heads, HEADS_AT_ONCE))](
        qkv,
        *norm_arguments(norm, qkv),
        cos_sin,
        cache,
        q,
        t,
        start,
        length,
        cache.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK=HEADS_AT_ONCE,
        NORM=norm is not None,
        num_warps=4,
        **launch_options(qkv),
    )
    return q
