"""The operations between the linear layers of a llama: RMSNorm, rotary attention, SwiGLU.

``TorchOps`` is the definition, and runs everywhere. ``TritonOps`` has a kernel for each.
"""

from importlib import util
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu


class HeadNorm(NamedTuple):
    """RMSNorm of the heads of q and k before rotary positions, as in Qwen3.

    Attributes:
        q, k: factors, ``[head_dim]``.
        eps: added to the mean square.
    """

    q: Tensor
    k: Tensor
    eps: float


class LlamaOps(Protocol):
    """The parts of a block that are not linear layers."""

    def prepare(self, batch: int, kv_heads: int, device: torch.device) -> None:
        """Allocate what calls for ``batch`` sequences share."""

    def add_norm(
        self, x: Tensor, added: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return ``x + added`` and its RMSNorm, ``[..., dim]`` each."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return ``silu(gate) * up``: ``[b, t, 2 * ffn]`` to ``[b, t, ffn]``."""

    def attend(
        self,
        qkv: Tensor,
        norm: HeadNorm | None,
        cos_sin: Tensor,
        positions: Tensor,
        cache: Tensor,
    ) -> Tensor:
        """Add one token of each sequence to the cache and attend: ``[b, 1, heads * head_dim]``.

        Args:
            qkv: ``[b, 1, (heads + 2 kv_heads) * head_dim]``.
            norm: norms of q and k, or None.
            cos_sin: ``[2, length, head_dim]``, cosines and sines of every position.
            positions: ``[b, int64]``, of the tokens; each sequence attends to those before.
            cache: ``[2, b, kv_heads, length, head_dim]``, keys and values; written in place.
        """

    def attend_prompt(
        self, qkv: Tensor, norm: HeadNorm | None, cos_sin: Tensor, start: int, cache: Tensor
    ) -> Tensor:
        """Add tokens ``start`` to ``start + t`` of prompts and attend, see ``attend``.

        Args:
            qkv: ``[b, t, (heads + 2 kv_heads) * head_dim]``.
            norm, cos_sin, cache: see ``attend``.
            start: position of the first token, the same in all sequences.
        """


class TorchOps:
    """``LlamaOps`` in torch: the definition."""

    def prepare(self, batch: int, kv_heads: int, device: torch.device) -> None:
        """See ``LlamaOps``."""

    def add_norm(
        self, x: Tensor, added: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See ``LlamaOps``."""
        x = x + added
        return x, rms_norm(x, weight.shape, weight, eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """See ``LlamaOps``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def attend(
        self,
        qkv: Tensor,
        norm: HeadNorm | None,
        cos_sin: Tensor,
        positions: Tensor,
        cache: Tensor,
    ) -> Tensor:
        """See ``LlamaOps``."""
        q, k, v = rotated(qkv, norm, cos_sin[:, positions, None, None], cache)
        b, heads, _, head_dim = q.shape
        kv_heads, length = cache.shape[2:4]
        rows = torch.arange(b, device=qkv.device)
        cache[:, rows, :, positions] = torch.stack((k, v)).squeeze(3).transpose(0, 1)
        # The heads of a group take the place of q's tokens, so that no key is repeated.
        q = q.reshape(b, kv_heads, heads // kv_heads, head_dim)
        seen = torch.arange(length, device=qkv.device) <= positions[:, None]
        mask = seen[:, None, None]
        y = scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=mask)
        return y.reshape(b, 1, -1)

    def attend_prompt(
        self, qkv: Tensor, norm: HeadNorm | None, cos_sin: Tensor, start: int, cache: Tensor
    ) -> Tensor:
        """See ``LlamaOps``."""
        stop = start + qkv.shape[1]
        q, k, v = rotated(qkv, norm, cos_sin[:, start:stop], cache)
        cache[0, :, :, start:stop], cache[1, :, :, start:stop] = k, v
        return attended_prompt(q, cache, stop)


class TritonOps:
    """``LlamaOps`` in Triton; attention within a prompt is torch's.

    Args:
        crowded: whether the linear layers fill the multiprocessors, as 16-bit ones do. Attention
            over a short cache then keeps to the kernel of parts, which needs fewer registers.

    Attributes:
        counters: of the attention kernel. Each step has its own: two streams or graphs that share
            counters would mix them.
    """

    def __init__(self, *, crowded: bool = False) -> None:
        self.crowded = crowded
        self.counters: Tensor | None = None

    def prepare(self, batch: int, kv_heads: int, device: torch.device) -> None:
        """See ``LlamaOps``."""
        from fdk_transformers.decode.attention import new_counters

        self.counters = new_counters(batch, kv_heads, device)

    def add_norm(
        self, x: Tensor, added: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See ``LlamaOps``."""
        from fdk_transformers.decode.rmsnorm_swiglu_rope import add_rmsnorm

        return add_rmsnorm(x, added, weight, eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """See ``LlamaOps``."""
        from fdk_transformers.decode.rmsnorm_swiglu_rope import swiglu

        return swiglu(gate_up)

    def attend(
        self,
        qkv: Tensor,
        norm: HeadNorm | None,
        cos_sin: Tensor,
        positions: Tensor,
        cache: Tensor,
    ) -> Tensor:
        """See ``LlamaOps``."""
        from fdk_transformers.decode import attention

        if attention.is_short(cache) and not self.crowded:
            return attention.attend_short(qkv, norm, cos_sin, positions, cache)
        return attention.attend(qkv, norm, cos_sin, positions, cache, counters=self.counters)

    def attend_prompt(
        self, qkv: Tensor, norm: HeadNorm | None, cos_sin: Tensor, start: int, cache: Tensor
    ) -> Tensor:
        """See ``LlamaOps``."""
        from fdk_transformers.decode.rmsnorm_swiglu_rope import rotate_prompt

        q = rotate_prompt(qkv, norm, cos_sin, start, cache)
        return attended_prompt(q.transpose(1, 2), cache, start + qkv.shape[1])


def has_kernels(device: torch.device) -> bool:
    """Return whether the Triton kernels run on a device."""
    return device.type == "cuda" and util.find_spec("triton") is not None


def rotated(
    qkv: Tensor, norm: HeadNorm | None, turn: Tensor, cache: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Split ``qkv :: [b, t, …]`` into q, k and v ``[b, heads, t, head_dim]``; rotate q and k.

    Args:
        qkv, norm, cache: see ``LlamaOps.attend``.
        turn: cosines and sines that broadcast over ``[2, b, heads, t, head_dim]``.
    """
    b, t, _ = qkv.shape
    kv_heads, head_dim = cache.shape[2], cache.shape[4]
    states = qkv.view(b, t, -1, head_dim).transpose(1, 2)
    q, k, v = states.split([states.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if norm is not None:
        q = rms_norm(q, norm.q.shape, norm.q, norm.eps)
        k = rms_norm(k, norm.k.shape, norm.k, norm.eps)
    return rotate(q, turn), rotate(k, turn), v


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Apply rotary positions ``turn``, cosines and sines, to ``x :: [b, heads, t, head_dim]``."""
    first, second = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat((-second, first), dim=-1) * turn[1]


def attended_prompt(q: Tensor, cache: Tensor, stop: int) -> Tensor:
    """Attend with the last tokens of a prompt to all of it.

    Args:
        q: ``[b, heads, t, head_dim]``, of tokens ``stop - t`` to ``stop``.
        cache: see ``LlamaOps.attend``.
        stop: tokens of the prompt that are in the cache.

    Returns:
        ``[b, t, heads * head_dim]``.
    """
    b, _, t, _ = q.shape
    keys, values = cache[..., :stop, :]
    if t == stop:
        y = scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
    else:
        mask = torch.ones(t, stop, dtype=torch.bool, device=q.device).tril(stop - t)
        y = scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
    return y.transpose(1, 2).reshape(b, t, -1)
