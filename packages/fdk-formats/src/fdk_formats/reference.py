"""The reference backend: dequantise, then multiply. Other backends are tested against it."""

import torch
from torch import Tensor
from torch.library import Library

from fdk_formats.backends import (
    ExpertLayout,
    Layout,
    Problem,
    all_reasons,
    check_unrotated,
    no_activations,
    register,
    wrong_dtype,
)
from fdk_formats.expert_ops import (
    define_expert_op,
    expert_products,
    routed_sum,
    tokens_of_experts,
)
from fdk_formats.format import Format
from fdk_formats.int8 import int8_linear
from fdk_formats.ops import define_linear_op
from fdk_formats.tensor import QuantisedStack, QuantisedTensor

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


def reference_expert_linear(
    x: Tensor,  # [t, k, dtype] or [t, top_k, k]
    expert_ids: Tensor,  # [t, top_k, int32 or int64]
    packed: Tensor,  # the tensors of QuantisedStack
    scale: Tensor,
    codebook: Tensor | None,
    zero_point: Tensor | None,
    format: str,
    bias: Tensor | None,  # [experts, n, dtype]
    routing_weights: Tensor | None,  # [t, top_k]
    experts: int,
    n: int,
    k: int,
) -> Tensor:
    """Computes ``x @ W_hat[expert_ids].T + bias``, see ``ExpertLayout``: ``[t, top_k, n]``."""
    stack = QuantisedStack(
        Format.parse(format), (experts, n, k), packed, scale, codebook, zero_point
    )

    def weight_of(expert: int) -> Tensor:
        return stack[expert].dequantise(x.dtype)

    y = expert_products(x, expert_ids, weight_of, bias, stack.shape)
    return y if routing_weights is None else routed_sum(y, routing_weights)


def reference_expert_grad_x(
    grad_y: Tensor,  # [t, top_k, n, dtype]
    expert_ids: Tensor,
    packed: Tensor,
    scale: Tensor,
    codebook: Tensor | None,
    zero_point: Tensor | None,
    format: str,
    experts: int,
    n: int,
    k: int,
) -> Tensor:
    """Computes ``grad_y @ W_hat[expert_ids]``, ``[t, top_k, k, dtype]``."""
    stack = QuantisedStack(
        Format.parse(format), (experts, n, k), packed, scale, codebook, zero_point
    )
    rows = grad_y.view(-1, n)
    dx = grad_y.new_zeros(len(rows), k)
    for expert, own in tokens_of_experts(expert_ids, experts):
        dx[own] = rows[own] @ stack[expert].dequantise(grad_y.dtype)
    return dx.view(*expert_ids.shape, k)


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

_expert_op = define_expert_op(
    _library,
    "reference_expert_linear",
    layout=_SCHEMA,
    forward=reference_expert_linear,
    grad_x=reference_expert_grad_x,
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


class ReferenceExpertLayout(ExpertLayout):
    """The canonical tensors of a stack, unchanged.

    Attributes:
        dtypes: the dtypes of x that ``forward`` supports.
    """

    dtypes = DTYPES
    packed: Tensor
    scale: Tensor
    codebook: Tensor | None
    zero_point: Tensor | None

    def __init__(self, stack: QuantisedStack) -> None:
        super().__init__()
        self.format, self.shape = stack.format, stack.shape
        for name in ("packed", "scale", "codebook", "zero_point"):
            self.register_buffer(name, getattr(stack, name), persistent=False)

    def forward(
        self,
        x: Tensor,
        expert_ids: Tensor,
        bias: Tensor | None = None,
        routing_weights: Tensor | None = None,
    ) -> Tensor:
        """See ``ExpertLayout``."""
        tensors = self.packed, self.scale, self.codebook, self.zero_point
        y: Tensor = _expert_op(
            x, expert_ids, *tensors, str(self.format), bias, routing_weights, *self.shape
        )
        return y

    def unpack(self) -> QuantisedStack:
        """See ``ExpertLayout``."""
        tensors = (self.packed, self.scale, self.codebook, self.zero_point)
        return QuantisedStack(self.format, self.shape, *tensors)


class ReferenceBackend:
    """Supports every format on every device, slowly."""

    name = "reference"

    def unsupported(self, problem: Problem) -> str | None:
        """See ``Backend``."""
        return all_reasons(
            wrong_dtype(problem.dtype, DTYPES),
            None if problem.experts is None else no_activations(problem),
        )

    def priority(self, problem: Problem) -> int:
        """See ``Backend``."""
        return 0

    def pack(self, q: QuantisedTensor, *, dtype: torch.dtype, activations: str = "float") -> Layout:
        """See ``Backend``."""
        check_unrotated(q.format)
        return ReferenceLayout(q, activations)

    def pack_stack(
        self, stack: QuantisedStack, *, dtype: torch.dtype, activations: str = "float"
    ) -> ExpertLayout:
        """See ``ExpertBackend``."""
        check_unrotated(stack.format)
        return ReferenceExpertLayout(stack)


register(ReferenceBackend(), by_name_only=True)
