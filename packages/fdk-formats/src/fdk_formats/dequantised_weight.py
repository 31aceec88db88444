"""``layer.weight`` of a quantised layer: a tensor that is dequantised where it is used."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fdk_formats.torch_internals import (
    in_place_version,
    map_tensors,
    tensor_without_memory,
    without_torch_function,
)

if TYPE_CHECKING:
    from fdk_formats.quantised_module import QuantisedModule


class DequantisedWeight(Tensor):
    """The dequantised weight ``[n, k]`` of a layer, in the layer's dtype and on its device.

    Dtype, device and sizes cost nothing. Any other use dequantises the whole weight, once for each
    use, and keeps no copy. Writing to it (``weight.data = ...``, ``weight += ...``,
    ``weight.copy_(...)``) assigns to ``layer.weight``, which quantises the result again and loses
    precision. Its rows and views are copies: writing to them changes nothing. It has no gradient:
    the quantised weight is constant.

    Attributes:
        layer: the layer.
    """

    layer: "QuantisedModule"
    # nn.Parameter's instance check, as for the weight of nn.Linear.
    _is_param = True
    # transformers draws random values into weights without this mark after it has loaded a model.
    _is_hf_initialized = True

    @classmethod
    def of(cls, layer: "QuantisedModule") -> "DequantisedWeight":
        """Makes the weight of a layer."""
        own: Any = tensor_without_memory(cls, layer.weight_shape, layer.dtype, layer.device)
        own.layer = layer
        return own  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        own = args[0] if args and isinstance(args[0], DequantisedWeight) else None
        if func in _METADATA:
            with without_torch_function():
                return func(*args, **kwargs)
        if func in _SAME or (func == _SET_DATA and args[1] is own):
            return own
        if func == _SET_DATA:
            assert own is not None
            own.layer.weight = args[1]
            return None
        copies: list[tuple[DequantisedWeight, Tensor, object]] = []

        def copy(weight: DequantisedWeight) -> Tensor:
            plain = _plain(weight)
            copies.append((weight, plain, in_place_version(plain)))
            return plain

        args, kwargs = map_tensors(DequantisedWeight, copy, (args, kwargs))
        result = func(*args, **kwargs)
        for weight, plain, version in copies:
            if in_place_version(plain) != version:
                weight.layer.weight = plain
                result = weight if result is plain else result
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable:
            raise TypeError(
                f"{func} cannot write to a dequantised weight: assign to layer.weight, which "
                f"quantises it again"
            )
        args, kwargs = map_tensors(DequantisedWeight, _plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DequantisedWeight({_plain(self)}, format={self.layer.format})"


def _plain(weight: DequantisedWeight) -> Tensor:
    with torch.inference_mode(False):  # inference tensors do not count changes in place
        return weight.layer.dequantise()


def _getters(*names: str) -> tuple[Any, ...]:
    return tuple(getattr(Tensor, name).__get__ for name in names)


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_METADATA = frozenset(
    (
        *_getters("dtype", "device", "shape", "ndim", "layout", "requires_grad", "grad", "grad_fn"),
        *_getters(
            "is_leaf", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_cpu", "itemsize"
        ),
        *_getters("nbytes"),
        *(
            Tensor.size,
            Tensor.dim,
            Tensor.numel,
            Tensor.nelement,
            Tensor.element_size,
            Tensor.stride,
        ),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.get_device),
        *(torch.is_floating_point, torch.is_complex, torch.is_signed, torch.numel),
        *(Tensor.__len__, Tensor.__hash__, Tensor.is_inference, Tensor.is_signed),
    )
)
# ``data`` is another name of the weight; flags of gradients have no effect.
_SAME = frozenset(
    (
        *_getters("data"),
        Tensor.detach,
        Tensor.requires_grad_,
        Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
        Tensor.grad.__set__,  # type: ignore[union-attr]
    )
)
