"""Modules whose weight a backend packs at their first call: linear layers and experts."""

import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fdk_formats import tensor_parallel
from fdk_formats.backends import NoBackendError, check_activations, select
from fdk_formats.quantised_module import MODEL_HOOKS, QuantisedModule
from fdk_formats.stored_weight import StoredWeight, problem_of, saved_as_canonical
from fdk_formats.torch_internals import constant_in_graphs, without_dispatch_modes


class PackedModule(QuantisedModule):
    """A quantised module with a backend: it packs the weight, and calls the layout.

    Attributes:
        backend: ``auto`` or a backend's name, see ``select``.
        activations: ``float``, or ``int8`` to round x to 8 bits.
        backend_name: name of the backend in use or, before the first call, to be used; ``none`` if
            no backend supports the weight.
    """

    backend: str
    activations: str
    # The model that the module is a layer of, see ``link_layers``.
    _model: weakref.ref[nn.Module] | None = None

    def _init_backend(self, backend: str, activations: str) -> None:
        """Sets the attributes; called once, by the constructor."""
        check_activations(activations)
        self.backend, self.activations, self.backend_name = backend, activations, "none"
        # Whether the parameters were replaced since the module was made, and again since.
        self._was_replaced = self._is_replaced_often = False

    @property
    def layout(self) -> Any:
        """The weight in the layout of its backend, packed if it was not.

        Raises:
            NoBackendError: if no backend supports the weight.
        """
        return self._pack(self.dtype)

    def _select(self) -> str:
        """Returns the name of the backend to use; raises NoBackendError without one."""
        device = self.device
        backend = "reference" if device.type == "meta" else self.backend
        sizes = self.format, self.weight_shape, self.dtype, device, self.activations
        return select(problem_of(*sizes), backend).name

    def _weight_changed(self) -> None:
        """Selects a backend after a move or a load; raising would leave a model half moved."""
        try:
            self.backend_name = self._select()
        except NoBackendError as error:
            self.backend_name = "none"
            warnings.warn(
                f"{self.format} of {list(self.weight_shape)} cannot be used in {self.dtype} on "
                f"{self.device} until it is moved on: {error}",
                stacklevel=3,
            )

    def _before_packing(self, dtype: torch.dtype) -> None:
        """Prepares for packing the weight for x of a dtype."""

    def _pack(self, dtype: torch.dtype) -> Any:
        """Returns the layout for x of a dtype, packed if need be."""
        stored = self.stored
        layout: Any = stored.layout
        if layout is None or dtype not in layout.dtypes:
            self._before_packing(dtype)
            layout = stored.pack(self.backend, dtype, self.activations)
        self.backend_name, self._layout_device = stored.backend_name, stored.device
        return layout

    def _prepare_and_call(self, x: Tensor, *args: Any) -> Tensor:
        """Calls a module that may have to be packed, or an x or a bias that have to be cast."""
        dtype = compute_dtype(x)
        if tensor_parallel.is_dtensor(x) or tensor_parallel.is_sharded(self):
            return self._call_sharded(x, *args, dtype=dtype)
        known, stored = self._stored(), self.stored
        if stored is known:
            return self._call(self._pack(dtype), dtype, x, *args)
        self._is_replaced_often, self._was_replaced = self._was_replaced, True
        q = stored.quantised()
        layout = self._pack(dtype)
        with saved_as_canonical(q, layout, self.backend, dtype, self.activations):
            return self._call(layout, dtype, x, *args)

    def _call(self, layout: Any, dtype: torch.dtype, x: Tensor, *args: Any) -> Tensor:
        """Casts the arguments to a dtype, and calls the layout."""
        raise NotImplementedError

    def _call_sharded(self, x: Tensor, *args: Any, dtype: torch.dtype) -> Tensor:
        """Calls a module whose parameters, or whose x, are DTensors."""
        raise NotImplementedError

    def _call_in_graph(self, x: Tensor, *args: Any) -> Tensor:
        if self._is_replaced_often:  # a layout in the graph would be compiled again at each call
            make_eager_calls()
            y: Tensor = EAGER["forward"](self, x, *args)
            return y
        dtype = compute_dtype(x)
        return self._call(self._layout_for(dtype), dtype, x, *args)

    def _layout_for(self, dtype: torch.dtype) -> Any:
        """Returns the layout for x of a dtype, eagerly or in a graph of torch.compile."""
        if not torch.compiler.is_compiling():
            return self._pack(dtype)
        self._pack_for_graph(dtype)
        return self._layout_in_graph()  # read after packing: the trace keeps what it has read

    def _only_calls_layout(self) -> bool:
        """Returns whether a call does no more than to cast arguments and to call the layout.

        False with hooks, with another ``forward`` (accelerate's), and for parameters that are
        sharded or were replaced.
        """
        if self._forward_hooks or self._forward_pre_hooks or "forward" in self.__dict__:
            return False
        if torch.compiler.is_compiling():
            return not self._is_replaced_often
        return self._own_weight() is not None

    @constant_in_graphs
    def _pack_for_graph(self, dtype: torch.dtype) -> bool:
        """Packs the weight while torch.compile or torch.export traces the module.

        So are those of the modules of its model that are like it: where each block of a model is
        compiled, a graph fits the next block only if its weights are packed, too.
        """
        with without_dispatch_modes():
            self._pack(dtype)
            model = None if self._model is None else self._model()
            for other in () if model is None else model.modules():
                if isinstance(other, PackedModule) and other._can_pack_like(self):
                    with suppress(NoBackendError, RuntimeError, ValueError):  # its call raises it
                        other._pack(dtype)
        return True

    def _can_pack_like(self, other: "PackedModule") -> bool:
        """Returns whether the module is of the same kind, and its weight its own and not packed."""
        own = self._own_weight()
        return own is not None and own.layout is None and self._kind() == other._kind()

    def _own_weight(self) -> StoredWeight | None:
        """Returns the module's weight if all parameters are its own.

        None if some were replaced or are not there yet, and for sharded ones, which are DTensors.
        """
        known = self.__dict__.get("_stored", lambda: None)()
        owners = [getattr(self._parameters.get(n), "stored", None) for n in self.weight_names]
        return known if all(owner is known for owner in owners) else None

    def _kind(self) -> tuple[object, ...]:
        """Returns what modules have in common whose layouts differ in values alone."""
        return (
            type(self),
            self.format,
            self.weight_shape,
            self.dtype,
            self.device,
            self.backend,
            self.activations,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "_model"}


def link_layers(model: nn.Module) -> None:
    """Tells the packed modules of a model which model is theirs; copies of it are not linked."""
    own = weakref.ref(model)
    for module in model.modules():
        if isinstance(module, PackedModule):
            module._model = own


MODEL_HOOKS.append(link_layers)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of a product of x: that of x, or the one to which autocast casts x.

    Raises:
        TypeError: if x is not a floating tensor.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"QuantisedLinear: x must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"QuantisedLinear: x must be floating, got {x.dtype}")
    device = x.device.type
    # torch.is_autocast_enabled("meta") raises; autocast leaves float64 as it is.
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


# Functions that a graph of torch.compile calls as they are, by name; see ``make_eager_calls``.
EAGER: dict[str, Callable[..., Any]] = {}


@constant_in_graphs
def make_eager_calls() -> bool:
    """Fills ``EAGER`` while a graph is traced: the compiler takes seconds to import."""
    for function in (forward, dequantise):
        EAGER.setdefault(function.__name__, torch.compiler.disable(function))
    return True


def forward(module: PackedModule, *args: Any) -> Tensor:
    """Calls ``module.forward``."""
    y: Tensor = module.forward(*args)
    return y


def dequantise(module: PackedModule) -> Tensor:
    """Calls ``module.dequantise``."""
    return module.dequantise()


def copied_parameter(bias: Tensor, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """Copies a bias as a parameter; a frozen one stays frozen."""
    frozen = isinstance(bias, nn.Parameter) and not bias.requires_grad
    with torch.inference_mode(False):  # autograd cannot save tensors made in inference mode
        copy = bias.detach().to(device, dtype, copy=True)
    return nn.Parameter(copy, requires_grad=not frozen)
