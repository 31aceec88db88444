"""Layouts whose weight is there before any kernel reads it."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from fdk_formats.backends import Layout


class SettledLayout(Layout):
    """A layout for kernels that overlap with the one ahead of them in the stream.

    Such a kernel reads the weight before the one ahead has ended (programmatic dependent launch),
    and that one may be what writes the weight. So whatever writes it, packing, a move or a copy, is
    waited for once. ``__init__`` of a layout ends with ``settle``.
    """

    def settle(self) -> None:
        """Waits for all that is under way on the GPUs that hold the buffers."""
        for device in {buffer.device for buffer in self.buffers() if buffer.is_cuda}:
            torch.cuda.synchronize(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What ``to``, ``cuda`` and their like go through."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.settle()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What ``copy.deepcopy`` and unpickling end with."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.settle()
