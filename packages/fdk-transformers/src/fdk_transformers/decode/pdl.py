"""Programmatic dependent launch (PDL): a kernel starts before the previous one has ended."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

HOPPER = 9  # the first compute capability with PDL


def launch_options(x: Tensor) -> dict[str, Any]:
    """Return the launch options of a kernel with a ``PDL`` constexpr, for the device of ``x``.

    Such a kernel lets the next one start at once (``gdc_launch_dependents``) and waits
    (``gdc_wait``) before it accesses memory that other kernels write.
    """
    if x.is_cuda and _has_pdl(x.get_device()):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def _has_pdl(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= HOPPER
