"""A small llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, a static cache."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

MakeLinear = Callable[[str, int, int], nn.Module]
ROTARY_BASE = 500_000.0
NORM_EPS = 1e-5
# Sequences times key heads below which attention is written out; see attend_few.
FEW_HEADS = 64


@dataclass(frozen=True)
class LlamaSize:
    """Sizes of a llama; a head has ``dim / heads`` channels."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int = 128_256

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.dim // self.heads

    @property
    def linear_parameters(self) -> int:
        """Weights of the linear layers of all blocks."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        return self.layers * (attention + 3 * self.dim * self.ffn)

    @property
    def parameters(self) -> int:
        """Everything: blocks, embedding, output head and norms."""
        norms = (2 * self.layers + 1) * self.dim
        return self.linear_parameters + 2 * self.vocabulary * self.dim + norms


# 4b, 12b and 31b: the models of 1-Bit-Wonder (arXiv 2602.15563). 1b: Llama 3.2 1B, its head apart
# from its embedding.
SIZES = {
    "tiny": LlamaSize(128, 2, 4, 2, 256, vocabulary=512),
    "1b": LlamaSize(2048, 16, 32, 8, 8192),
    "4b": LlamaSize(3072, 24, 24, 8, 11264),
    "12b": LlamaSize(4096, 48, 32, 8, 14336),
    "31b": LlamaSize(6144, 60, 48, 8, 21504),
}


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, dim: int, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        ones = torch.ones(dim, device=device, dtype=dtype)
        self.weight = nn.Parameter(ones, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x :: [..., dim]``."""
        return rms_norm(x, self.weight.shape, self.weight, NORM_EPS)


class Block(nn.Module):
    """Attention and SwiGLU, each after a norm and added to its input.

    ``fused`` makes one layer of q, k and v and one of gate and up, as servers do.
    """

    def __init__(
        self,
        size: LlamaSize,
        name: str,
        linear: MakeLinear,
        *,
        fused: bool,
        device: str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.size = size
        kv = size.kv_heads * size.head_dim
        self.attention_norm = Norm(size.dim, device, dtype)
        self.mlp_norm = Norm(size.dim, device, dtype)
        self.o = linear(f"{name}.o", size.dim, size.dim)
        self.down = linear(f"{name}.down", size.dim, size.ffn)
        self.qkv_sizes, self.gate_sizes = [size.dim, kv, kv], [size.ffn, size.ffn]
        if fused:
            self.qkv = linear(f"{name}.qkv", size.dim + 2 * kv, size.dim)
            self.gate_up = linear(f"{name}.gate_up", 2 * size.ffn, size.dim)
        else:
            parts = zip(("q", "k", "v"), self.qkv_sizes, strict=True)
            self.qkv = Beside(*(linear(f"{name}.{part}", n, size.dim) for part, n in parts))
            parts = zip(("gate", "up"), self.gate_sizes, strict=True)
            self.gate_up = Beside(*(linear(f"{name}.{part}", n, size.dim) for part, n in parts))

    def forward(
        self,
        x: Tensor,
        added: Tensor,
        turn: Tensor,
        positions: Tensor,
        seen: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Adds t tokens to the cache and attends to all that are in it.

        The last sum is left to the next block, where it is one kernel with the norm.

        x, added     :: [b, t, dim, dtype]          their sum is the input
        turn         :: [2, t, head_dim, dtype]     cosines and sines of the positions
        positions    :: [t, int64]                  0 to t-1, or one anywhere
        seen         :: [length, bool]              cache entries up to that one
        keys, values :: [b, kv_heads, length, head_dim, dtype]    written in place
        """
        x = x + added
        x = x + self.o(self._attend(self.attention_norm(x), turn, positions, seen, keys, values))
        gate, up = self.gate_up(self.mlp_norm(x)).split(self.gate_sizes, dim=-1)
        return x, self.down(silu(gate) * up)

    def _attend(
        self, h: Tensor, turn: Tensor, positions: Tensor, seen: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        b, t, _ = h.shape
        size = self.size
        q, k, v = self.qkv(h).split(self.qkv_sizes, dim=-1)
        q = rotate(q.view(b, t, size.heads, size.head_dim).transpose(1, 2), turn)
        k = rotate(k.view(b, t, size.kv_heads, size.head_dim).transpose(1, 2), turn)
        v = v.view(b, t, size.kv_heads, size.head_dim).transpose(1, 2)
        keys.index_copy_(2, positions, k)
        values.index_copy_(2, positions, v)
        if t > 1:
            y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return y.transpose(1, 2).reshape(b, t, size.dim)
        # The heads of a group stand where the tokens of q would, so that no key is repeated.
        q = q.view(b, size.kv_heads, size.heads // size.kv_heads, size.head_dim)
        if b * size.kv_heads < FEW_HEADS:
            y = attend_few(q, keys, values, seen)
        else:
            y = scaled_dot_product_attention(q, keys, values, attn_mask=seen[None, None, None, :])
        result: Tensor = y.reshape(b, 1, size.dim)
        return result


class Beside(nn.Module):
    """Layers of one input, their outputs side by side."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """``x :: [..., k]``."""
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


def attend_few(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Attention of one token as sums over channels and entries, which a compiler spreads out.

    torch's kernel has a program for each sequence and head: 8 for this model at batch 1, of the
    132 that an H200 runs at once.

    q            :: [b, kv_heads, heads per key, head_dim, dtype]
    keys, values :: [b, kv_heads, length, head_dim, dtype]
    seen         :: [length, bool]
    """
    scores = (q[:, :, :, None].float() * keys[:, :, None].float()).sum(-1)
    scores = (scores / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1)  # [b, kv_heads, heads per key, length]
    y: Tensor = (weights[..., None] * values[:, :, None].float()).sum(-2)
    return y.to(q.dtype)


class Llama(nn.Module):
    """Tokens in, the next tokens out (greedy); the cache is its own.

    Args:
        size: see ``SIZES``.
        linear: makes each linear layer from its dotted name, outputs and inputs.
        fused: see ``Block``.
    """

    def __init__(
        self,
        size: LlamaSize,
        linear: MakeLinear,
        *,
        device: str,
        dtype: torch.dtype,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.size, self.device, self.dtype = size, device, dtype
        embedding = torch.randn(size.vocabulary, size.dim, device=device, dtype=dtype)
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.blocks = nn.ModuleList(
            Block(size, f"blocks.{i}", linear, fused=fused, device=device, dtype=dtype)
            for i in range(size.layers)
        )
        self.norm = Norm(size.dim, device, dtype)
        self.lm_head = linear("lm_head", size.vocabulary, size.dim)
        self.prepare(1, 8)

    def prepare(self, batch: int, length: int) -> None:
        """An empty cache for so many sequences of at most ``length`` tokens."""
        size = self.size
        shape = (size.layers, 2, batch, size.kv_heads, length, size.head_dim)
        self.cache = torch.zeros(shape, device=self.device, dtype=self.dtype)
        self.turns = rotary_table(length, size.head_dim, self.device).to(self.dtype)
        self.entries = torch.arange(length, device=self.device)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits after the last token, ``[b, vocabulary]``.

        tokens    :: [b, t, int64]
        positions :: [t, int64]    0 to t-1, or one anywhere
        """
        x = self.embedding[tokens]
        turn = self.turns[:, positions]
        seen = self.entries <= positions[-1]
        added = torch.zeros_like(x)
        for block, (keys, values) in zip(self.blocks, self.cache, strict=True):
            x, added = block(x, added, turn, positions, seen, keys, values)
        return self.head(x[:, -1] + added[:, -1])

    def head(self, x: Tensor) -> Tensor:
        """The last norm and the output head."""
        logits: Tensor = self.lm_head(self.norm(x))
        return logits

    def compile_blocks(self) -> None:
        """Compiles a block; all of them share the code."""
        for block in self.blocks:
            block.compile(fullgraph=True, dynamic=False)

    @property
    def cache_bytes(self) -> int:
        """Of keys and values."""
        return self.cache.nbytes

    @property
    def vocabulary(self) -> int:
        """Tokens that there are."""
        return self.size.vocabulary


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
