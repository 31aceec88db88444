"""What the launches of our Triton kernels for whole models have in common."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

HOPPER = 9  # the first that has programmatic dependent launch


def launch_options(x: Tensor) -> dict[str, Any]:
    """For a kernel with ``PDL``: whether it is launched before the one ahead has ended.

    Such a kernel lets the next one start at once, and waits before it touches what others write.
    """
    if x.is_cuda and _has_dependent_launch(x.get_device()):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def _has_dependent_launch(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= HOPPER
