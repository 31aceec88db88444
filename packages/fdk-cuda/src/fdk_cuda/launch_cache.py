"""Launches cached per input shape.

At m = 1 a call takes longer on the host than on the GPU: arguments are checked, a kernel is chosen
and its parameters are computed. All this depends on shapes and dtypes only. So a layout caches the
launch of each shape of x that it meets, and a later call fills in the addresses.

A backend says how to prepare a launch, and which addresses the kernel gets of the weight. What must
hold for a launch to be repeated is the same for every backend and is checked here.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor, empty_like
from torch.cuda import current_device

# A layout that meets more shapes than this forgets all of them and starts again.
MAX_LAUNCHES = 64
# Bytes to which x, bias and weight must be aligned: kernels read 16 at a time.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class CachedLaunch:
    """A launch for x of one shape and dtype on one GPU.

    Attributes:
        start: launches the kernel on the current stream of the GPU, which is the current one. It
            gets the addresses of the weight's tensors, then of x, of the bias (0 for none) and y.
        y: an output without memory. ``empty_like`` of it takes half the time of ``new_empty``.
        bias_shape: ``[n]``.
    """

    start: Callable[..., None]
    y: Tensor
    bias_shape: tuple[int, ...]


class LaunchCache:
    """The cached launches of one layout. Copies and pickles of a cache are empty.

    It is used only for plain calls, see ``fdk_formats.torch_internals.is_plain_call``. Arguments
    of its methods:

        x          [..., k]
        bias       [n], or None
        addresses  of the weight's tensors; not cached, for ``.data`` of a buffer may be set
        state      all else that the launch depends on: GPU and dtypes of the weight, tuning
    """

    def __init__(self) -> None:
        self._launches: dict[Hashable, CachedLaunch] = {}
        self._aligned: tuple[int, ...] = ()  # addresses that were found aligned

    def __reduce__(self) -> tuple[type["LaunchCache"], tuple[()]]:
        return type(self), ()

    def __len__(self) -> int:
        return len(self._launches)

    def launch(
        self, x: Tensor, bias: Tensor | None, addresses: tuple[int, ...], state: Hashable
    ) -> Tensor | None:
        """Runs the cached launch for a call.

        Returns:
            y, ``[..., n]``, or None for a call that the op has to run: where no launch is cached
            for it, where x or bias is not contiguous, aligned and on the current GPU, where the
            weight is not aligned, or where the bias does not fit.
        """
        device = x.get_device()
        cached = self._launches.get((x.shape, x.dtype, device, bias is None, state))
        if cached is None or current_device() != device or not x.is_contiguous():
            return None
        bias_address = 0
        if bias is not None:
            if (
                bias.dtype is not x.dtype
                or bias.get_device() != device
                or bias.shape != cached.bias_shape
                or not bias.is_contiguous()
            ):
                return None
            bias_address = bias.data_ptr()
        x_address = x.data_ptr()
        if (x_address | bias_address) % ALIGNMENT:
            return None
        if addresses != self._aligned:
            if any(address % ALIGNMENT for address in addresses):
                return None
            self._aligned = addresses
        y = empty_like(cached.y)
        cached.start(*addresses, x_address, bias_address, y.data_ptr())
        return y

    def insert(
        self,
        x: Tensor,
        bias: Tensor | None,
        y: Tensor,
        state: Hashable,
        prepare: Callable[[Tensor, Tensor | None], Callable[..., None] | None],
    ) -> None:
        """Caches the launch for calls like one that the op has just run.

        Args:
            x: activations of the call.
            bias: bias of the call.
            y: result of the call.
            state: see the class; as it was before the call.
            prepare: gets x and bias and returns ``CachedLaunch.start``, or None for a call that
                takes more than one kernel over x as it is.
        """
        key = x.shape, x.dtype, x.get_device(), bias is None, state
        # Already cached: the op ran for another reason, such as strides of x.
        if not x.is_cuda or y.numel() == 0 or key in self._launches:
            return
        start = prepare(x, bias)
        if start is None:
            return
        if len(self._launches) >= MAX_LAUNCHES:
            self._launches.clear()
        self._launches[key] = CachedLaunch(start, _without_memory(y), y.shape[-1:])


def _without_memory(y: Tensor) -> Tensor:
    """Returns a contiguous tensor of the shape, dtype and device of y that takes no memory."""
    empty = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    empty.untyped_storage().resize_(0)
    return empty
