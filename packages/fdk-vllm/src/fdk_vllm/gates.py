"""Gates of experts, between their projections: SwiGLU and others, by vLLM's names for them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# gpt-oss: constants of its reference, which vLLM has in its kernel.
OPENAI: Any = {"limit": 7.0, "alpha": 1.702, "beta": 1.0}


@dataclass(frozen=True)
class Gate:
    """A gate of experts.

    Attributes:
        order: how the first projection's outputs are ordered, see ``ExpertPart.gates``.
        function: computes the second projection's input from gates and what they multiply, or from
            one tensor without gates. None for SwiGLU, which layouts of experts compute.
    """

    order: str
    function: Callable[..., Tensor] | None

    def __call__(self, *parts: Tensor) -> Tensor:
        """Computes the second projection's input.

        Args:
            parts: the first projection's outputs ``[..., 2 * inner]``, or gates and what they
                multiply, each ``[..., inner]``.

        Returns:
            ``[..., inner]`` in the dtype of the parts.
        """
        if self.order == "interleaved":
            parts = parts[0][..., ::2], parts[0][..., 1::2]
        elif self.order == "first" and len(parts) == 1:
            parts = parts[0].chunk(2, -1)
        return (swiglu if self.function is None else self.function)(*parts)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Computes ``silu(gate) * up``."""
    return functional.silu(gate) * up


def clamped_swiglu(gate: Tensor, up: Tensor, *, limit: float, alpha: float, beta: float) -> Tensor:
    """Computes ``g * sigmoid(alpha * g) * (u + beta)`` for gates and values clamped to a limit."""
    g, u = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
    return (g * torch.sigmoid(alpha * g) * (u + beta)).to(gate.dtype)


def geglu(gate: Tensor, up: Tensor, *, approximate: str = "none") -> Tensor:
    """Computes ``gelu(gate) * up``."""
    return functional.gelu(gate, approximate=approximate) * up


def squared_relu(x: Tensor) -> Tensor:
    """Computes ``relu(x) ** 2``."""
    return functional.relu(x).square()


def gate_of(activation: str, limit: float | None, alpha: float | None, beta: float | None) -> Gate:
    """Returns the gate that vLLM calls by a name.

    Args:
        activation: value of ``MoEActivation``.
        limit: clamps gates and what they multiply, or None.
        alpha: factor of the gates within the sigmoid; None for 1.
        beta: is added to what they multiply; None for 0.

    Raises:
        ValueError: if there is none.
    """
    tanh: Any = {"approximate": "tanh"}
    if activation == "silu" and limit is not None:
        return Gate("first", partial(clamped_swiglu, limit=limit, alpha=1.0, beta=0.0))
    if activation == "swigluoai_uninterleave" and limit is not None:
        own: Any = {"alpha": 1.0 if alpha is None else alpha, "beta": 0.0 if beta is None else beta}
        return Gate("first", partial(clamped_swiglu, limit=limit, **own))
    gates = {
        "silu": Gate("first", None),
        "gelu": Gate("first", geglu),
        "gelu_tanh": Gate("first", partial(geglu, **tanh)),
        "swigluoai": Gate("interleaved", partial(clamped_swiglu, **OPENAI)),
        "silu_no_mul": Gate("none", functional.silu),
        "gelu_no_mul": Gate("none", functional.gelu),
        "gelu_tanh_no_mul": Gate("none", partial(functional.gelu, **tanh)),
        "relu2_no_mul": Gate("none", squared_relu),
    }
    if activation not in gates:
        raise ValueError(
            f"fdk computes experts with {', '.join(gates)}, got {activation}: leave them in 16 "
            'bits ("skip": ["experts"])'
        )
    return gates[activation]
