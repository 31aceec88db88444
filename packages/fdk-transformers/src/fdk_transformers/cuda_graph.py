"""Calls as CUDA graphs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

WARM_CALLS = 3  # Triton compiles and tunes, and cuBLAS allocates, before the capture


class CallGraph:
    """A call without arguments that is replayed as one CUDA graph.

    Args:
        call: reads and writes tensors whose addresses stay the same.
        device: device of the tensors.
        counters: tensors that each call advances. Warm calls before the capture leave them, and
            may write what the next call overwrites.

    Raises:
        RuntimeError: where the call synchronises with the device, which a graph cannot.
    """

    def __init__(
        self, call: Callable[[], Any], device: torch.device, counters: Sequence[Tensor]
    ) -> None:
        before = [counter.clone() for counter in counters]
        for _ in range(WARM_CALLS):
            call()
            for counter, value in zip(counters, before, strict=True):
                counter.copy_(value)
        # The call is not kept: it may own the graph, and both would outlive their last user.
        self._replay, self._result = record(call, device)

    def __call__(self) -> Any:
        """Return the call's result, which the next replay overwrites."""
        self._replay()
        return self._result


def is_captured(device: torch.device) -> bool:
    """Return whether calls on a device are captured."""
    return device.type == "cuda"


def record(call: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Capture a call on a GPU: return the replay, and the result that it overwrites."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = call()
    return graph.replay, result
