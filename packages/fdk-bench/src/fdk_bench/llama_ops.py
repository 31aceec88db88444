"""What a llama computes between its linear layers: by torch, and by Triton kernels of ours."""

from importlib import util
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

NORM_EPS = 1e-5
ROTARY_BASE = 500_000.0


class LlamaOps(Protocol):
    """The parts of a block that are no linear layers."""

    def add_norm(self, x: Tensor, added: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """``x + added`` and its RMSNorm, ``[..., dim]`` each."""

    def gated(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up``: ``[b, t, 2 * ffn]`` to ``[b, t, ffn]``."""

    def attend(
        self, qkv: Tensor, turns: Tensor, positions: Tensor, cache: Tensor, heads: int
    ) -> Tensor:
        """Adds t tokens to the cache; what each finds in it, ``[b, t, heads * head_dim]``.

        qkv       :: [b, t, (heads + 2 kv_heads) * head_dim, dtype]
        turns     :: [2, length, head_dim, dtype]    cosines and sines of every position
        positions :: [t, int64]                      0 to t-1, or one anywhere
        cache     :: [2, b, kv_heads, length, head_dim, dtype]    keys, values; written in place
        """


class TorchOps:
    """In torch: the definition, and what torch.compile makes kernels of."""

    def add_norm(self, x: Tensor, added: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See ``LlamaOps``."""
        x = x + added
        return x, rms_norm(x, weight.shape, weight, NORM_EPS)

    def gated(self, gate_up: Tensor) -> Tensor:
        """See ``LlamaOps``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def attend(
        self, qkv: Tensor, turns: Tensor, positions: Tensor, cache: Tensor, heads: int
    ) -> Tensor:
        """See ``LlamaOps``."""
        b, t, _ = qkv.shape
        kv_heads, length, head_dim = cache.shape[2:]
        turn = turns[:, positions]
        split = [heads, kv_heads, kv_heads]
        q, k, v = qkv.view(b, t, -1, head_dim).transpose(1, 2).split(split, dim=1)
        q, k = rotate(q, turn), rotate(k, turn)
        # Both at once: through a view of each, torch's compiler copies the whole cache.
        cache.index_copy_(3, positions, torch.stack((k, v)))
        if t > 1:
            y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return y.transpose(1, 2).reshape(b, t, -1)
        # The heads of a group stand where the tokens of q would, so that no key is repeated.
        q = q.reshape(b, kv_heads, heads // kv_heads, head_dim)
        seen = torch.arange(length, device=qkv.device) <= positions
        y = scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=seen[None, None, None, :])
        return y.reshape(b, 1, -1)


class TritonOps:
    """Kernels of ours: one each for a sum with its norm, SwiGLU, and attention of one token.

    Args:
        crowded: whether the linear layers leave the processors no room, as ours of 16 bits do.

    Attributes:
        counters: of attention; a model's own, for those of two streams or graphs would mix.
    """

    def __init__(self, *, crowded: bool = False) -> None:
        self.crowded = crowded
        self.counters: Tensor | None = None

    def prepare(self, batch: int, kv_heads: int, device: str) -> None:
        """Counters for so many sequences; those of before go, as a cache does."""
        from fdk_bench.attention_kernel import new_counters

        self.counters = new_counters(batch, kv_heads, device)

    def add_norm(self, x: Tensor, added: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See ``LlamaOps``."""
        from fdk_bench.block_kernels import add_norm

        return add_norm(x, added, weight, NORM_EPS)

    def gated(self, gate_up: Tensor) -> Tensor:
        """See ``LlamaOps``."""
        from fdk_bench.block_kernels import gated

        return gated(gate_up)

    def attend(
        self, qkv: Tensor, turns: Tensor, positions: Tensor, cache: Tensor, heads: int
    ) -> Tensor:
        """See ``LlamaOps``; a prompt's attention is torch's."""
        from fdk_bench.attention_kernel import attend
        from fdk_bench.block_kernels import rotate_prompt
        from fdk_bench.short_attention_kernel import attend_short, is_short

        b, t, _ = qkv.shape
        if t == 1:
            if is_short(cache) and not self.crowded:
                return attend_short(qkv, turns, positions, cache)
            return attend(qkv, turns, positions, cache, counters=self.counters)
        q = rotate_prompt(qkv, turns, cache, heads).transpose(1, 2)
        keys, values = cache[..., :t, :]
        y = scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).reshape(b, t, -1)


def has_kernels(device: str) -> bool:
    """Whether ``TritonOps`` runs there."""
    return torch.device(device).type == "cuda" and util.find_spec("triton") is not None


def rotary_table(length: int, head_dim: int, device: str) -> Tensor:
    """Cosines and sines, ``[2, length, head_dim]``, both halves of a head turned alike."""
    powers = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.arange(length, device=device)[:, None] / ROTARY_BASE**powers
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary positions of ``x :: [b, heads, t, head_dim]``; ``turn :: [2, t, head_dim]``."""
    first, second = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat((-second, first), dim=-1) * turn[1]
