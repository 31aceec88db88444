"""A Triton kernel that reads memory and does nothing else: the read floor of a GPU."""

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor


@dataclass(frozen=True)
class ReadConfig:
    """Words of 32 bits that a program reads, and its warps."""

    block: int
    warps: int


# Small blocks fill the machine at 1 MiB, large ones read fastest at 100.
CONFIGS = (ReadConfig(1024, 4), ReadConfig(4096, 4), ReadConfig(8192, 8), ReadConfig(16384, 8))
# A sum that random memory does not have: the store is never done, and the loads are not dropped.
NEVER = -0x5EED5EED


# data :: [size, int32]
# out  :: [1, int32]
@triton.jit  # type: ignore[untyped-decorator]
def read_kernel(data, out, size, never, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: D103
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(data + offsets, mask=offsets < size, other=0, eviction_policy="evict_first")
    total = tl.sum(words)
    tl.store(out, total, mask=total == never)


def read(data: Tensor, config: ReadConfig) -> Tensor:
    """Reads ``data :: [size, int32]`` once."""
    out = torch.empty(1, dtype=torch.int32, device=data.device)
    grid = (triton.cdiv(data.numel(), config.block),)
    read_kernel[grid](data, out, data.numel(), NEVER, BLOCK=config.block, num_warps=config.warps)
    return out
