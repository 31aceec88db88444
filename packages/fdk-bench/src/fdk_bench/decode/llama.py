"""A llama with a static cache: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Between the linear layers it runs torch (``TorchOps``, the definition) or the Triton kernels of
this package (``TritonOps``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import util
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from fdk_formats import QuantisedLinear

MakeLinear = Callable[[str, int, int], nn.Module]
NORM_EPS = 1e-5
ROTARY_BASE = 500_000.0


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
        """Total number of weights: blocks, embedding, output head and norms."""
        norms = (2 * self.layers + 1) * self.dim
        return self.linear_parameters + 2 * self.vocabulary * self.dim + norms


# 4b, 12b and 31b have the shapes of 1-Bit-Wonder's models (arXiv 2602.15563); 1b those of
# Llama 3.2 1B, with an output head that is not tied to the embedding.
SIZES = {
    "tiny": LlamaSize(128, 2, 4, 2, 256, vocabulary=512),
    "1b": LlamaSize(2048, 16, 32, 8, 8192),
    "4b": LlamaSize(3072, 24, 24, 8, 11264),
    "12b": LlamaSize(4096, 48, 32, 8, 14336),
    "31b": LlamaSize(6144, 60, 48, 8, 21504),
}


class LlamaOps(Protocol):
    """The parts of a block that are not linear layers."""

    def add_norm(self, x: Tensor, added: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``x + added`` and its RMSNorm, ``[..., dim]`` each."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return ``silu(gate) * up``: ``[b, t, 2 * ffn]`` to ``[b, t, ffn]``."""

    def attend(
        self, qkv: Tensor, cos_sin: Tensor, positions: Tensor, cache: Tensor, heads: int
    ) -> Tensor:
        """Add t tokens to the cache and attend: ``[b, t, heads * head_dim]``.

        Args:
            qkv: ``[b, t, (heads + 2 kv_heads) * head_dim]``.
            cos_sin: ``[2, length, head_dim]``, cosines and sines of every position.
            positions: ``[t, int64]``, 0 to t-1, or a single position.
            cache: ``[2, b, kv_heads, length, head_dim]``, keys and values; written in place.
            heads: number of heads of q.
        """


class TorchOps:
    """``LlamaOps`` in torch: the definition, and what torch.compile makes kernels of."""

    def add_norm(self, x: Tensor, added: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See ``LlamaOps``."""
        x = x + added
        return x, rms_norm(x, weight.shape, weight, NORM_EPS)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """See ``LlamaOps``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def attend(
        self, qkv: Tensor, cos_sin: Tensor, positions: Tensor, cache: Tensor, heads: int
    ) -> Tensor:
        """See ``LlamaOps``."""
        b, t, _ = qkv.shape
        kv_heads, length, head_dim = cache.shape[2:]
        turn = cos_sin[:, positions]
        split = [heads, kv_heads, kv_heads]
        q, k, v = qkv.view(b, t, -1, head_dim).transpose(1, 2).split(split, dim=1)
        q, k = rotate(q, turn), rotate(k, turn)
        # Both at once: through a view of each, torch's compiler copies the whole cache.
        cache.index_copy_(3, positions, torch.stack((k, v)))
        if t > 1:
            y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return y.transpose(1, 2).reshape(b, t, -1)
        # The heads of a group take the place of q's tokens, so that no key is repeated.
        q = q.reshape(b, kv_heads, heads // kv_heads, head_dim)
        seen = torch.arange(length, device=qkv.device) <= positions
        y = scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=seen[None, None, None, :])
        return y.reshape(b, 1, -1)


class TritonOps:
    """``LlamaOps`` in Triton: a kernel each for sum and norm, SwiGLU, and attention of one token.

    Args:
        crowded: whether the linear layers fill the multiprocessors, as 16-bit ones do. Attention
            over a short cache then keeps to the kernel of parts, which needs fewer registers.

    Attributes:
        counters: of the attention kernel. Each model has its own: two streams or graphs that share
            counters would mix them.
    """

    def __init__(self, *, crowded: bool = False) -> None:
        self.crowded = crowded
        self.counters: Tensor | None = None

    def prepare(self, batch: int, kv_heads: int, device: str) -> None:
        """Make new counters for ``batch`` sequences."""
        from fdk_bench.decode.attention import new_counters

        self.counters = new_counters(batch, kv_heads, device)

    def add_norm(self, x: Tensor, added: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See ``LlamaOps``."""
        from fdk_bench.decode.rmsnorm_swiglu_rope import add_rmsnorm

        return add_rmsnorm(x, added, weight, NORM_EPS)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """See ``LlamaOps``."""
        from fdk_bench.decode.rmsnorm_swiglu_rope import swiglu

        return swiglu(gate_up)

    def attend(
        self, qkv: Tensor, cos_sin: Tensor, positions: Tensor, cache: Tensor, heads: int
    ) -> Tensor:
        """See ``LlamaOps``; attention within a prompt is torch's."""
        from fdk_bench.decode import attention
        from fdk_bench.decode.rmsnorm_swiglu_rope import rotate_prompt

        b, t, _ = qkv.shape
        if t == 1:
            if attention.is_short(cache) and not self.crowded:
                return attention.attend_short(qkv, cos_sin, positions, cache)
            return attention.attend(qkv, cos_sin, positions, cache, counters=self.counters)
        q = rotate_prompt(qkv, cos_sin, cache, heads).transpose(1, 2)
        keys, values = cache[..., :t, :]
        y = scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).reshape(b, t, -1)


def has_kernels(device: str) -> bool:
    """Return whether the Triton kernels run on a device."""
    return torch.device(device).type == "cuda" and util.find_spec("triton") is not None


def rotary_table(length: int, head_dim: int, device: str) -> Tensor:
    """Return cosines and sines ``[2, length, head_dim]``, equal in both halves of a head."""
    powers = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.arange(length, device=device)[:, None] / ROTARY_BASE**powers
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Apply rotary positions ``turn :: [2, t, head_dim]`` to ``x :: [b, heads, t, head_dim]``."""
    first, second = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat((-second, first), dim=-1) * turn[1]


class Block(nn.Module):
    """Attention and SwiGLU, each after a norm and added to its input.

    Args:
        size: sizes of the model.
        name: dotted prefix of its layers.
        linear: makes a linear layer from its name, outputs and inputs.
        fused: whether q, k and v are one layer, and gate and up another, as servers do.
        device, dtype: device and dtype of the norms.
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
        self.ops: LlamaOps = TorchOps()
        kv = size.kv_heads * size.head_dim
        self.attention_norm = norm_weight(size, device, dtype)
        self.mlp_norm = norm_weight(size, device, dtype)
        self.o = linear(f"{name}.o", size.dim, size.dim)
        self.down = linear(f"{name}.down", size.dim, size.ffn)
        if fused:
            self.qkv = linear(f"{name}.qkv", size.dim + 2 * kv, size.dim)
            self.gate_up = linear(f"{name}.gate_up", 2 * size.ffn, size.dim)
        else:
            qkv = {"q": size.dim, "k": kv, "v": kv}
            self.qkv = Concatenated(*(linear(f"{name}.{x}", n, size.dim) for x, n in qkv.items()))
            mlp = (linear(f"{name}.{x}", size.ffn, size.dim) for x in ("gate", "up"))
            self.gate_up = Concatenated(*mlp)

    def forward(
        self, x: Tensor, added: Tensor, cos_sin: Tensor, positions: Tensor, cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add t tokens to the cache; return two tensors whose sum is the block's output.

        The next block adds them up, where that is one kernel with its norm.

        Args:
            x, added: ``[b, t, dim]``; their sum is the input.
            cos_sin, positions, cache: see ``LlamaOps.attend``.
        """
        ops = self.ops
        x, h = ops.add_norm(x, added, self.attention_norm)
        attended = ops.attend(self.qkv(h), cos_sin, positions, cache, self.size.heads)
        x, h = ops.add_norm(x, self.o(attended), self.mlp_norm)
        return x, self.down(ops.swiglu(self.gate_up(h)))


class Concatenated(nn.Module):
    """Layers of one input whose outputs are concatenated."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for ``x :: [..., k]``."""
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


class Llama(nn.Module):
    """A ``Decoder`` (see ``step``): tokens to the logits of the next, with its own cache.

    Args:
        size: see ``SIZES``.
        linear, fused: see ``Block``.
        device, dtype: device and dtype of weights and cache.
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
        self.ops: LlamaOps = TorchOps()
        table = torch.randn(size.vocabulary, size.dim, device=device, dtype=dtype)
        self.embedding = nn.Parameter(table, requires_grad=False)
        self.blocks = nn.ModuleList(
            Block(size, f"blocks.{i}", linear, fused=fused, device=device, dtype=dtype)
            for i in range(size.layers)
        )
        self.norm = norm_weight(size, device, dtype)
        self.lm_head = linear("lm_head", size.vocabulary, size.dim)
        self.prepare(1, 8)

    def prepare(self, batch: int, length: int) -> None:
        """Make an empty cache for ``batch`` sequences of at most ``length`` tokens."""
        size = self.size
        shape = (size.layers, 2, batch, size.kv_heads, length, size.head_dim)
        self.cache = torch.zeros(shape, device=self.device, dtype=self.dtype)
        self.cos_sin = rotary_table(length, size.head_dim, self.device).to(self.dtype)
        self.nothing = torch.zeros(batch, 1, size.dim, device=self.device, dtype=self.dtype)
        self._prepare_ops()

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the logits after the last token, ``[b, vocabulary]``.

        Args:
            tokens: ``[b, t, int64]``.
            positions: ``[t, int64]``, 0 to t-1, or a single position.
        """
        x = embedding(tokens, self.embedding)
        # Zeros made once: filling new ones took 3 us of a step on an H200.
        added = self.nothing.expand_as(x).contiguous()
        for block, cache in zip(self.blocks, self.cache, strict=True):
            x, added = block(x, added, self.cos_sin, positions, cache)
        _, h = self.ops.add_norm(x[:, -1].contiguous(), added[:, -1].contiguous(), self.norm)
        logits: Tensor = self.lm_head(h)
        return logits

    def compile_blocks(self) -> None:
        """Switch to the Triton kernels where they run; else compile one block for all."""
        if has_kernels(self.device):
            ops = TritonOps(crowded=not isinstance(self.blocks[0].o, QuantisedLinear))
            for module in (self, *self.blocks):
                module.ops = ops
            self._prepare_ops()
            return
        for block in self.blocks:
            block.compile(fullgraph=True, dynamic=False)

    def _prepare_ops(self) -> None:
        if isinstance(self.ops, TritonOps):
            self.ops.prepare(self.cache.shape[2], self.size.kv_heads, self.device)

    @property
    def captures_prompts(self) -> bool:
        """See ``Decoder``."""
        return self.embedding.is_cuda

    @property
    def module(self) -> nn.Module:
        """See ``Decoder``."""
        return self

    @property
    def cache_bytes(self) -> int:
        """See ``Decoder``."""
        return self.cache.nbytes

    @property
    def vocabulary(self) -> int:
        """See ``Decoder``."""
        return self.size.vocabulary


def norm_weight(size: LlamaSize, device: str, dtype: torch.dtype) -> nn.Parameter:
    """Return the factors of an RMSNorm: ones."""
    return nn.Parameter(torch.ones(size.dim, device=device, dtype=dtype), requires_grad=False)
