"""The reference backend: dequantise, then multiply. Other backends are tested against it."""

import torch
from torch import Tensor
from torch.library import Library

from fdk_formats.backends import Layout, Problem, register, wrong_dtype
from fdk_formats.format import Format
from fdk_formats.int8 import int8_linear
from fdk_formats.ops import define_linear_op
from fdk_formats.tensor import QuantisedTensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def reference_linear(
    x: Tensor,  # [m, k, dtype]
    packed: Tensor,  # the tensors of QuantisedTensor
    scale: Tensor,
    codebook: Tensor | None,
    zero_point: Tensor | None,
    format: str,
    bias: Tensor | None,  # [n, dtype]
    n: int,
    k: int,
) -> Tensor:
    """Computes ``x @ W_hat.T + bias``, ``[m, n, dtype]``."""
    q = QuantisedTensor(Format.parse(format), (n, k), packed, scale, codebook, zero_point)
    return torch.nn.functional.linear(x, q.dequantise(x.dtype), bias)


def reference_linear_int8(
    x: Tensor,  # [m, k, dtype]
    packed: Tensor,
    scale: Tensor,
    codebook: Tensor | None,
    zero_point: Tensor | None,
    format: str,
    bias: Tensor | None,  # [n, dtype]
    n: int,
    k: int,
) -> Tensor:
    """Computes ``int8_linear``, ``[m, n, dtype]``."""
    q = QuantisedTensor(Format.parse(format), (n, k), packed, scale, codebook, zero_point)
    return int8_linear(x, q, bias)


def reference_grad_x(
    grad_y: Tensor,  # [m, n, dtype]
    packed: Tensor,
    scale: Tensor,
    codebook: Tensor | None,
    zero_point: Tensor | None,
    format: str,
    n: int,
    k: int,
) -> Tensor:
    """Computes ``grad_y @ W_hat``, ``[m, k, dtype]``."""
    q = QuantisedTensor(Format.parse(format), (n, k), packed, scale, codebook, zero_point)
    return grad_y @ q.dequantise(grad_y.dtype)


_library = Library("fdk_formats", "FRAGMENT")
_SCHEMA = "Tensor packed, Tensor scale, Tensor? codebook, Tensor? zero_point, str format"
_op = define_linear_op(
    _library,
    "reference_linear",
    layout=_SCHEMA,
    forward=reference_linear,
    grad_x=reference_grad_x,
    dispatch_keys=("CompositeExplicitAutograd",),
)
_int8_op = define_linear_op(
    _library,
    "reference_linear_int8",
    layout=_SCHEMA,
    forward=reference_linear_int8,
    grad_x=_op,
    dispatch_keys=("CompositeExplicitAutograd",),
)


class ReferenceLayout(Layout):
    """The canonical tensors, unchanged.

    Attributes:
        dtypes: the dtypes of x that ``forward`` supports.
    """

    dtypes = DTYPES
    packed: Tensor
    scale: Tensor
    codebook: Tensor | None
    zero_point: Tensor | None

    def __init__(self, q: QuantisedTensor, activations: str = "float") -> None:
        super().__init__()
        self.format, self.shape, self.activations = q.format, q.shape, activations
        for name in ("packed", "scale", "codebook", "zero_point"):
            self.register_buffer(name, getattr(q, name), persistent=False)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``Layout``."""
        n, k = self.shape
        op = _op if self.activations == "float" else _int8_op
        return op(
            x, self.packed, self.scale, self.codebook, self.zero_point, str(self.format), bias, n, k
        )

    def unpack(self) -> QuantisedTensor:
        """See ``Layout``."""
        tensors = (self.packed, self.scale, self.codebook, self.zero_point)
        return QuantisedTensor(self.format, self.shape, *tensors)


class ReferenceBackend:
    """Supports every format on every device, slowly."""

    name = "reference"

    def unsupported(self, problem: Problem) -> str | None:
        """See ``Backend``."""
        return wrong_dtype(problem.dtype, DTYPES)

    def priority(self, problem: Problem) -> int:
        """See ``Backend``."""
        return 0

    def pack(self, q: QuantisedTensor, *, dtype: torch.dtype, activations: str = "float") -> Layout:
        """See ``Backend``."""
        return ReferenceLayout(q, activations)


register(ReferenceBackend(), by_name_only=True)
