"""QuantisedLinear: a linear layer whose weight is stored in a few bits."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fdk_formats.backends import Layout, NoBackendError, Problem, select
from fdk_formats.files import check_values
from fdk_formats.format import Format
from fdk_formats.quantise import quantise
from fdk_formats.tensor import QuantisedTensor


def packed_by(
    backend: str, q: QuantisedTensor, dtype: torch.dtype, activations: str
) -> tuple[Layout, str]:
    """A weight in the layout of the backend that ``select`` chooses, and that backend's name."""
    chosen = select(Problem(q.format, *q.shape, dtype, q.device, activations), backend)
    rounded = {} if activations == "float" else {"activations": activations}
    # A gradient needs a layout's tensors, and autograd keeps none that inference mode has made.
    with torch.inference_mode(False):
        tensors = {name: t.clone() if t.is_inference() else t for name, t in q.tensors().items()}
        q = _with_own_codebook(QuantisedTensor(q.format, q.shape, **tensors))
        layout = chosen.pack(q, dtype=dtype, **rounded)
    return layout, chosen.name


def _with_own_codebook(q: QuantisedTensor) -> QuantisedTensor:
    """Layouts keep a codebook as it is: whoever else has it may go on to change it."""
    return q if q.codebook is None else replace(q, codebook=q.codebook.clone())


class PendingLayout(Layout):
    """A weight as files hold it, on a device or for a dtype that no backend takes.

    Raising where it is moved would leave a model whose first modules have gone and whose last have
    not. It waits to be moved on; a call raises NoBackendError.
    """

    def __init__(self, q: QuantisedTensor, reason: str) -> None:
        super().__init__()
        self.format, self.shape, self.reason = q.format, q.shape, reason
        for name, tensor in q.tensors().items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``Layout``."""
        raise NoBackendError(self.reason)

    def unpack(self) -> QuantisedTensor:
        """See ``Layout``."""
        # Of two that are one tensor too.
        tensors = dict(self.named_buffers(remove_duplicate=False))
        return QuantisedTensor(self.format, self.shape, **tensors)


def _stored(name: str) -> property:
    return property(lambda weight: getattr(weight.unpack(), name), doc=f"``unpack().{name}``.")


class QuantisedWeight(nn.Module):
    """A quantised weight in the layout of a backend, applied to activations.

    Its ``state_dict`` holds the canonical tensors of ``QuantisedTensor`` whatever the backend, so
    that a file never depends on one. Moving it to another device, or to another activation dtype,
    chooses the backend anew and packs again. Where none takes it a move warns and calls raise,
    until it is moved on; on meta, ``reference`` stands in. ``to_empty`` from meta gives zeros.

    Args:
        q: the weight.
        backend: ``auto`` or a backend's name, see ``select``.
        dtype: of the activations.
        activations: ``float``, or ``int8`` for products with x rounded to 8 bits, as
            ``fdk_formats.int8`` defines. A property of the layer: files do not hold it.
    """

    def __init__(
        self,
        q: QuantisedTensor,
        *,
        backend: str,
        dtype: torch.dtype,
        activations: str = "float",
    ) -> None:
        super().__init__()
        self.backend, self.activations = backend, activations
        # Of the weight it was quantised from, where that is known: see ``report``.
        self.relative_error: float | None = None
        # Of layers that are one product with it: see ``fuse``.
        self.group: Any = None
        self._pack(q, dtype)

    # By the names of state_dict: torch.distributed.checkpoint looks each up in the model.
    packed, scale, codebook, zero_point = map(
        _stored, ("packed", "scale", "codebook", "zero_point")
    )

    def _pack(self, q: QuantisedTensor, dtype: torch.dtype) -> None:
        self._keep(q, dtype, *packed_by(self.backend, q, dtype, self.activations))

    def _pack_where_it_is(self, q: QuantisedTensor, dtype: torch.dtype) -> None:
        """Packs a weight that was moved or loaded, whether or not a backend takes it there."""
        try:
            self._pack(q, dtype)
        except (NoBackendError, ValueError) as error:
            if q.device.type == "meta":
                self._keep(q, dtype, *packed_by("reference", q, dtype, self.activations))
                return
            reason = (
                f"{self.format} of {list(self.shape)} cannot be used in {dtype} on {q.device} "
                f"until it is moved on: {error}"
            )
            warnings.warn(reason, stacklevel=2)
            self._keep(q, dtype, PendingLayout(q, reason), "none")

    def _keep(self, q: QuantisedTensor, dtype: torch.dtype, layout: Layout, name: str) -> None:
        self.format, self.shape, self.dtype, self.device = q.format, q.shape, dtype, q.device
        self.layout, self.backend_name, self.canonical_bytes = layout, name, q.nbytes
        if self.group is not None:
            self.group.join()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ W_hat.T + bias``."""
        y: Tensor = self.layout(x, bias)
        return y

    def unpack(self) -> QuantisedTensor:
        """The weight in canonical form."""
        return _with_own_codebook(self.layout.unpack())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantisedWeight":
        # nn.Module would cast scales with the activations; only the device is for us to follow.
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if (probe.dtype, probe.device) != (self.dtype, self.device):
            q = self.unpack()
            if q.device.type == "meta" and probe.device != q.device:  # to_empty
                tensors = q.tensors().items()
                empty = {name: torch.zeros_like(t, device=probe.device) for name, t in tensors}
                q, self.relative_error = QuantisedTensor(q.format, q.shape, **empty), None
            self._pack_where_it_is(q.to(probe.device), probe.dtype)
        else:  # what changes neither, such as share_memory
            self.layout._apply(  # type: ignore[no-untyped-call]
                lambda t: changed if (changed := fn(t)).dtype == t.dtype else t
            )
        return self

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        # nn.TransformerEncoderLayer hands .weight of its layers to a fused kernel unless one of
        # them overrides torch functions: this one does, and so it calls the layers.
        return NotImplemented

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As nn.Module's, but its own, without ``recurse``, are those of ``state_dict``.

        ``set_model_state_dict`` of torch.distributed.checkpoint asks so what there is to load. They
        are unpacked at each call: what is written to them is lost.
        """
        if recurse:
            yield from super().named_buffers(prefix, recurse, remove_duplicate)
        else:
            for name, tensor in self.unpack().tensors().items():
                yield f"{prefix}.{name}" if prefix else name, tensor

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, tensor in self.unpack().tensors().items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        mine = self.format.tensor_names
        found = {name: state_dict[prefix + name] for name in mine if prefix + name in state_dict}
        missing_keys += [prefix + name for name in mine if name not in found]
        unexpected_keys += [
            key
            for key in state_dict
            if key.startswith(prefix) and key.removeprefix(prefix) not in mine
        ]
        if len(found) < len(mine):
            return
        try:
            # Copied, as nn.Module does: the caller may go on to change its tensors.
            copied = {name: tensor.detach().clone() for name, tensor in found.items()}
            q = QuantisedTensor(self.format, self.shape, **copied)
            check_values(prefix.removesuffix("."), q)
        except (TypeError, ValueError) as error:
            error_msgs.append(f"{prefix.removesuffix('.')}: {error}")
            return
        # As nn.Module does: what is assigned stays where it is.
        is_assigned = local_metadata.get("assign_to_params_buffers", False)
        if self.device.type == "meta" and q.device.type != "meta" and not is_assigned:
            warnings.warn(
                f"{prefix.removesuffix('.') or 'QuantisedWeight'}: loading into the meta device "
                f"does nothing; pass assign=True",
                stacklevel=2,
            )
            return
        self._pack_where_it_is(q if is_assigned else q.to(self.device), self.dtype)
        self.relative_error = None

    def extra_repr(self) -> str:
        """Format, shape, the backend in use, and activations that are not ``float``."""
        rounded = "" if self.activations == "float" else f", activations={self.activations}"
        return f"{self.format}, shape={list(self.shape)}, backend={self.backend_name}{rounded}"


class QuantisedLinear(nn.Module):
    """``y = x @ W_hat.T + bias`` with ``W_hat :: [n, k]`` stored in 1 to 8 bits.

    Takes ``x :: [..., k]`` of its own dtype and returns ``[..., n]``. Under autocast x, but for
    float64, is cast to that dtype, the one its backend was chosen for, whatever autocast's own. The
    gradient reaches x and bias; the quantised weight is constant. With ``activations="int8"`` it is
    that of the product without rounding, straight through. ``state_dict`` holds ``weight.packed``,
    ``weight.scale``, ``weight.codebook`` or ``weight.zero_point``, and ``bias``.

    Args:
        weight: the quantised weight; share one between layers to tie them.
        bias: ``[n]`` or None.
    """

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(
                f"QuantisedLinear: bias must be [{self.out_features}], got {list(bias.shape)}"
            )
        self.weight = weight
        self.bias = None if bias is None else _parameter(bias)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        format: Format | str,
        backend: str = "auto",
        *,
        activations: str = "float",
        importance: Tensor | None = None,
        codebook: Tensor | None = None,
    ) -> "QuantisedLinear":
        """A quantised copy of a linear layer, on its device and for activations of its dtype.

        Args:
            linear: the layer.
            format: of its weight.
            backend: see ``select``.
            activations: ``int8`` rounds x to 8 bits, for speed at the error that
                ``fdk_formats.int8`` states.
            importance: ``[k]`` or ``[n, k]``: how much the error of a weight counts, see
                ``quantise``.
            codebook: ``[2^bits]`` ascending values in units of the scale: that of ``custom``, or
                one fitted before for ``kmeans``.

        Raises:
            NoBackendError: where no backend takes it, with every reason.
            ValueError, TypeError: as ``quantise`` does.
        """
        if not isinstance(linear, nn.Linear):
            got = type(linear).__name__
            raise TypeError(f"QuantisedLinear.from_linear: wanted a torch.nn.Linear, got {got}")
        q = quantise(linear.weight.detach(), format, importance, codebook=codebook)
        return cls.from_quantised(
            q,
            linear.bias,
            backend=backend,
            dtype=linear.weight.dtype,
            activations=activations,
        )

    @classmethod
    def from_quantised(
        cls,
        q: QuantisedTensor,
        bias: Tensor | None = None,
        *,
        backend: str = "auto",
        dtype: torch.dtype = torch.bfloat16,
        activations: str = "float",
    ) -> "QuantisedLinear":
        """A layer over an already quantised weight, for activations of ``dtype``."""
        weight = QuantisedWeight(q, backend=backend, dtype=dtype, activations=activations)
        return cls(weight, None if bias is None else _parameter(bias, q.device, dtype))

    @property
    def format(self) -> Format:
        """The format of the weight."""
        return self.weight.format

    def forward(self, x: Tensor) -> Tensor:
        """``x :: [..., k]`` to ``[..., n]``.

        Raises:
            TypeError: where x is no tensor, or not of the layer's dtype, nor a float that autocast
                casts.
            ValueError: where x is not ``[..., k]`` or is on another device.
        """
        # None of these by attribute: nn.Module takes half a microsecond to find one.
        weight: Any = self._modules["weight"]
        layout, dtype = weight._modules.get("layout"), weight.dtype
        if x.dtype != dtype:
            if not isinstance(x, Tensor):
                got = type(x).__name__
                raise TypeError(f"QuantisedLinear: x must be a tensor, got {got}")
            if not _is_cast(x):
                advice = "; convert either with .to()" if x.is_floating_point() else ""
                raise TypeError(
                    f"QuantisedLinear: x must be {dtype}, the dtype of the layer, got {x.dtype}"
                    f"{advice}"
                )
            # What fused layers share is told by x itself.
            x = x if getattr(layout, "casts", False) else x.to(dtype)
        if (bias := self._parameters.get("bias")) is None:
            bias = self.bias
        # Not there: somebody's wrapper stands in the weight's place, such as that of torch.compile.
        if layout is None or weight._forward_hooks or weight._forward_pre_hooks:
            y: Tensor = weight(x, bias)
        else:  # Two more calls of nn.Module take 4 us of a call's 20.
            y = layout.forward(x, bias)
        return y

    def extra_repr(self) -> str:
        """Sizes as nn.Linear prints them."""
        has_bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}"


def _is_cast(x: Tensor) -> bool:
    """Whether autocast is on and casts x for ``nn.Linear``: a float, but not float64."""
    device = x.device.type
    if device == "meta":  # torch asked about autocast there raises
        return False
    is_eligible = x.is_floating_point() and x.dtype != torch.float64
    return is_eligible and torch.is_autocast_enabled(device)


def _parameter(
    bias: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """A copy of a bias; a frozen parameter stays frozen."""
    frozen = isinstance(bias, nn.Parameter) and not bias.requires_grad
    with torch.inference_mode(False):  # as of the weight, see ``packed_by``
        copy = bias.detach().to(device, dtype, copy=True)
    return nn.Parameter(copy, requires_grad=not frozen)
