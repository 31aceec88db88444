"""Calls of ``gemv_kernel`` with all made ready that depends only on the shape of x."""

from functools import reduce
from operator import or_

from torch import Tensor

from fdk_cuda import launch_cache
from fdk_cuda.launch_cache import ALIGNMENT, Buffers
from fdk_cuda.triton import autotune
from fdk_cuda.triton.configs import GemvConfig
from fdk_cuda.triton.launch import gpu_at, launched_gemv
from fdk_cuda.triton.packed_weight import PackedWeight
from fdk_cuda.triton.remembered import Launch


class ReadyCall(launch_cache.ReadyCall):
    """``small`` for x of one shape on one GPU, without looking anything up.

    Args:
        x: the activations that it serves, and all of their shape, dtype and device.
        w: the weight.
        launch: what ``small`` has launched for them.
        has_bias: whether that was with a bias.
    """

    def __init__(self, x: Tensor, w: PackedWeight, launch: Launch, has_bias: bool) -> None:
        super().__init__(x, w.layout.n)
        # Bound: an object with ``__call__`` takes longer to call.
        self._launch, self._has_bias = launch.__call__, has_bias
        self._scale_dtype = w.scale.dtype
        self._zero_dtype = None if w.zero_point is None else w.zero_point.dtype
        self._measured = autotune.times_measured

    def run(self, x: Tensor, bias: Tensor | None, tensors: Buffers) -> Tensor | None:
        """See ``ready.ReadyCall``. The kernel takes all buffers but ``codebook``."""
        if autotune.times_measured != self._measured or (bias is not None) is not self._has_bias:
            return None
        words, scale, zero = tensors["words"], tensors["scale"], tensors["zero_point"]
        # No zero points are the scales again.
        first, second = words.data_ptr(), scale.data_ptr()
        third = second if zero is None else zero.data_ptr()
        fourth, fifth = tensors["values"].data_ptr(), tensors["lanes"].data_ptr()
        addresses = first, second, third, fourth, fifth
        if addresses != self._addresses:
            if reduce(or_, addresses) % ALIGNMENT:
                return None
            self._addresses = addresses
        # Asked of each call: memory that is given back may come for another.
        if words.get_device() != self.device or scale.dtype is not self._scale_dtype:
            return None
        if (None if zero is None else zero.dtype) is not self._zero_dtype:
            return None
        x_address = x.data_ptr()
        # Without a bias the kernel gets x in its place, and does not read it.
        bias_address = x_address if bias is None else bias.data_ptr()
        if (x_address | bias_address) % ALIGNMENT:
            return None
        y = self.new_output(x)
        arguments = x_address, first, second, third, fourth, fifth, bias_address, y.data_ptr()
        self._launch(arguments, self.device)
        return y

    def is_stale(self) -> bool:
        """Whether measuring may have chosen another configuration since."""
        return autotune.times_measured != self._measured


class ReadyCalls(launch_cache.ReadyCalls):
    """The calls that a layout has made ready."""

    def keep(self, x: Tensor, w: PackedWeight, bias: Tensor | None) -> None:
        """Makes the calls of the shape of x ready, where ``small`` has taken x as it is.

        Args:
            x: activations that the op has taken.
            w: the weight.
            bias: of the call; others with one, or others without, are meant.
        """
        if not x.is_cuda or x.numel() == 0:
            return
        m = x.numel() // x.shape[-1]
        if m > gpu_at(x.get_device()).limits.gemv_m:
            return
        measured = autotune.times_measured
        config = autotune.choose(w, m, x.dtype, x.get_device())
        if isinstance(config, GemvConfig):
            self.put(x, lambda: self._made(x, w, bias, m, config, measured))

    @staticmethod
    def _made(
        x: Tensor, w: PackedWeight, bias: Tensor | None, m: int, config: GemvConfig, measured: int
    ) -> ReadyCall | None:
        launch = launched_gemv(x.get_device(), m, x.dtype, bias is None, config, w)
        if launch is None:
            return None
        call = ReadyCall(x, w, launch, bias is not None)
        # Another thread may have measured since the configuration was chosen.
        return call if autotune.times_measured == measured else None
