"""Modules with a quantised weight: what torch and others see of it, and where it is held."""

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from fdk_formats import tensor_parallel
from fdk_formats.dequantised_weight import DequantisedWeight
from fdk_formats.format import Format
from fdk_formats.quantise import quantise
from fdk_formats.stored_weight import StoredWeight, weight_of
from fdk_formats.tensor import CanonicalWeight

PREFIX = "weight_"


# Called with each model that ``quantise_model``, ``load_model`` and ``replace_layers`` made.
MODEL_HOOKS: list[Callable[[nn.Module], None]] = []


def call_model_hooks(model: nn.Module) -> None:
    """Calls ``MODEL_HOOKS`` with a model whose layers are all in place."""
    for hook in MODEL_HOOKS:
        hook(model)


class QuantisedModule(nn.Module):
    """A module whose weight ``[n, k]``, or stack ``[experts, n, k]``, is stored in 1 to 8 bits.

    Its parameters are the canonical tensors of ``QuantisedTensor``, frozen: ``weight_packed``,
    ``weight_scale`` and ``weight_codebook`` or ``weight_zero_point``. A ``StoredWeight`` holds
    their values. They may be replaced, moved and written to; the module follows.

    Attributes:
        format: format of the weight.
        dtype: dtype of ``weight``.
        backend_name: name of the backend in use, or to be used at the first call; ``none`` if no
            backend supports the weight.
        relative_error: error against the source weight; None unless ``quantise_model`` made it.
    """

    format: Format
    dtype: torch.dtype
    backend_name: str
    relative_error: float | None
    _stored: Callable[[], StoredWeight | None]

    def _init_weight(self, stored: StoredWeight, dtype: torch.dtype) -> None:
        """Registers the parameters; called once, by the constructor."""
        self.format, self.dtype, self.relative_error = stored.format, dtype, None
        self._set_stored(stored)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """``(n, k)`` or ``(experts, n, k)``, of the whole weight if it is sharded."""
        raise NotImplementedError

    def _set_shape(self, *shape: int) -> None:
        raise NotImplementedError

    def _quantise(self, weight: Tensor) -> CanonicalWeight:
        """Quantises an assigned weight in the format of the module."""
        return quantise(weight, self.format)

    def _dequantised_in_graph(self) -> Tensor:
        """Computes the weight in a graph of torch.compile."""
        raise NotImplementedError

    def _weight_changed(self) -> None:
        """Follows a move or a load of the weight."""

    def tie_weight(self, other: "QuantisedModule") -> None:
        """Shares the weight of another module of the same format and shape."""
        own, given = (self.format, self.weight_shape), (other.format, other.weight_shape)
        if own != given:
            raise ValueError(
                f"tie_weight: wanted a weight {own[0]} {list(own[1])}, "
                f"got {given[0]} {list(given[1])}"
            )
        self._set_stored(other.stored)
        self.backend_name, self.relative_error = other.backend_name, other.relative_error

    @property
    def device(self) -> torch.device:
        """Device of the weight."""
        device: torch.device = self._parameters["weight_packed"].device  # type: ignore[union-attr]
        return device

    @property
    def weight(self) -> Tensor:
        """The dequantised weight ``[n, k]`` or ``[experts, n, k]``, see ``DequantisedWeight``.

        Assigning a weight, of other sizes too, quantises it in the layer's format; that of a
        quantised layer of the same format and shape is shared as it is.
        """
        if torch.compiler.is_compiling():
            return self._dequantised_in_graph()
        return DequantisedWeight.of(self)

    @weight.setter
    def weight(self, value: Tensor) -> None:
        self._assign(value)

    @property
    def quantised(self) -> Any:
        """The weight in canonical form; gathered from all processes if it is sharded.

        A ``QuantisedTensor``, or a ``QuantisedStack`` for experts.
        """
        if tensor_parallel.is_sharded(self):
            return tensor_parallel.gathered(self)
        return self.stored.quantised()

    def dequantise(self, dtype: torch.dtype | None = None) -> Tensor:
        """Computes the weight in a dtype, that of the layer by default."""
        weight: Tensor = self.quantised.dequantise(self.dtype if dtype is None else dtype)
        return weight

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Names of the weight's parameters."""
        return tuple(PREFIX + name for name in self.format.tensor_names)

    @property
    def weight_parameters(self) -> tuple[Tensor, ...]:
        """The weight's parameters."""
        return tuple(self._parameters[name] for name in self.weight_names)  # type: ignore[misc]

    @property
    def stored(self) -> StoredWeight:
        """The weight that the layer's parameters belong to.

        If somebody replaced them (accelerate, FSDP2, a caller), a weight made of the new ones.
        """
        if torch.compiler.is_compiling() and (known := self._stored()) is not None:
            return known  # torch.export puts fake tensors in the place of the parameters
        found = {name: self._parameters[PREFIX + name] for name in self.format.tensor_names}
        local = {name: tensor_parallel.local(tensor) for name, tensor in found.items()}
        owners = {id(getattr(tensor, "stored", None)) for tensor in local.values()}
        stored = getattr(local["packed"], "stored", None)
        if stored is not None and len(owners) == 1:
            return stored  # type: ignore[no-any-return]
        q = tensor_parallel.local_weight(self, local)
        stored = StoredWeight(q)
        self._set_stored(stored)
        return stored

    def _set_stored(self, stored: StoredWeight) -> None:
        parameters: dict[str, Any] = dict(stored.parameters())
        for name, parameter in parameters.items():
            sharded = self._parameters.get(PREFIX + name)
            if tensor_parallel.is_dtensor(sharded):
                parameter = tensor_parallel.like(sharded, parameter)
            if PREFIX + name in self._parameters:
                self._parameters[PREFIX + name] = parameter
            else:  # init_empty_weights of accelerate replaces this method
                self.register_parameter(PREFIX + name, parameter)
        # Its parameters keep it: a weight that was replaced or offloaded goes, with its layout.
        self._stored = weakref.ref(stored)

    def _layout_in_graph(self) -> Any:
        """Returns the layout, by attributes that torch.compile can read."""
        stored: Any = self._stored()
        return stored.layout

    def _assign(self, value: Tensor) -> None:
        if not isinstance(value, Tensor) or value.ndim != len(self.weight_shape):
            got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            wanted = "[n, k]" if len(self.weight_shape) == 2 else "[experts, n, k]"
            raise TypeError(f"{type(self).__name__}: weight must be a tensor {wanted}, got {got}")
        if tensor_parallel.is_dtensor(value):
            tensor_parallel.shard_weight(self, value)
            return
        if isinstance(value, DequantisedWeight) and self._take(value.layer):
            return
        warnings.warn(
            f"{type(self).__name__}: an assigned weight is quantised again to {self.format}, which "
            f"loses precision; layer.dequantise() has the weight to compute with",
            stacklevel=3,
        )
        q = self._quantise(value.detach().to(self.device))
        self._set_shape(*q.shape)
        self.relative_error = None
        self._set_stored(StoredWeight(q))

    def _take(self, other: "QuantisedModule") -> bool:
        """Takes the weight of another module as it is, if it has the same format and shape."""
        if (self.format, self.weight_shape) != (other.format, other.weight_shape):
            return False
        if type(self) is type(other):
            self.tie_weight(other)
        elif other is not self:  # an embedding and a head: each has a layout of its own
            self._set_stored(StoredWeight(other.stored.quantised()))
            self.relative_error = other.relative_error
        return True

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Registers a parameter as nn.Module does; ``weight`` is assigned to."""
        if name == "weight" and param is not None:
            self._assign(param)
            return
        if name == "weight_codebook" and tensor_parallel.is_dtensor(param):
            # ColwiseParallel cuts every parameter along its first dimension.
            param = nn.Parameter(tensor_parallel.replicated(param), requires_grad=False)
        super().register_parameter(name, param)

    @contextmanager
    def _without_weight(self) -> Iterator[None]:
        """Hides the weight's parameters from methods of nn.Module."""
        hidden = {name: self._parameters.pop(name) for name in self.weight_names}
        try:
            yield
        finally:
            others = dict(self._parameters)
            self._parameters.clear()
            self._parameters.update(hidden | others)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # nn.Module would cast scales with the activations.
        with self._without_weight():
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if tensor_parallel.is_sharded(self):
            tensor_parallel.apply(self, fn)
            return self
        # Apply fn to an empty tensor, to see the device and the activation dtype that it asks for.
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        stored, is_cast = self.stored, probe.dtype != self.dtype
        self.dtype = probe.dtype
        if probe.device == self.device:  # share_memory, or a cast
            if not is_cast:
                stored.apply(fn)
                return self
        else:
            if self.device.type == "meta":  # to_empty
                self.relative_error = None
            self._set_stored(stored.moved(probe.device))
        self._weight_changed()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # Tensors do not show a rotation.
        metadata = getattr(destination, "_metadata", {})
        metadata.setdefault(prefix[:-1], {})["rotation"] = self.format.rotation
        if keep_vars or tensor_parallel.is_sharded(self):
            return
        for name, tensor in self.stored.quantised().tensors().items():
            destination[prefix + PREFIX + name] = tensor

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
        lists = strict, missing_keys, unexpected_keys, error_msgs
        where, rotation = prefix.removesuffix(".") or type(self).__name__, self.format.rotation
        if (found_rotation := local_metadata.get("rotation", rotation)) != rotation:
            error_msgs.append(
                f"{where}: wanted a weight of {self.format}, got one with the rotation "
                f"{found_rotation}; load it into a layer of its own format"
            )
            return
        state_dict = dict(state_dict)
        for name in self.format.tensor_names:  # names of 0.1, and of files
            if (key := f"{prefix}weight.{name}") in state_dict:
                state_dict[prefix + PREFIX + name] = state_dict.pop(key)
        if tensor_parallel.is_sharded(self):
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *lists)
            return
        if (key := f"{prefix}input_permutation") in state_dict:  # its buffer may be None so far
            permutation = torch.empty_like(state_dict[key], device=self.device)
            self.register_buffer("input_permutation", permutation)
        keys = {name: prefix + PREFIX + name for name in self.format.tensor_names}
        found = {name: state_dict.pop(key) for name, key in keys.items() if key in state_dict}
        with self._without_weight():
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *lists)
        missing_keys += [key for name, key in keys.items() if name not in found]
        if len(found) < len(keys):
            return
        try:
            # Copy, as nn.Module does: the caller may go on to change its tensors.
            copied = {name: tensor.detach().clone() for name, tensor in found.items()}
            q = weight_of(self.format, self.weight_shape, copied)
            q.check_values(where)
        except (TypeError, ValueError) as error:
            error_msgs.append(f"{where}: {error}")
            return
        # As in nn.Module, assigned tensors stay on their device.
        is_assigned = local_metadata.get("assign_to_params_buffers", False)
        if self.device.type == "meta" and q.device.type != "meta" and not is_assigned:
            warnings.warn(
                f"{where}: loading into the meta device does nothing; pass assign=True",
                stacklevel=2,
            )
            return
        stored, self.relative_error = self.stored, None
        if is_assigned and q.device != self.device:
            stored = stored.moved(q.device)
        stored.replace(q.to(stored.device))
        self._set_stored(stored)
        self._weight_changed()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_stored"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if not tensor_parallel.is_sharded(self):
            self._stored = weakref.ref(self.stored)
