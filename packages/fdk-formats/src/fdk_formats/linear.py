"""QuantisedLinear: a linear layer whose weight is stored in 1 to 8 bits."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fdk_formats.backends import Layout, NoBackendError, Problem, select
from fdk_formats.format import Format
from fdk_formats.quantise import quantise
from fdk_formats.tensor import QuantisedTensor


def pack_with(
    backend: str, q: QuantisedTensor, dtype: torch.dtype, activations: str
) -> tuple[Layout, str]:
    """Packs a weight with the backend that ``select`` chooses; returns its layout and name."""
    chosen = select(Problem(q.format, *q.shape, dtype, q.device, activations), backend)
    rounded = {} if activations == "float" else {"activations": activations}
    # Autograd cannot save tensors made in inference mode, and a gradient needs the layout's.
    with torch.inference_mode(False):
        tensors = {name: t.clone() if t.is_inference() else t for name, t in q.tensors().items()}
        q = _with_own_codebook(QuantisedTensor(q.format, q.shape, **tensors))
        layout = chosen.pack(q, dtype=dtype, **rounded)
    return layout, chosen.name


def _with_own_codebook(q: QuantisedTensor) -> QuantisedTensor:
    """Copies the codebook, which layouts keep as it is and the caller may go on to change."""
    return q if q.codebook is None else replace(q, codebook=q.codebook.clone())


class PendingLayout(Layout):
    """A canonical weight on a device, or for a dtype, that no backend supports.

    Raising during ``model.to(...)`` would leave a model half moved. Instead the weight waits to be
    moved on, and a call raises NoBackendError.
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
        # remove_duplicate=False: two of them may be one tensor.
        tensors = dict(self.named_buffers(remove_duplicate=False))
        return QuantisedTensor(self.format, self.shape, **tensors)


def _stored(name: str) -> property:
    return property(lambda weight: getattr(weight.unpack(), name), doc=f"``unpack().{name}``.")


class QuantisedWeight(nn.Module):
    """A quantised weight in the layout of a backend, applied to activations.

    Its ``state_dict`` holds the canonical tensors of ``QuantisedTensor``, so that files do not
    depend on the backend. Moving it to another device or activation dtype selects a backend again
    and repacks. If no backend supports the new place, the move warns and calls raise until it is
    moved on. On meta ``reference`` is used; ``to_empty`` from meta gives zeros.

    Args:
        q: the weight.
        backend: ``auto`` or a backend's name, see ``select``.
        dtype: dtype of the activations.
        activations: ``float``, or ``int8`` to round x to 8 bits, see ``fdk_formats.int8``. It is a
            property of the layer; files do not record it.

    Attributes:
        format: format of the weight.
        shape: ``(n, k)``.
        layout: the packed weight.
        backend_name: name of the backend in use; ``none`` while no backend supports it.
        relative_error: error against the source weight; None unless ``quantise_model`` made it.

    Raises:
        NoBackendError: if no backend supports it, with every backend's reason.
    """

    def __init__(
        self, q: QuantisedTensor, *, backend: str, dtype: torch.dtype, activations: str = "float"
    ) -> None:
        super().__init__()
        self.backend, self.activations = backend, activations
        self.relative_error: float | None = None
        # The group of layers that it is computed with, see ``fuse``.
        self.group: Any = None
        self._pack(q, dtype)

    # torch.distributed.checkpoint looks up each name of the state_dict as an attribute.
    packed, scale, codebook, zero_point = map(
        _stored, ("packed", "scale", "codebook", "zero_point")
    )

    def _pack(self, q: QuantisedTensor, dtype: torch.dtype) -> None:
        self._keep(q, dtype, *pack_with(self.backend, q, dtype, self.activations))

    def _pack_where_it_is(self, q: QuantisedTensor, dtype: torch.dtype) -> None:
        """Packs a weight that was moved or loaded, or keeps it pending if no backend can."""
        try:
            self._pack(q, dtype)
        except (NoBackendError, ValueError) as error:
            if q.device.type == "meta":
                self._keep(q, dtype, *pack_with("reference", q, dtype, self.activations))
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
        """Computes ``x @ W_hat.T + bias``."""
        y: Tensor = self.layout(x, bias)
        return y

    def unpack(self) -> QuantisedTensor:
        """Returns the weight in canonical form."""
        return _with_own_codebook(self.layout.unpack())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantisedWeight":
        # nn.Module would cast scales with the activations. Apply fn to an empty tensor instead, to
        # see the device and the activation dtype that it asks for.
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if (probe.dtype, probe.device) != (self.dtype, self.device):
            q = self.unpack()
            if q.device.type == "meta" and probe.device != q.device:  # to_empty
                tensors = q.tensors().items()
                empty = {name: torch.zeros_like(t, device=probe.device) for name, t in tensors}
                q, self.relative_error = QuantisedTensor(q.format, q.shape, **empty), None
            self._pack_where_it_is(q.to(probe.device), probe.dtype)
        else:  # neither changes, for example in share_memory
            self.layout._apply(  # type: ignore[no-untyped-call]
                lambda t: changed if (changed := fn(t)).dtype == t.dtype else t
            )
        return self

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        # nn.TransformerEncoderLayer passes the weights of its layers to a fused kernel unless one
        # of them overrides torch functions. Overriding makes it call the layers.
        return NotImplemented

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields buffers as nn.Module does; without ``recurse``, those of ``state_dict``.

        ``set_model_state_dict`` of torch.distributed.checkpoint calls it without ``recurse``. The
        canonical tensors are then unpacked for the call: writing to them has no effect.
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
        names = self.format.tensor_names
        found = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        missing_keys += [prefix + name for name in names if name not in found]
        unexpected_keys += [
            key
            for key in state_dict
            if key.startswith(prefix) and key.removeprefix(prefix) not in names
        ]
        if len(found) < len(names):
            return
        try:
            # Copy, as nn.Module does: the caller may go on to change its tensors.
            copied = {name: tensor.detach().clone() for name, tensor in found.items()}
            q = QuantisedTensor(self.format, self.shape, **copied)
            q.check_values(prefix.removesuffix("."))
        except (TypeError, ValueError) as error:
            error_msgs.append(f"{prefix.removesuffix('.')}: {error}")
            return
        # As in nn.Module, assigned tensors stay on their device.
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
        """Shows format, shape, the backend in use, and activations other than ``float``."""
        rounded = "" if self.activations == "float" else f", activations={self.activations}"
        return f"{self.format}, shape={list(self.shape)}, backend={self.backend_name}{rounded}"


class QuantisedLinear(nn.Module):
    """A linear layer ``y = x @ W_hat.T + bias`` whose weight is stored in 1 to 8 bits.

    ``x :: [..., k]`` must have the layer's dtype; under autocast, floating x other than float64 is
    cast to it. Gradients reach x and the bias; the quantised weight is constant. With
    ``activations="int8"`` the gradient is that of the product without rounding (straight-through).
    ``state_dict`` holds ``weight.packed``, ``weight.scale``, ``weight.codebook`` or
    ``weight.zero_point``, and ``bias``.

    Args:
        weight: the quantised weight. Layers that share one are tied.
        bias: ``[n]`` or None.

    Raises:
        ValueError: if the bias has another shape.

    Example:
        >>> layer = QuantisedLinear.from_linear(nn.Linear(4096, 4096), "nf4-g64")
        >>> y = layer(torch.randn(1, 4096))
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
        """Quantises a copy of a linear layer, on its device and for activations of its dtype.

        Args:
            linear: the layer, left untouched.
            format: format of the weight, for example ``"kmeans4-g64"``.
            backend: ``auto`` or a backend's name, see ``select``.
            activations: ``float``, or ``int8`` to round x to 8 bits, see ``fdk_formats.int8``.
            importance: ``[k]`` or ``[n, k]``, the weight of each squared error, see ``quantise``.
            codebook: ``[2^bits]`` ascending values for ``custom`` or ``kmeans``, see ``quantise``.

        Raises:
            NoBackendError: if no backend supports the layer, with every backend's reason.
            ValueError: see ``quantise``.
            TypeError: if ``linear`` is not an ``nn.Linear``; see also ``quantise``.
        """
        if not isinstance(linear, nn.Linear):
            got = type(linear).__name__
            raise TypeError(f"QuantisedLinear.from_linear: wanted a torch.nn.Linear, got {got}")
        q = quantise(linear.weight.detach(), format, importance, codebook=codebook)
        return cls.from_quantised(
            q, linear.bias, backend=backend, dtype=linear.weight.dtype, activations=activations
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
        """Makes a layer from a quantised weight.

        Args:
            q: the weight.
            bias: ``[n]`` or None; copied to the weight's device and ``dtype``.
            backend: ``auto`` or a backend's name, see ``select``.
            dtype: dtype of the activations.
            activations: see ``from_linear``.

        Raises:
            NoBackendError: if no backend supports it.
        """
        weight = QuantisedWeight(q, backend=backend, dtype=dtype, activations=activations)
        return cls(weight, None if bias is None else _parameter(bias, q.device, dtype))

    @property
    def format(self) -> Format:
        """Format of the weight."""
        return self.weight.format

    def forward(self, x: Tensor) -> Tensor:
        """Computes ``x @ W_hat.T + bias``.

        Args:
            x: ``[..., k]`` in the layer's dtype.

        Returns:
            ``[..., n]`` in the same dtype.

        Raises:
            TypeError: if x is not a tensor, or of another dtype that autocast does not cast.
            ValueError: if x is not ``[..., k]`` or is on another device.
        """
        # nn.Module takes 0.5 us to find an attribute, so look each up in its dict.
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
            # Fused layers recognise a shared input by identity and cast it themselves.
            x = x if getattr(layout, "casts", False) else x.to(dtype)
        if (bias := self._parameters.get("bias")) is None:
            bias = self.bias
        # There is no layout if a wrapper, such as torch.compile's, replaces the weight.
        if layout is None or weight._forward_hooks or weight._forward_pre_hooks:
            y: Tensor = weight(x, bias)
        else:  # skips two calls of nn.Module, 4 us of 20
            y = layout.forward(x, bias)
        return y

    def extra_repr(self) -> str:
        """Shows the sizes as nn.Linear does."""
        has_bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}"


def _is_cast(x: Tensor) -> bool:
    """Returns whether autocast is on and would cast x for ``nn.Linear`` (not float64)."""
    device = x.device.type
    if device == "meta":  # torch.is_autocast_enabled("meta") raises
        return False
    is_eligible = x.is_floating_point() and x.dtype != torch.float64
    return is_eligible and torch.is_autocast_enabled(device)


def _parameter(
    bias: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """Copies a bias as a parameter; a frozen one stays frozen."""
    frozen = isinstance(bias, nn.Parameter) and not bias.requires_grad
    with torch.inference_mode(False):  # see ``pack_with``
        copy = bias.detach().to(device, dtype, copy=True)
    return nn.Parameter(copy, requires_grad=not frozen)
