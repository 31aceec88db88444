"""Constants that are copied to a device once."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor


@cache
def constant_on(
    device: torch.device, values: tuple[float, ...], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns a tensor of constants, ``[len(values)]``; made once, for the host waits for a copy.

    A thread of its own makes it. What rules the calling thread would spoil it for later callers:
    a memory pool, as that of a CUDA graph or that which vLLM's sleep mode empties, inference mode,
    and modes that trace.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(torch.tensor, values, dtype=dtype, device=device).result()
