"""QuantisedLinear: a linear layer whose weight is stored in 1 to 8 bits."""

from typing import Any

import torch
from torch import Tensor, nn

from fdk_formats import tensor_parallel
from fdk_formats.backends import Layout
from fdk_formats.format import Format
from fdk_formats.instance_attributes import check_forward
from fdk_formats.packed_module import (
    EAGER,
    PackedModule,
    compute_dtype,
    copied_parameter,
    make_eager_calls,
)
from fdk_formats.quantise import quantise
from fdk_formats.quantised_module import PREFIX
from fdk_formats.rotated_layout import RotatedLayout
from fdk_formats.rotation import rotate
from fdk_formats.stored_weight import StoredWeight, zero_weight
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.torch_internals import constant_in_graphs, may_autocast


class QuantisedLinear(PackedModule, nn.Linear):
    """A linear layer ``y = x @ W_hat.T + bias`` whose weight is stored in 1 to 8 bits.

    It works in place of ``nn.Linear``. Its parameters are the canonical tensors of
    ``QuantisedTensor``, frozen: ``weight_packed``, ``weight_scale`` and ``weight_codebook`` or
    ``weight_zero_point``; and ``bias``. At the first call a backend packs them into the layout of
    its kernels, which then holds their values; they are packed again after they were replaced,
    moved or written to.

    A rotated format (``"kmeans2-g64-hadamard"``) rotates x before the product, see
    ``fdk_formats.rotation``.

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
        self._init_backend(backend, activations)
        self.in_features, self.out_features = in_features, out_features
        self.group: Any = None
        self.register_buffer("input_permutation", None)
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
            ValueError: see ``quantise``; or if ``forward`` is another than that of ``nn.Linear``.
            TypeError: if ``linear`` is not an ``nn.Linear``; see also ``quantise``.
        """
        if not isinstance(linear, nn.Linear):
            got = type(linear).__name__
            raise TypeError(f"QuantisedLinear.from_linear: wanted a torch.nn.Linear, got {got}")
        check_forward("QuantisedLinear.from_linear", linear, nn.Linear)
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
            layer.bias = copied_parameter(bias, q.device, dtype)
        layer.backend_name = layer._select()
        return layer

    @property
    def weight_shape(self) -> tuple[int, int]:
        """``(n, k)``."""
        return self.out_features, self.in_features

    def _set_shape(self, *shape: int) -> None:
        self.out_features, self.in_features = shape
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

    def _before_packing(self, dtype: torch.dtype) -> None:
        if self.group is not None:
            self.group.join(dtype)

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
            is_packed = (
                layout is not None
                and parameters["weight_scale"].stored is stored
                and parameters[self._table_name].stored is stored
            )
            is_ready = (
                is_packed
                and input.dtype in layout.dtypes
                and not may_autocast()
                and (bias is None or bias.dtype == input.dtype)
                and self._buffers["input_permutation"] is None
            )
        except (AttributeError, RuntimeError):  # no tensors of a StoredWeight, or x on meta
            is_packed = is_ready = False
        if is_ready:
            y: Tensor = layout.forward(input, bias)
            return y
        if is_packed and type(input) is Tensor:
            dtype = compute_dtype(input)
            if dtype in layout.dtypes:
                return self._call(layout, dtype, input)
        return self._prepare_and_call(input)

    def _call(self, layout: Layout, dtype: torch.dtype, x: Tensor, *_: Any) -> Tensor:
        bias: Tensor | None = self.bias
        if self.input_permutation is not None:
            x = x.index_select(-1, self.input_permutation)
        if not layout.casts:
            x = x if x.dtype == dtype else x.to(dtype)
            bias = bias if bias is None or bias.dtype == dtype else bias.to(dtype)
        y: Tensor = layout.forward(x, bias)
        return y

    def _call_sharded(self, x: Tensor, *_: Any, dtype: torch.dtype) -> Tensor:
        return tensor_parallel.call(self, x, dtype)

    def _dequantised_in_graph(self) -> Tensor:
        is_fused = self.group is not None and self.format.rotation is not None
        if self.activations != "float" or is_fused:  # x would be rounded, or rotated
            make_eager_calls()
            outside: Tensor = EAGER["dequantise"](self)
            return outside
        self._pack_for_graph(self.dtype)
        layout = self._layout_in_graph()
        # Products with unit vectors are exact, and are dropped where only the dtype is used.
        eye = torch.eye(self.in_features, dtype=self.dtype, device=self._layout_device)
        if isinstance(layout, RotatedLayout):  # exact before it is rotated back
            rotated: Tensor = layout.layout.forward(eye).t()
            stored = rotate(rotated, inverse=True)
            if self.input_permutation is None:
                return stored
            return stored.index_select(1, self.input_permutation.argsort())
        if self.input_permutation is not None:
            eye = eye.index_select(1, self.input_permutation)
        weight: Tensor = layout.forward(eye).t()
        return weight

    @constant_in_graphs  # torch.vmap reads it, and dynamo cannot trace Format.__str__
    def extra_repr(self) -> str:
        """Shows the sizes as nn.Linear does, format, backend and activations."""
        rounded = "" if self.activations == "float" else f", activations={self.activations}"
        return f"{super().extra_repr()}, {self.format}, backend={self.backend_name}{rounded}"
