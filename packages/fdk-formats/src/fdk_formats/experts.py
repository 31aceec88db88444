"""QuantisedExperts: the experts of a mixture, with weights of 1 to 8 bits.

transformers 5 holds the experts of a layer as 3-D parameters ``gate_up_proj`` (or ``up_proj``) and
``down_proj`` of one module, whose class ``use_experts_implementation`` describes: gated or not,
with biases or not, transposed or not. ``QuantisedExperts`` takes the place of such a module; its
projections are modules of their own.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fdk_formats.backends import ExpertLayout
from fdk_formats.expert_linear import expert_linear
from fdk_formats.expert_ops import routed_sum
from fdk_formats.format import Format
from fdk_formats.packed_module import PackedModule, compute_dtype, copied_parameter
from fdk_formats.quantise import quantise_stack
from fdk_formats.rotated_layout import RotatedExpertLayout
from fdk_formats.rotation import rotate
from fdk_formats.stored_weight import StoredWeight, zero_weight
from fdk_formats.tensor import CanonicalWeight, QuantisedStack
from fdk_formats.torch_internals import without_dispatch_modes

# Attributes that ``use_experts_implementation`` sets.
DESCRIPTION = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")


def is_experts(module: nn.Module) -> bool:
    """Returns whether a module holds experts as ``use_experts_implementation`` describes them."""
    is_whole = is_described(module) and hasattr(module, "_apply_gate")
    return is_whole and len(projections_of(module)) == 2


def is_described(module: nn.Module) -> bool:
    """Returns whether ``use_experts_implementation`` describes a module."""
    return all(hasattr(module, name) for name in DESCRIPTION)


def projections_of(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of a module's 3-D parameters that are projections of experts."""
    return tuple(
        name
        for name in PROJECTIONS
        if isinstance(own := module._parameters.get(name), nn.Parameter) and own.ndim == 3
    )


class ExpertLinear(nn.Module):
    """A projection of experts that is not quantised.

    It shares the parameters of the module of transformers that it is made from.

    Args:
        owner: the module.
        name: name of its projection.

    Attributes:
        weight: ``[experts, n, k]``, or ``[experts, k, n]`` if ``is_transposed``.
        bias: ``[experts, n]`` or None.
        is_transposed: see ``weight``.
        owner: the module, in a tuple, so that it is not registered; empty in a copy of a model.
        name: name of the projection.
    """

    bias: Tensor | None

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        # Not by assignment: accelerate's `init_empty_weights` would make copies of it.
        self._parameters["weight"] = owner._parameters[name]
        self._parameters["bias"] = owner._parameters.get(f"{name}_bias")
        self.is_transposed = bool(owner.is_transposed)
        self.owner, self.name = (owner,), name
        self.train(owner.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ExpertLinear":
        made = ExpertLinear.__new__(ExpertLinear)
        memo[id(self)] = made
        state = {**vars(self), "owner": ()}  # the source's module is not copied with it
        vars(made).update(copy.deepcopy(state, memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "owner": ()}

    def stack(self) -> Tensor:
        """Returns the weight as ``[experts, n, k]``."""
        weight: Any = self.weight
        return weight.transpose(1, 2) if self.is_transposed else weight  # type: ignore[no-any-return]

    def forward(
        self, input: Tensor, expert_ids: Tensor, routing_weights: Tensor | None = None
    ) -> Tensor:
        """See ``QuantisedExpertLinear.forward``."""
        return dense_projection(input, expert_ids, self.stack(), self.bias, routing_weights)


def dense_projection(
    input: Tensor,
    expert_ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing_weights: Tensor | None = None,
) -> Tensor:
    """Computes ``QuantisedExpertLinear.forward`` with a weight that is not packed.

    Args:
        input: see there, as for the ids and routing weights.
        expert_ids: see there.
        weight: ``[experts, n, k]``, floating.
        bias: ``[experts, n]`` or None.
        routing_weights: see there.
    """
    dtype = compute_dtype(input)
    y = expert_linear(input.to(dtype), expert_ids, weight, None if bias is None else bias.to(dtype))
    return y if routing_weights is None else routed_sum(y, routing_weights)


class QuantisedExpertLinear(PackedModule):
    """A projection of experts, ``y = x @ W_hat[e].T + bias[e]``, whose stack is quantised.

    Its parameters are the canonical tensors of ``QuantisedStack``, frozen, as those of
    ``QuantisedLinear`` are; and ``bias``.

    Args:
        experts: number of experts.
        in_features: k.
        out_features: n.
        bias: whether each expert has a bias.
        device: device of the weight, which is zero until it is loaded.
        dtype: dtype of ``weight`` and the bias; torch's default if None.
        format: format of the stack, for example ``"kmeans4-g64"``.
        backend: ``auto`` or a backend's name, see ``select``.

    Raises:
        ValueError: if k does not fit the format.

    Example:
        >>> stack = quantise_stack(torch.randn(8, 32, 64), "int4-g32")
        >>> layer = QuantisedExpertLinear.from_quantised(stack, dtype=torch.float32)
        >>> layer(torch.randn(3, 64), torch.tensor([[0, 7], [1, 2], [7, 1]])).shape
        torch.Size([3, 2, 32])
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        format: Format | str,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self._init_backend(backend, "float")
        self.num_experts = experts
        self.in_features, self.out_features = in_features, out_features
        zero = zero_weight(Format.parse(format), (experts, out_features, in_features), device)
        self._init_weight(StoredWeight(zero), torch.get_default_dtype() if dtype is None else dtype)
        zeros = torch.zeros(experts, out_features, dtype=self.dtype, device=device)
        self.register_parameter("bias", nn.Parameter(zeros) if bias else None)

    @classmethod
    def from_quantised(
        cls,
        stack: QuantisedStack,
        bias: Tensor | None = None,
        *,
        backend: str = "auto",
        dtype: torch.dtype = torch.bfloat16,
    ) -> "QuantisedExpertLinear":
        """Makes a projection from a quantised stack, whose tensors it holds themselves.

        Args:
            stack: the stack.
            bias: ``[experts, n]`` or None; copied to the stack's device and ``dtype``.
            backend: ``auto`` or a backend's name, see ``select``.
            dtype: dtype of the activations.

        Raises:
            NoBackendError: if no backend supports it.
            ValueError: if the bias has another shape, or a value of the stack is out of range,
                see ``QuantisedStack.check_values``.
        """
        stack.check_values(cls.__name__)
        experts, n, k = stack.shape
        if bias is not None and bias.shape != (experts, n):
            raise ValueError(
                f"QuantisedExpertLinear: bias must be [{experts}, {n}], got {list(bias.shape)}"
            )
        settings: Any = {"format": stack.format, "backend": backend}
        layer = cls(experts, k, n, bias is not None, "meta", dtype, **settings)
        layer._set_stored(StoredWeight(stack))
        if bias is not None:
            layer.bias = copied_parameter(bias, stack.device, dtype)
        layer.backend_name = layer._select()
        return layer

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        """``(experts, n, k)``."""
        return self.num_experts, self.out_features, self.in_features

    def _set_shape(self, *shape: int) -> None:
        self.num_experts, self.out_features, self.in_features = shape

    def _quantise(self, weight: Tensor) -> CanonicalWeight:
        return quantise_stack(weight, self.format)

    def forward(
        self, input: Tensor, expert_ids: Tensor, routing_weights: Tensor | None = None
    ) -> Tensor:
        """Computes the products of tokens and their experts, see ``ExpertLayout.forward``.

        Args:
            input: ``[t, k]``, or ``[t, top_k, k]``.
            expert_ids: ``[t, top_k]``, integers; -1 for no expert.
            routing_weights: ``[t, top_k]`` or None.

        Returns:
            ``[t, top_k, n]``, or with routing weights the weighted sums ``[t, n]``; in the dtype of
            x, or in autocast's.

        Raises:
            TypeError: if x is not a floating tensor, or of a dtype without kernels.
            ValueError: if the shapes or devices do not fit, or (on a CPU) an id is out of range.
            NoBackendError: if no backend supports the stack.
        """
        if torch.compiler.is_compiling():
            return self._call_in_graph(input, expert_ids, routing_weights)
        return self._prepare_and_call(input, expert_ids, routing_weights)

    def _call(self, layout: ExpertLayout, dtype: torch.dtype, x: Tensor, *args: Any) -> Tensor:
        x = x if x.dtype == dtype else x.to(dtype)
        expert_ids, routing_weights = args
        y: Tensor = layout.forward(x, expert_ids, self._cast_bias(dtype), routing_weights)
        return y

    def mlp(
        self,
        down: "QuantisedExpertLinear",
        input: Tensor,
        expert_ids: Tensor,
        routing_weights: Tensor,
    ) -> Tensor:
        """Computes ``down(silu(gate) * up)`` by the layouts alone, see ``ExpertLayout.mlp``.

        Args:
            down: the second projection.
            input: ``[t, k]``.
            expert_ids: ``[t, top_k]``, integers; -1 for no expert.
            routing_weights: ``[t, top_k]``.

        Returns:
            ``[t, n]`` in the dtype of x, or in autocast's.

        Raises:
            NoBackendError: if no backend supports a stack.
        """
        dtype = compute_dtype(input)
        x = input if input.dtype == dtype else input.to(dtype)
        first, second = self._layout_for(dtype), down._layout_for(dtype)
        biases = self._cast_bias(dtype), down._cast_bias(dtype)
        y: Tensor = first.mlp(second, x, expert_ids, routing_weights, *biases)
        return y

    def _cast_bias(self, dtype: torch.dtype) -> Tensor | None:
        bias: Any = self.bias
        return bias if bias is None or bias.dtype == dtype else bias.to(dtype)  # type: ignore[no-any-return]

    def _call_sharded(self, x: Tensor, *args: Any, dtype: torch.dtype) -> Tensor:
        raise TypeError(
            "QuantisedExpertLinear: its parameters are sharded: call the module that fully_shard "
            "returned, whose hooks gather them"
        )

    def _dequantised_in_graph(self) -> Tensor:
        self._pack_for_graph(self.dtype)
        layout = self._layout_in_graph()
        # Products with unit vectors are exact, and are dropped where only the dtype is used.
        eye = torch.eye(self.in_features, dtype=self.dtype, device=self._layout_device)
        ids = torch.arange(self.num_experts, device=self._layout_device)
        is_rotated = isinstance(layout, RotatedExpertLayout)  # exact before it is rotated back
        unrotated = layout.layout if is_rotated else layout
        products: Tensor = unrotated.forward(eye, ids.expand(self.in_features, -1))
        weight = products.permute(1, 2, 0)
        return rotate(weight, inverse=True) if is_rotated else weight

    def extra_repr(self) -> str:
        """Shows the sizes, format and backend."""
        sizes = f"experts={self.num_experts}, in_features={self.in_features}"
        return (
            f"{sizes}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self.format}, backend={self.backend_name}"
        )


class QuantisedExperts(nn.Module):
    """The experts of a mixture, in the place of a module of transformers.

    Its projections are ``gate_up_proj`` (or ``up_proj``, for experts without a gate) and
    ``down_proj``: each a ``QuantisedExpertLinear``, or an ``ExpertLinear`` if it was skipped. Gate,
    activation and norm are those of the source's class; other attributes and modules of the source
    are its own. Where the gate is SwiGLU (``silu(gate) * up``, no clamps, not interleaved), both
    projections are one call of their layouts, which a backend may fuse.

    Args:
        source: the module, described by ``use_experts_implementation``.
        projections: both projections by name.

    Attributes:
        experts_class: class of the source.
        is_swiglu: whether the layouts may compute the gate too.
    """

    def __init__(self, source: nn.Module, projections: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.experts_class: Any = type(source)
        self.is_swiglu = False
        for name, projection in projections.items():
            self.add_module(name, projection)
        self.train(source.training)

    def take_over(self, source: nn.Module, memo: dict[int, Any] | None = None) -> None:
        """Takes the attributes and other modules of the source, such as its activation.

        Args:
            source: the module.
            memo: of ``copy.deepcopy``, for copies; None to share them.
        """
        own = vars(self)
        others = {name: value for name, value in vars(source).items() if name not in own}
        modules = dict(source.named_children())
        if memo is not None:
            others, modules = copy.deepcopy((others, modules), memo)
            for name, projection in self.named_children():
                if isinstance(projection, ExpertLinear):  # one that was skipped
                    modules[name] = copy.deepcopy(projection, memo)
        own.update({"has_post_expert_norm": False} | others)  # not in transformers before 5.20
        for name, module in modules.items():
            self._modules[name] = module
        self.is_swiglu = self._has_swiglu()

    def _has_swiglu(self) -> bool:
        """Computes the gate of some values: classes of transformers do not say what theirs is."""
        own: Any = self
        projections = [own._modules.get(name) for name in ("gate_up_proj", "down_proj")]
        if own.has_post_expert_norm or not all(
            isinstance(projection, QuantisedExpertLinear) for projection in projections
        ):
            return False
        scales = torch.logspace(-2, 4, 8, device="cpu")[:, None]
        generator = torch.Generator().manual_seed(0)
        sizes = len(scales), projections[0].out_features
        with torch.no_grad(), without_dispatch_modes():
            values = torch.randn(sizes, generator=generator, device="cpu") * scales
            gate, up = values.chunk(2, dim=-1)
            try:
                gated = own.experts_class._apply_gate(self, values)
            except RuntimeError:  # it has weights, which may be on another device
                return False
            return torch.equal(gated, nn.functional.silu(gate) * up)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Computes the weighted sum of each token's experts.

        Args:
            hidden_states: ``[t, k]``.
            top_k_index: experts of each token, ``[t, top_k]``; those from the number of experts on
                are on another process.
            top_k_weights: their weights, ``[t, top_k]``.

        Returns:
            ``[t, k]``.
        """
        own: Any = self
        first = own.gate_up_proj if own.has_gate else own.up_proj
        top_k_index, down = local_experts(own, top_k_index), own.down_proj
        if own.is_swiglu and first._only_calls_layout() and down._only_calls_layout():
            y: Tensor = first.mlp(down, hidden_states, top_k_index, top_k_weights)
            return y.to(hidden_states.dtype)
        return routed_experts(own, first, down, hidden_states, top_k_index, top_k_weights)


def local_experts(own: Any, expert_ids: Tensor) -> Tensor:
    """Replaces the ids of experts of other processes by -1."""
    # transformers 5.17 lacks the attribute: there may be such ids.
    if not getattr(own, "_is_expert_parallel", True):
        return expert_ids
    return expert_ids.where(expert_ids < own.num_experts, -1)


def routed_experts(
    own: Any,
    first: Callable[..., Tensor],
    down: Callable[..., Tensor],
    hidden_states: Tensor,
    expert_ids: Tensor,
    routing_weights: Tensor,
) -> Tensor:
    """Computes the weighted sum of each token's experts from products with both projections.

    Args:
        own: a module with the attributes of one of transformers, and its class as
            ``experts_class``.
        first: computes products with ``gate_up_proj`` or ``up_proj``, as
            ``QuantisedExpertLinear.forward`` does.
        down: the same with ``down_proj``.
        hidden_states: ``[t, k]``.
        expert_ids: ``[t, top_k]``; -1 for no expert.
        routing_weights: ``[t, top_k]``.

    Returns:
        ``[t, k]``.
    """
    hidden = first(hidden_states, expert_ids)  # [t, top_k, 2 n or n]
    hidden = own.experts_class._apply_gate(own, hidden) if own.has_gate else own.act_fn(hidden)
    if not own.has_post_expert_norm:
        y = down(hidden, expert_ids, routing_weights)
    else:
        y = own.post_expert_norm(down(hidden, expert_ids))
        y = (y * routing_weights[..., None]).sum(1)
    return y.to(hidden_states.dtype)


def experts_like(
    source: nn.Module, quantised: Mapping[str, QuantisedExpertLinear]
) -> QuantisedExperts:
    """Makes the quantised counterpart of experts; ``take_over`` completes it.

    Args:
        source: the module of transformers.
        quantised: quantised projections by name; others stay as they are.
    """
    projections = {name: ExpertLinear(source, name) for name in projections_of(source)}
    return QuantisedExperts(source, projections | dict(quantised))


def layers_and_projections(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of a model by name, and the projections of experts as modules.

    A projection is an ``ExpertLinear``, the same one for each name of its module.
    """
    made: dict[int, list[ExpertLinear]] = {}
    for name, module in model.named_modules(remove_duplicate=remove_duplicate):
        yield name, module
        if is_experts(module):
            own = made.setdefault(
                id(module), [ExpertLinear(module, each) for each in projections_of(module)]
            )
            for projection in own:
                yield f"{name}.{projection.name}".removeprefix("."), projection
