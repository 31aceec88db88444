"""Calls of a layer with all made ready that depends only on the shape of x."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fdk_formats.ops import (
    alike,
    depth_of_dispatch_modes,
    depth_of_function_modes,
    is_profiled,
    nothing_is_alike,
)

# Shapes of x that a layout keeps calls for; past it, it starts afresh.
MAX_KEPT = 64
# Kernels read x in pieces of so many bytes.
ALIGNMENT = 16
Buffers = Mapping[str, Any]

# Bound here: a call asks all of them. The first is True where torch.compile traces, and takes half
# of is_compiling's 0.06 us, which is True for tracers that are modes of dispatch, too.
is_traced = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_deterministic = torch._C._get_deterministic_algorithms


class ReadyCall(ABC):
    """A product for x of one shape on one GPU, without looking anything up.

    Where torch does not watch, ``__call__`` looks at x, the bias and the buffers. ``again`` does so
    by one check of what ``__call__`` has taken, torch's watching included.

    Args:
        x: the activations that it serves, and all of their shape, dtype and device.
        n: outputs.
    """

    def __init__(self, x: Tensor, n: int) -> None:
        self.device, self.dtype = x.get_device(), x.dtype
        self._n, self._y_shape = (n,), (*x.shape[:-1], n)
        self._y_strides = torch.empty(self._y_shape, device="meta").stride()
        self._current_device = torch._C._cuda_getDevice
        # What inductor's code takes its memory with, on the current device: 1.0 us of the host of
        # an H200, where new_empty takes 2.5. No version of torch promises it.
        self._empty = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
        # Of x, and of x and a bias.
        self._is_alike = self._are_alike = nothing_is_alike
        # Of the buffers, where they were aligned.
        self._addresses: tuple[int, ...] = ()

    @abstractmethod
    def run(self, x: Tensor, bias: Tensor | None, tensors: Buffers) -> Tensor | None:
        """y, for x and a bias that fit; None where x, bias or buffers are not as the kernel needs.

        It asks every buffer for its address: ``.data`` of a buffer may be set at any time.
        """

    def is_stale(self) -> bool:
        """Whether the call has to be made anew."""
        return False

    def again(self, x: Tensor, bias: Tensor | None, tensors: Buffers) -> Tensor | None:
        """``__call__`` for x and a bias alike those that it last took, and None for others.

        None, too, where torch has more to do with the call than to run it.
        """
        if bias is None:
            if not self._is_alike(x):
                return None
        elif not self._are_alike(x, bias) or (_is_grad_enabled() and bias.requires_grad):
            return None
        if (
            depth_of_dispatch_modes() > 0
            or depth_of_function_modes() > 0
            or is_profiled()
            or forward_ad._current_level >= 0
            or self._current_device() != self.device
        ):
            return None
        return self.run(x, bias, tensors)

    def __call__(self, x: Tensor, bias: Tensor | None, tensors: Buffers) -> Tensor | None:
        """y, for x of the shape it was made for; None where the op has to see to the call.

        Args:
            x: ``[..., k]``.
            bias: ``[n]`` or None.
            tensors: the buffers of the layout.
        """
        dtype, device = self.dtype, self.device
        if (
            x.dtype is not dtype
            or x.get_device() != device
            or self._current_device() != device
            or not x.is_contiguous()
        ):
            return None
        if bias is not None and (
            bias.dtype is not dtype
            or bias.get_device() != device
            or bias.shape != self._n
            or not bias.is_contiguous()
        ):
            return None
        y = self.run(x, bias, tensors)
        if y is not None and not x.requires_grad:  # with it, x alike may record a gradient
            if bias is None:
                self._is_alike = alike(x)
            else:
                self._are_alike = alike(x, bias)
        return y

    def new_output(self, x: Tensor) -> Tensor:
        """Memory for y."""
        # Deterministic torch fills what new_empty takes with NaN: torch.utils.deterministic.
        if self._empty is None or _is_deterministic():
            return x.new_empty(self._y_shape)
        y: Tensor = self._empty(self._y_shape, self._y_strides, self.dtype)
        return y


def nothing_is_ready(x: Tensor, bias: Tensor | None, tensors: Buffers) -> None:
    """In the place of a call."""


class ReadyCalls:
    """The calls that a layout has made ready, by the shape of x. Copies and pickles are empty.

    Attributes:
        again: the call that was last taken.
    """

    def __init__(self) -> None:
        self._calls: dict[torch.Size, ReadyCall] = {}
        self.again: Callable[[Tensor, Tensor | None, Buffers], Tensor | None] = nothing_is_ready

    def __reduce__(self) -> tuple[type["ReadyCalls"], tuple[()]]:
        return type(self), ()

    def get(self, x: Tensor) -> ReadyCall | None:
        """The call for the shape of x, if there is one."""
        return self._calls.get(x.shape)

    def __call__(self, x: Tensor, bias: Tensor | None, tensors: Buffers) -> Tensor | None:
        """y by the call for the shape of x, if there is one and it takes it."""
        call = self.get(x)
        if call is None:
            return None
        y = call.again(x, bias, tensors)
        if y is None:
            y = call(x, bias, tensors)
        if y is not None:
            self.again = call.again
        return y

    def put(self, x: Tensor, make: Callable[[], ReadyCall | None]) -> None:
        """Keeps the call that is made for the shape of x, if there is none and one can be made."""
        kept = self._calls.get(x.shape)
        if (
            kept is not None
            and not kept.is_stale()
            and (kept.dtype, kept.device) == (x.dtype, x.get_device())
        ):
            return  # The op saw to x for another reason, such as its strides.
        if (made := make()) is None:
            return
        if len(self._calls) >= MAX_KEPT:
            self._calls.clear()
        self._calls[x.shape] = made
