"""Calls of a layer with all made ready that depends only on the shape of x."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

# Shapes of x that a layout keeps calls for; past it, it starts afresh.
MAX_KEPT = 64
# Kernels read x in pieces of so many bytes.
ALIGNMENT = 16
Buffers = Mapping[str, Tensor | None]


class ReadyCall(ABC):
    """A product for x of one shape on one GPU, without looking anything up.

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
        self._is_deterministic = torch._C._get_deterministic_algorithms

    @abstractmethod
    def addresses(self, tensors: Buffers, bias: int) -> tuple[int, ...] | None:
        """Of a layout's buffers, as ``launch`` takes them.

        None where they, or the address of a bias or 0, are not what the call was made for.
        """

    def is_stale(self) -> bool:
        """Whether the call has to be made anew."""
        return False

    @abstractmethod
    def launch(self, addresses: tuple[int, ...], x: int, bias: int, y: int) -> None:
        """Launches on the current stream, with the address of a bias or 0."""

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
        bias_address = 0
        if bias is not None:
            if (
                bias.dtype is not dtype
                or bias.get_device() != device
                or bias.shape != self._n
                or not bias.is_contiguous()
            ):
                return None
            bias_address = bias.data_ptr()
        address, addresses = x.data_ptr(), self.addresses(tensors, bias_address)
        if addresses is None or address % ALIGNMENT:
            return None
        y: Tensor
        # Deterministic torch fills what new_empty takes with NaN: torch.utils.deterministic.
        if self._empty is None or self._is_deterministic():
            y = x.new_empty(self._y_shape)
        else:
            y = self._empty(self._y_shape, self._y_strides, dtype)
        self.launch(addresses, address, bias_address, y.data_ptr())
        return y


class ReadyCalls:
    """The calls that a layout has made ready, by the shape of x. Copies and pickles are empty."""

    def __init__(self) -> None:
        self._calls: dict[torch.Size, ReadyCall] = {}

    def __reduce__(self) -> tuple[type["ReadyCalls"], tuple[()]]:
        return type(self), ()

    def get(self, x: Tensor) -> ReadyCall | None:
        """The call for the shape of x, if there is one."""
        return self._calls.get(x.shape)

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
