"""Calls of ``small_kernel`` with all made ready that depends only on the shape of x."""

from torch import Tensor

from fdk_cuda import ready
from fdk_cuda.ready import ALIGNMENT, Buffers
from fdk_cuda.triton import tune
from fdk_cuda.triton.configs import SmallConfig
from fdk_cuda.triton.launch import gpu_at, launched_small
from fdk_cuda.triton.remembered import Launch
from fdk_cuda.triton.weight import Weight


class ReadyCall(ready.ReadyCall):
    """``small`` for x of one shape on one GPU, without looking anything up.

    Args:
        x: the activations that it serves, and all of their shape, dtype and device.
        w: the weight.
        launch: what ``small`` has launched for them.
        has_bias: whether that was with a bias.
    """

    def __init__(self, x: Tensor, w: Weight, launch: Launch, has_bias: bool) -> None:
        super().__init__(x, w.arrangement.n)
        self._launch, self._has_bias = launch, has_bias
        self._scale_dtype = w.scale.dtype
        self._zero_dtype = None if w.zero_point is None else w.zero_point.dtype
        self._measured = tune.times_measured()

    def addresses(self, tensors: Buffers, bias: int) -> tuple[int, ...] | None:
        """Of all but ``codebook``, in the kernel's order; no zero points are the scales again."""
        if (bias != 0) is not self._has_bias or self.is_stale():
            return None
        words, scale, zero = tensors["words"], tensors["scale"], tensors["zero_point"]
        values, lanes = tensors["values"], tensors["lanes"]
        if words is None or scale is None or values is None or lanes is None:
            return None
        if words.get_device() != self.device or scale.dtype is not self._scale_dtype:
            return None
        if zero is None:
            if self._zero_dtype is not None:
                return None
            zero = scale
        elif zero.dtype is not self._zero_dtype:
            return None
        first, second, third = words.data_ptr(), scale.data_ptr(), zero.data_ptr()
        fourth, fifth = values.data_ptr(), lanes.data_ptr()
        if (first | second | third | fourth | fifth | bias) % ALIGNMENT:
            return None
        return first, second, third, fourth, fifth

    def is_stale(self) -> bool:
        """Whether measuring may have chosen another configuration since."""
        return tune.times_measured() != self._measured

    def launch(self, addresses: tuple[int, ...], x: int, bias: int, y: int) -> None:
        """Without a bias the kernel gets x in its place, and does not read it."""
        self._launch((x, *addresses, bias or x, y), self.device)


class ReadyCalls(ready.ReadyCalls):
    """The calls that a layout has made ready."""

    def keep(self, x: Tensor, w: Weight, bias: Tensor | None) -> None:
        """Makes the calls of the shape of x ready, where ``small`` has taken x as it is.

        Args:
            x: activations that the op has taken.
            w: the weight.
            bias: of the call; others with one, or others without, are meant.
        """
        if not x.is_cuda or x.numel() == 0:
            return
        m = x.numel() // x.shape[-1]
        if m > gpu_at(x.get_device()).limits.small_m:
            return
        config = tune.choose(w, m, x.dtype, x.get_device())
        if isinstance(config, SmallConfig):
            self.put(x, lambda: self._made(x, w, bias, m, config))

    @staticmethod
    def _made(
        x: Tensor, w: Weight, bias: Tensor | None, m: int, config: SmallConfig
    ) -> ReadyCall | None:
        launch = launched_small(x.get_device(), m, x.dtype, bias is None, config, w)
        return None if launch is None else ReadyCall(x, w, launch, bias is not None)
