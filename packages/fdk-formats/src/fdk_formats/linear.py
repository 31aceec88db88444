"""QuantisedLinear: a linear layer whose weight is stored in 1 to 8 bits."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fdk_formats import tensor_parallel
from fdk_formats.backends import Layout, NoBackendError, Problem, check_activations, select
from fdk_formats.format import Format
from fdk_formats.quantise import quantise
from fdk_formats.quantised_module import PREFIX, QuantisedModule
from fdk_formats.stored_weight import StoredWeight, saved_as_canonical, zero_weight
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.torch_internals import constant_in_graphs, may_autocast, without_dispatch_modes


class QuantisedLinear(QuantisedModule, nn.Linear):
    """A linear layer ``y = x @ W_hat.T + bias`` whose weight is stored in 1 to 8 bits.

    It works in place of ``nn.Linear``. Its parameters are the canonical tensors of
    ``QuantisedTensor``, frozen: ``weight_packed``, ``weight_scale`` and ``weight_codebook`` or
    ``weight_zero_point``; and ``bias``. At the first call a backend packs them into the layout of
    its kernels, which then holds their values; they are packed again after they were replaced,
    moved or written to.

    ``x :: [..., k]`` may have any dtype that the backend has kernels for; y has the dtype of x.
    Under autocast x is cast as for ``nn.Linear``. Gradients reach x and the bias; the quantised
    weight is constant. With ``activations="int8"`` the gradient is that of the product without
    rounding (straight-through).

    Args:
        in_features: k.
        out_features: n.
        bias: whether the layer has one.
        device: device of the weight, which is zero until it is loaded.
        dtype: dtype of the bias and of ``weight``; torch's default if None.
        format: format of the weight, for example ``"kmeans4-g64"``.
        backend: ``auto`` or a backend's name, see ``select``.
        activations: ``float``, or ``int8`` to round x to 8 bits, see ``fdk_formats.int8``. Files
            do not record it.

    Attributes:
        format: format of the weight.
        dtype: dtype of ``weight``, and of x if neither autocast nor the caller chooses another.
        backend: the argument.
        activations: the argument.
        input_permutation: int32 ``[k]`` or None: column j of the stored weight is that of input
            ``input_permutation[j]``, as in GPTQ's act-order. A buffer; files hold it.
        backend_name: name of the backend in use or, before the first call, to be used; ``none`` if
            no backend supports the layer.
        relative_error: error against the source weight; None unless ``quantise_model`` made it.
        group: the layers that it is computed with, or None; see ``fuse_layers``.

    Raises:
        ValueError: if k does not fit the format.

    Example:
        >>> layer = QuantisedLinear.from_linear(nn.Linear(4096, 4096), "nf4-g64")
        >>> y = layer(torch.randn(1, 4096))
    """

    input_permutation: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        format: Format | str,
        backend: str = "auto",
        activations: str = "float",
    ) -> None:
        nn.Module.__init__(self)
        check_activations(activations)
        self.in_features, self.out_features = in_features, out_features
        self.backend, self.activations, self.backend_name = backend, activations, "none"
        self.group: Any = None
        self.register_buffer("input_permutation", None)
        # Whether the parameters were replaced since the layer was made, and again since.
        self._was_replaced = self._is_replaced_often = False
        zero = zero_weight(Format.parse(format), (out_features, in_features), device)
        self._init_weight(StoredWeight(zero), torch.get_default_dtype() if dtype is None else dtype)
        self._table_name = PREFIX + self.format.tensor_names[-1]
        zeros = torch.zeros(out_features, dtype=self.dtype, device=device) if bias else None
        self.register_parameter("bias", None if zeros is None else nn.Parameter(zeros))

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
            q: the weight; the layer holds its tensors themselves until it packs them.
            bias: ``[n]`` or None; copied to the weight's device and ``dtype``.
            backend: ``auto`` or a backend's name, see ``select``.
            dtype: dtype of the activations.
            activations: see ``from_linear``.

        Raises:
            NoBackendError: if no backend supports it.
            ValueError: if the bias has another shape, or a value of the weight is out of range,
                see ``QuantisedTensor.check_values``.
        """
        q.check_values(cls.__name__)
        n, k = q.shape
        if bias is not None and bias.shape != (n,):
            raise ValueError(f"QuantisedLinear: bias must be [{n}], got {list(bias.shape)}")
        settings: Any = {"format": q.format, "backend": backend, "activations": activations}
        layer = cls(k, n, bias is not None, "meta", dtype, **settings)
        layer._set_stored(StoredWeight(q))
        if bias is not None:
            layer.bias = _parameter(bias, q.device, dtype)
        layer.backend_name = layer._select()
        return layer

    @property
    def weight_shape(self) -> tuple[int, int]:
        """``(n, k)``."""
        return self.out_features, self.in_features

    def _set_shape(self, n: int, k: int) -> None:
        self.out_features, self.in_features = n, k
        self.input_permutation = None

    def permute_inputs(self, permutation: Tensor | None) -> None:
        """Sets ``input_permutation``.

        Raises:
            ValueError: if it is not a permutation of k integers.
        """
        if permutation is not None:
            k = self.in_features
            wanted = torch.arange(k, dtype=torch.int32)
            found = permutation.detach().to("cpu", torch.int32)
            if not torch.equal(found.sort().values, wanted):
                raise ValueError(
                    f"QuantisedLinear: input_permutation must hold each of 0 to {k - 1} once, got "
                    f"{list(permutation.shape)} {permutation.dtype}"
                )
            permutation = permutation.detach().to(self.device, torch.int32, copy=True)
        self.input_permutation = permutation

    def dequantise(self, dtype: torch.dtype | None = None) -> Tensor:
        """Computes the weight ``[n, k]`` in a dtype, that of the layer by default."""
        stored = super().dequantise(dtype)
        if self.input_permutation is None:
            return stored
        permutation = tensor_parallel.local(self.input_permutation).long()
        return torch.empty_like(stored).index_copy_(1, permutation, stored)

    @property
    def layout(self) -> Layout:
        """The weight in the layout of its backend, packed if it was not.

        Raises:
            NoBackendError: if no backend supports the layer.
        """
        return self._pack(self.dtype)

    # Backends

    def _select(self) -> str:
        """Returns the name of the backend to use; raises NoBackendError without one."""
        device = self.device
        backend = "reference" if device.type == "meta" else self.backend
        problem = Problem(self.format, *self.weight_shape, self.dtype, device, self.activations)
        return select(problem, backend).name

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

    def _pack(self, dtype: torch.dtype) -> Layout:
        """Returns the layout for x of a dtype, packed if need be."""
        stored = self.stored
        layout = stored.layout
        if layout is None or dtype not in layout.dtypes:
            if self.group is not None:
                self.group.join(dtype)
            layout = stored.pack(self.backend, dtype, self.activations)
        self.backend_name, self._layout_device = stored.backend_name, stored.device
        return layout

    # Calls

    def forward(self, input: Tensor) -> Tensor:
        """Computes ``x @ W_hat.T + bias``.

        Args:
            input: x, ``[..., k]``.

        Returns:
            ``[..., n]`` in the dtype of x, or in autocast's.

        Raises:
            TypeError: if x is not a floating tensor, or of a dtype without kernels.
            ValueError: if x is not ``[..., k]`` or is on another device.
            NoBackendError: if no backend supports the layer.
        """
        if torch.compiler.is_compiling():
            return self._call_in_graph(input)
        # The common case in 1 us: the layout is that of the layer's parameters, and fits x.
        layout: Any = None
        parameters: Any = self._parameters
        # A parametrised bias is not in the dict. nn.Module takes 0.5 us to find a bias of None.
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401
        try:
            stored = parameters["weight_packed"].stored
            layout = stored.layout
            is_ready = (
                layout is not None
                and parameters["weight_scale"].stored is stored
                and parameters[self._table_name].stored is stored
                and input.dtype in layout.dtypes
                and not may_autocast()
                and (bias is None or bias.dtype == input.dtype)
                and self._buffers["input_permutation"] is None
            )
        except (AttributeError, RuntimeError):  # no tensors of a StoredWeight, or x on meta
            is_ready = False
        if not is_ready:
            return self._prepare_and_call(input)
        y: Tensor = layout.forward(input, bias)
        return y

    def _prepare_and_call(self, x: Tensor) -> Tensor:
        """Calls a layer that may have to be packed, or an x or a bias that have to be cast."""
        dtype = compute_dtype(x)
        if tensor_parallel.is_dtensor(x) or tensor_parallel.is_sharded(self):
            return tensor_parallel.call(self, x, dtype)
        known, stored = self._stored(), self.stored
        if stored is known:
            return self._call(x, self._pack(dtype), dtype)
        self._is_replaced_often, self._was_replaced = self._was_replaced, True
        q = stored.quantised()
        layout = self._pack(dtype)
        with saved_as_canonical(q, layout, self.backend, dtype, self.activations):
            return self._call(x, layout, dtype)

    def _call(self, x: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
        bias: Tensor | None = self.bias
        if self.input_permutation is not None:
            x = x.index_select(-1, self.input_permutation)
        if not layout.casts:
            x = x if x.dtype == dtype else x.to(dtype)
            bias = bias if bias is None or bias.dtype == dtype else bias.to(dtype)
        y: Tensor = layout.forward(x, bias)
        return y

    def _call_in_graph(self, x: Tensor) -> Tensor:
        if self._is_replaced_often:  # a layout in the graph would be compiled again at each call
            make_eager_calls()
            y: Tensor = EAGER["forward"](self, x)
            return y
        dtype = compute_dtype(x)
        self._pack_for_graph(dtype)
        layout = self._layout_in_graph()  # read after packing: the trace keeps what it has read
        return self._call(x, layout, dtype)

    @constant_in_graphs
    def _pack_for_graph(self, dtype: torch.dtype) -> bool:
        """Packs the layer while torch.compile or torch.export traces it."""
        with without_dispatch_modes():
            self._pack(dtype)
        return True

    def _dequantised_in_graph(self) -> Tensor:
        if self.activations != "float":  # x would be rounded
            make_eager_calls()
            outside: Tensor = EAGER["dequantise"](self)
            return outside
        self._pack_for_graph(self.dtype)
        layout = self._layout_in_graph()
        # Products with unit vectors are exact, and are dropped where only the dtype is used.
        eye = torch.eye(self.in_features, dtype=self.dtype, device=self._layout_device)
        if self.input_permutation is not None:
            eye = eye.index_select(1, self.input_permutation)
        weight: Tensor = layout.forward(eye).t()
        return weight

    @constant_in_graphs  # torch.vmap reads it, and dynamo cannot trace Format.__str__
    def extra_repr(self) -> str:
        """Shows the sizes as nn.Linear does, format, backend and activations."""
        rounded = "" if self.activations == "float" else f", activations={self.activations}"
        return f"{super().extra_repr()}, {self.format}, backend={self.backend_name}{rounded}"


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


# Methods that a graph of torch.compile calls as they are, by name; see ``make_eager_calls``.
EAGER: dict[str, Callable[..., Any]] = {}


@constant_in_graphs
def make_eager_calls() -> bool:
    """Fills ``EAGER`` while a graph is traced: the compiler takes seconds to import."""
    for name in ("forward", "dequantise"):
        EAGER.setdefault(name, torch.compiler.disable(getattr(QuantisedLinear, name)))
    return True


def _parameter(bias: Tensor, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """Copies a bias as a parameter; a frozen one stays frozen."""
    frozen = isinstance(bias, nn.Parameter) and not bias.requires_grad
    with torch.inference_mode(False):  # autograd cannot save tensors made in inference mode
        copy = bias.detach().to(device, dtype, copy=True)
    return nn.Parameter(copy, requires_grad=not frozen)
