"""Calls of the small-m kernel with all made ready that depends only on the shape of x."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fdk_cuda.marlin.launches import small_launch_for
from fdk_cuda.marlin.ops import ALIGNMENT
from fdk_cuda.marlin.plan import MAX_ROWS

# Shapes of x that a layout keeps calls for; past it, it starts afresh.
MAX_KEPT = 64


class ReadyCall:
    """``small_linear`` for x of one shape on one GPU, without looking anything up.

    Args:
        format: of the weight, as text.
        x: the activations that it serves, and all of their shape, dtype and device.
        n: outputs.
    """

    def __init__(self, format: str, x: Tensor, n: int) -> None:
        *batch, k = x.shape
        self.device, self.dtype = x.get_device(), x.dtype
        self._n, self._y_shape = (n,), (*batch, n)
        self._y_strides = torch.empty(self._y_shape, device="meta").stride()
        self._current_device = torch._C._cuda_getDevice
        # What inductor's code takes its memory with, on the current device: 1.0 us of the host of
        # an H200, where new_empty takes 2.5. No version of torch promises it.
        self._empty = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
        self._is_deterministic = torch._C._get_deterministic_algorithms
        m = x.numel() // k
        launch, fields = small_launch_for(format, x.dtype, m, n, k, self.device, False)
        self._launch = launch.bound(*fields)

    def __call__(
        self, x: Tensor, bias: Tensor | None, tensors: Mapping[str, Tensor | None]
    ) -> Tensor | None:
        """y, for x of the shape it was made for; None where the op has to see to the call.

        Args:
            x: ``[..., k]``.
            bias: ``[n]`` or None.
            tensors: ``packed`` and ``codebook`` of the layout.
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
        packed, codebook, address = tensors["packed"], tensors["codebook"], x.data_ptr()
        if packed is None or codebook is None or address % ALIGNMENT:
            return None
        if packed.get_device() != device or codebook.dtype is not dtype:
            return None
        y: Tensor
        # Deterministic torch fills what new_empty takes with NaN: torch.utils.deterministic.
        if self._empty is None or self._is_deterministic():
            y = x.new_empty(self._y_shape)
        else:
            y = self._empty(self._y_shape, self._y_strides, dtype)
        self._launch(packed.data_ptr(), codebook.data_ptr(), address, bias_address, y.data_ptr())
        return y


class ReadyCalls:
    """The calls that a layout has made ready, by the shape of x. Copies and pickles are empty."""

    def __init__(self) -> None:
        self._calls: dict[torch.Size, ReadyCall] = {}

    def __reduce__(self) -> tuple[type["ReadyCalls"], tuple[()]]:
        return ReadyCalls, ()

    def get(self, x: Tensor) -> ReadyCall | None:
        """The call for the shape of x, if there is one."""
        return self._calls.get(x.shape)

    def keep(self, x: Tensor, format: str, columns: int, n: int) -> None:
        """Makes the calls of the shape of x ready, where the small-m kernel takes x as it is.

        Args:
            x: activations that the op has taken.
            format: of the weight, as text.
            columns: inputs, padded as the layout pads them.
            n: outputs.
        """
        k = x.shape[-1]
        if not x.is_cuda or not 0 < x.numel() <= MAX_ROWS * k or k != columns:
            return
        kept = self._calls.get(x.shape)
        if kept is not None and (kept.dtype, kept.device) == (x.dtype, x.get_device()):
            return  # The op saw to x for another reason, such as its strides.
        if len(self._calls) >= MAX_KEPT:
            self._calls.clear()
        self._calls[x.shape] = ReadyCall(format, x, n)
