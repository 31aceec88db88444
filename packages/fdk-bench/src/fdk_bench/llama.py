"""A small llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, a static cache."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fdk_bench.llama_ops import LlamaOps, TorchOps, TritonOps, has_kernels, rotary_table

MakeLinear = Callable[[str, int, int], nn.Module]


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
            parts = zip(("q", "k", "v"), (size.dim, kv, kv), strict=True)
            self.qkv = Beside(*(linear(f"{name}.{part}", n, size.dim) for part, n in parts))
            parts = zip(("gate", "up"), (size.ffn, size.ffn), strict=True)
            self.gate_up = Beside(*(linear(f"{name}.{part}", n, size.dim) for part, n in parts))

    def forward(
        self, x: Tensor, added: Tensor, turns: Tensor, positions: Tensor, cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Adds t tokens to the cache; the sum of both outputs is that of the block.

        The last sum is left to the next block, where it is one kernel with the norm.

        x, added                 :: [b, t, dim, dtype]    their sum is the input
        turns, positions, cache  :: see ``LlamaOps.attend``
        """
        ops = self.ops
        x, h = ops.add_norm(x, added, self.attention_norm)
        attended = ops.attend(self.qkv(h), turns, positions, cache, self.size.heads)
        x, h = ops.add_norm(x, self.o(attended), self.mlp_norm)
        return x, self.down(ops.gated(self.gate_up(h)))


class Beside(nn.Module):
    """Layers of one input, their outputs side by side."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """``x :: [..., k]``."""
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


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
        self.ops: LlamaOps = TorchOps()
        embedding = torch.randn(size.vocabulary, size.dim, device=device, dtype=dtype)
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.blocks = nn.ModuleList(
            Block(size, f"blocks.{i}", linear, fused=fused, device=device, dtype=dtype)
            for i in range(size.layers)
        )
        self.norm = norm_weight(size, device, dtype)
        self.lm_head = linear("lm_head", size.vocabulary, size.dim)
        self.prepare(1, 8)

    def prepare(self, batch: int, length: int) -> None:
        """An empty cache for so many sequences of at most ``length`` tokens."""
        size = self.size
        shape = (size.layers, 2, batch, size.kv_heads, length, size.head_dim)
        self.cache = torch.zeros(shape, device=self.device, dtype=self.dtype)
        self.turns = rotary_table(length, size.head_dim, self.device).to(self.dtype)
        self.nothing = torch.zeros(batch, 1, size.dim, device=self.device, dtype=self.dtype)
        self._prepare_ops()

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits after the last token, ``[b, vocabulary]``.

        tokens    :: [b, t, int64]
        positions :: [t, int64]    0 to t-1, or one anywhere
        """
        x = nn.functional.embedding(tokens, self.embedding)
        # Zeros that lie there: filling them anew took a step 3 us (H200).
        added = self.nothing.expand_as(x).contiguous()
        for block, cache in zip(self.blocks, self.cache, strict=True):
            x, added = block(x, added, self.turns, positions, cache)
        _, h = self.ops.add_norm(x[:, -1].contiguous(), added[:, -1].contiguous(), self.norm)
        logits: Tensor = self.lm_head(h)
        return logits

    def compile_blocks(self) -> None:
        """Takes our kernels where they run; elsewhere torch compiles a block, and all share it."""
        if has_kernels(self.device):
            ops = TritonOps(crowded=isinstance(self.blocks[0].o, nn.Linear))
            for module in (self, *self.blocks):
                module.ops = ops
            self._prepare_ops()
            return
        for block in self.blocks:
            block.compile(fullgraph=True, dynamic=False)

    def _prepare_ops(self) -> None:
        """Counters for the batch of the cache, where the kernels count."""
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
        """Of keys and values."""
        return self.cache.nbytes

    @property
    def vocabulary(self) -> int:
        """Tokens that there are."""
        return self.size.vocabulary


def norm_weight(size: LlamaSize, device: str, dtype: torch.dtype) -> nn.Parameter:
    """Ones: the factors of an RMSNorm."""
    return nn.Parameter(torch.ones(size.dim, device=device, dtype=dtype), requires_grad=False)
