"""Layouts that synchronise after each write, needed for programmatic dependent launch (PDL)."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from fdk_formats.backends import Layout


class SyncedBuffers(nn.Module):
    """A layout for kernels launched with PDL.

    Such a kernel reads the weight before the previous kernel of the stream has ended, which may be
    the one that writes the weight. So every write (packing, a move, a copy) is waited for once.
    ``__init__`` of a subclass ends with ``synchronise``.
    """

    def synchronise(self) -> None:
        """Waits for all work on the GPUs that hold the buffers."""
        for device in {buffer.device for buffer in self.buffers() if buffer.is_cuda}:
            torch.cuda.synchronize(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Synchronises after ``to``, ``cuda`` and similar methods, which all call this."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.synchronise()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Synchronises after ``copy.deepcopy`` and unpickling, which end with this."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.synchronise()


class SyncedLayout(SyncedBuffers, Layout):
    """A layout of one weight for kernels launched with PDL."""
