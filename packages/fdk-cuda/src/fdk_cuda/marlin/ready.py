"""Calls of the small-m kernel with all made ready that depends only on the shape of x."""

from torch import Tensor

from fdk_cuda import launch_cache
from fdk_cuda.launch_cache import ALIGNMENT, Buffers
from fdk_cuda.launch_cache import MAX_KEPT as MAX_KEPT
from fdk_cuda.marlin.ops import small_m_limit
from fdk_cuda.marlin.runtime import small_launch_for


class ReadyCall(launch_cache.ReadyCall):
    """``small_linear`` for x of one shape on one GPU, without looking anything up.

    Args:
        format: of the weight, as text.
        x: the activations that it serves, and all of their shape, dtype and device.
        n: outputs.
    """

    def __init__(self, format: str, x: Tensor, n: int) -> None:
        super().__init__(x, n)
        k = x.shape[-1]
        m = x.numel() // k
        launch, fields = small_launch_for(format, x.dtype, m, n, k, self.device, False)
        # Bound: an object with ``__call__`` takes longer to call.
        self._launch = launch.bound(*fields).__call__

    def run(self, x: Tensor, bias: Tensor | None, tensors: Buffers) -> Tensor | None:
        """See ``ready.ReadyCall``. The kernel takes no bias as address 0."""
        packed, codebook = tensors["packed"], tensors["codebook"]
        x_address = x.data_ptr()
        if (
            packed.get_device() != self.device
            or codebook.dtype is not self.dtype
            or x_address % ALIGNMENT
        ):
            return None
        y = self.new_output(x)
        bias_address = 0 if bias is None else bias.data_ptr()
        addresses = packed.data_ptr(), codebook.data_ptr(), x_address, bias_address, y.data_ptr()
        self._launch(*addresses)
        return y


class ReadyCalls(launch_cache.ReadyCalls):
    """The calls that a layout has made ready."""

    def keep(self, x: Tensor, format: str, columns: int, n: int) -> None:
        """Makes the calls of the shape of x ready, where the small-m kernel takes x as it is.

        Args:
            x: activations that the op has taken.
            format: of the weight, as text.
            columns: inputs, padded as the layout pads them.
            n: outputs.
        """
        k = x.shape[-1]
        if not x.is_cuda or k != columns or n == 0:
            return
        if 0 < x.numel() <= small_m_limit(format, n, k, x.get_device()) * k:
            self.put(x, lambda: ReadyCall(format, x, n))
