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

    It is made in a new thread, because the calling one may be in a state that a later caller is
    not: allocating from a memory pool that is freed or emptied (of a CUDA graph, or in vLLM's sleep
    mode), in inference mode, or tracing.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(torch.tensor, values, dtype=dtype, device=device).result()
