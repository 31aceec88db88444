"""Making functional ops of torch for stacks of experts.

Every layout of a stack has one op, ``y[t, j] = x @ W_hat[expert_ids[t, j]].T``, and one for the
gradient of x. ``define_expert_op`` makes both from two functions that launch kernels, as
``define_linear_op`` does for one weight.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from fdk_formats.ops import (
    Kernel,
    Op,
    define_op,
    devices_of,
    no_autocast,
    save_arguments,
    saved_arguments,
)
from fdk_formats.torch_internals import is_plain_call

ID_DTYPES = (torch.int32, torch.int64)


class ExpertOp(Op):
    """An op over a stack whose plain calls run its kernels without torch's dispatcher.

    Attributes:
        op: ``torch.ops.<namespace>.<name>.default``, for ``opcheck`` and for graphs.
        grad_op: calls ``torch.ops.<namespace>.<name>_grad_x``.
    """

    def __init__(self, op: Op, grad_op: Op, run: Kernel, devices: frozenset[str]) -> None:
        super().__init__(op.op, op.function)
        self.grad_op, self._run, self._devices = grad_op, run, devices

    def __call__(self, x: Tensor, expert_ids: Tensor, *args: Any) -> Tensor:
        """Returns ``op(x, expert_ids, *layout, bias, routing_weights, experts, n, k)``.

        Raises:
            NotImplementedError: in forward mode, for an argument with a tangent.
        """
        bias, routing_weights = args[-5:-3]
        is_plain = (
            is_plain_call(x, bias)
            and is_plain_call(expert_ids, routing_weights)
            and x.device.type in self._devices
        )
        if is_plain:
            return self._run(x, expert_ids, *args)
        y: Tensor = super().__call__(x, expert_ids, *args)
        return y


def define_expert_op(
    library: Library,
    name: str,
    *,
    layout: str,
    forward: Kernel,
    grad_x: Kernel,
    dispatch_keys: Sequence[str],
) -> ExpertOp:
    """Defines the product with a stack of experts over one packed layout, with its gradients.

    Defines two functional ops in the namespace of ``library``:

        <name>(Tensor x, Tensor expert_ids, <layout>, Tensor? bias, Tensor? routing_weights,
               int experts, int n, int k) -> Tensor
        <name>_grad_x(Tensor grad_y, Tensor expert_ids, <layout>, int experts, int n, int k)
               -> Tensor

    as ``ExpertLayout.forward`` describes them. x, bias and routing weights have gradients. The
    layout's tensors are saved for them, not copied; x is saved only for those of routing weights,
    which compute y again.

    Args:
        library: the caller's library, ``Library("fdk_cpu", "FRAGMENT")``.
        name: name of the op, ``expert_linear``.
        layout: the layout's arguments as schema text, tensors first.
        forward: ``(x, expert_ids, *layout, bias, routing_weights, experts, n, k)``, with x
            ``[t, k]`` or ``[t, top_k, k]``, to a new contiguous tensor ``[t, top_k, n]``, or
            ``[t, n]`` with routing weights. It is called with t, top_k and n above 0, and with
            contiguous tensors; on a CPU ids are -1 to ``experts - 1``.
        grad_x: ``(grad_y :: [t, top_k, n], expert_ids, *layout, experts, n, k)`` to
            ``[t, top_k, k]``, likewise.
        dispatch_keys: where the kernels run: ``("CUDA",)``.

    Returns:
        The op, to be called by the layout.
    """
    layout_args = layout.count(",") + 1
    # Places among the arguments, from the left: torch may add one on the right.
    bias_at, routing_at = 2 + layout_args, 3 + layout_args

    def run(x: Tensor, expert_ids: Tensor, *args: Any) -> Tensor:
        *own, bias, routing_weights, experts, n, k = args
        check_arguments(name, x, expert_ids, own[0], bias, routing_weights, experts, n, k)
        check_range(name, expert_ids, experts)
        if expert_ids.numel() == 0 or n == 0:
            return x.new_zeros(_result_shape(expert_ids, routing_weights, n))
        x, expert_ids = x.contiguous(), expert_ids.contiguous()
        bias = None if bias is None else bias.contiguous()
        routing_weights = None if routing_weights is None else routing_weights.contiguous()
        with no_autocast(x.device.type):
            return forward(x, expert_ids, *own, bias, routing_weights, experts, n, k)

    def fake(x: Tensor, expert_ids: Tensor, *args: Any) -> Tensor:
        *own, bias, routing_weights, experts, n, k = args
        check_arguments(name, x, expert_ids, own[0], bias, routing_weights, experts, n, k)
        return x.new_empty(_result_shape(expert_ids, routing_weights, n))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, expert_ids, *own, bias, routing_weights, experts, n, k = inputs
        needs_x = ctx.needs_input_grad[routing_at]
        kept = x if needs_x else None
        save_arguments(ctx, (kept, expert_ids, routing_weights, bias if needs_x else None, *own))
        ctx.is_shared, ctx.dtype = x.ndim == 2, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.sizes = experts, n, k

    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, expert_ids, routing_weights, bias, *own = saved_arguments(ctx)
        experts = ctx.sizes[0]
        wide = torch.promote_types(grad_y.dtype, torch.float32)
        dx = dbias = d_routing = None
        grad_pairs = grad_y
        if routing_weights is not None:
            grad_pairs = grad_y[:, None].to(wide) * routing_weights[..., None].to(wide)
        if ctx.needs_input_grad[0]:
            dx = grad_op(grad_pairs.to(ctx.dtype), expert_ids, *own, *ctx.sizes)
            dx = dx.sum(1) if ctx.is_shared else dx
        if ctx.needs_input_grad[bias_at]:
            dbias = grad_bias(grad_pairs, expert_ids, experts).to(ctx.bias_dtype)
        if ctx.needs_input_grad[routing_at]:
            y = op(x, expert_ids, *own, bias, None, *ctx.sizes)
            d_routing = (grad_y[:, None].to(wide) * y.to(wide)).sum(-1).to(routing_weights.dtype)
        return dx, None, *[None] * layout_args, dbias, d_routing, None, None, None

    def run_grad(grad_y: Tensor, expert_ids: Tensor, *args: Any) -> Tensor:
        *own, experts, n, k = args
        if grad_y.shape != (*expert_ids.shape, n):
            raise ValueError(
                f"{name}: grad_y must be {[*expert_ids.shape, n]}, got {list(grad_y.shape)}"
            )
        if expert_ids.numel() == 0 or n == 0:
            return grad_y.new_zeros((*expert_ids.shape, k))
        with no_autocast(grad_y.device.type):
            return grad_x(grad_y.contiguous(), expert_ids.contiguous(), *own, experts, n, k)

    def fake_grad(grad_y: Tensor, expert_ids: Tensor, *args: Any) -> Tensor:
        return grad_y.new_empty((*expert_ids.shape, args[-1]))

    def setup_grad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *others = inputs
        save_arguments(ctx, others)

    def backward_grad(ctx: Any, grad_dx: Tensor) -> tuple[Tensor | None, ...]:
        expert_ids, *own, experts, n, k = saved_arguments(ctx)
        d_grad_y = op(grad_dx, expert_ids, *own, None, None, experts, n, k)
        return d_grad_y, None, *[None] * layout_args, None, None, None

    op = define_op(
        library,
        f"{name}(Tensor x, Tensor expert_ids, {layout}, Tensor? bias, Tensor? routing_weights, "
        f"int experts, int n, int k) -> Tensor",
        run=run,
        fake=fake,
        backward=backward,
        setup_context=setup_context,
        dispatch_keys=dispatch_keys,
    )
    grad_op = define_op(
        library,
        f"{name}_grad_x(Tensor grad_y, Tensor expert_ids, {layout}, int experts, int n, int k) "
        f"-> Tensor",
        run=run_grad,
        fake=fake_grad,
        backward=backward_grad,
        setup_context=setup_grad,
        dispatch_keys=dispatch_keys,
    )
    return ExpertOp(op, grad_op, run, devices_of(dispatch_keys))


def _result_shape(expert_ids: Tensor, routing_weights: Tensor | None, n: int) -> tuple[int, ...]:
    tokens, top_k = expert_ids.shape
    return (tokens, top_k, n) if routing_weights is None else (tokens, n)


def check_arguments(
    name: str,
    x: Tensor,
    expert_ids: Tensor,
    first: Tensor,
    bias: Tensor | None,
    routing_weights: Tensor | None,
    experts: int,
    n: int,
    k: int,
) -> None:
    """Raises an error if arguments do not fit each other or the stack."""
    if expert_ids.ndim != 2 or expert_ids.dtype not in ID_DTYPES:
        raise TypeError(
            f"{name}: expert_ids must be int32 or int64 [tokens, top_k], "
            f"got {expert_ids.dtype} {list(expert_ids.shape)}"
        )
    tokens, top_k = expert_ids.shape
    if x.shape not in ((tokens, k), (tokens, top_k, k)):
        raise ValueError(
            f"{name}: x must be [{tokens}, {k}] or [{tokens}, {top_k}, {k}], got {list(x.shape)}"
        )
    if not x.is_floating_point():
        raise TypeError(f"{name}: x must be floating, got {x.dtype}")
    for what, tensor in (
        ("x", x),
        ("expert_ids", expert_ids),
        ("bias", bias),
        ("routing_weights", routing_weights),
    ):
        if tensor is not None and tensor.device != first.device:
            raise ValueError(f"{name}: {what} must be on {first.device}, got {tensor.device}")
    if bias is not None and (bias.shape != (experts, n) or bias.dtype != x.dtype):
        raise ValueError(
            f"{name}: bias must be {x.dtype} [{experts}, {n}], got {bias.dtype} {list(bias.shape)}"
        )
    if routing_weights is not None and (
        routing_weights.shape != expert_ids.shape or not routing_weights.is_floating_point()
    ):
        raise ValueError(
            f"{name}: routing_weights must be floating [{tokens}, {top_k}], "
            f"got {routing_weights.dtype} {list(routing_weights.shape)}"
        )


def check_mlp_arguments(
    shape: tuple[int, ...],
    down_shape: tuple[int, ...],
    x: Tensor,
    expert_ids: Tensor,
    first: Tensor,
    routing_weights: Tensor,
    bias: Tensor | None,
    down_bias: Tensor | None,
) -> None:
    """Raises an error if arguments of ``ExpertLayout.mlp`` do not fit each other or the stacks."""
    experts, both, k = shape
    wanted = experts, down_shape[1], both // 2
    if tuple(down_shape) != wanted:
        raise ValueError(f"mlp: down must be {list(wanted)}, got {list(down_shape)}")
    check_arguments("mlp", x, expert_ids, first, bias, routing_weights, experts, both, k)
    if down_bias is not None and (down_bias.shape != wanted[:2] or down_bias.dtype != x.dtype):
        raise ValueError(
            f"mlp: down_bias must be {x.dtype} {list(wanted[:2])}, "
            f"got {down_bias.dtype} {list(down_bias.shape)}"
        )


def check_range(name: str, expert_ids: Tensor, experts: int) -> None:
    """Raises ValueError for ids outside the stack, on a CPU, where finding them is cheap."""
    if expert_ids.device.type != "cpu" or expert_ids.numel() == 0:
        return
    low, high = (int(bound) for bound in expert_ids.aminmax())
    if low < -1 or high >= experts:
        raise ValueError(
            f"{name}: expert_ids must be 0 to {experts - 1}, or -1 for none, got {low} to {high}"
        )


def tokens_of_experts(expert_ids: Tensor, experts: int) -> list[tuple[int, Tensor]]:
    """Returns the experts hit, each with the flat indices of its tokens in order.

    Args:
        expert_ids: ``[t, top_k]``; others than 0 to ``experts - 1`` are left out.
        experts: number of experts.
    """
    flat = expert_ids.reshape(-1)
    order = flat.argsort(stable=True)
    sizes = torch.bincount(flat.clamp(-1, experts) + 1, minlength=experts + 2).tolist()
    parts = order.split(sizes)[1:-1]
    return [(expert, indices) for expert, indices in enumerate(parts) if len(indices)]


def rows_of_pairs(x: Tensor, expert_ids: Tensor) -> Tensor:
    """Returns x of each pair of a token and an expert, ``[t * top_k, k]``."""
    rows = x[:, None].expand(*expert_ids.shape, x.shape[1]) if x.ndim == 2 else x
    return rows.reshape(-1, x.shape[-1])


def expert_products(
    x: Tensor,
    expert_ids: Tensor,
    weight_of: Callable[[int], Tensor],
    bias: Tensor | None,
    shape: Sequence[int],
) -> Tensor:
    """Computes ``x @ weight_of(e).T + bias[e]`` expert by expert, ``[t, top_k, n]``.

    Args:
        x: ``[t, k]`` or ``[t, top_k, k]``.
        expert_ids: ``[t, top_k]``; zeros for -1.
        weight_of: returns the weight of an expert, ``[n, k]``.
        bias: ``[experts, n]`` or None.
        shape: ``(experts, n, k)``.
    """
    experts, n, _ = shape
    rows = rows_of_pairs(x, expert_ids)
    y = x.new_zeros(len(rows), n)
    for expert, own in tokens_of_experts(expert_ids, experts):
        added = None if bias is None else bias[expert]
        y[own] = torch.nn.functional.linear(rows[own], weight_of(expert), added)
    return y.view(*expert_ids.shape, n)


def routed_sum(y: Tensor, routing_weights: Tensor) -> Tensor:
    """Sums the outputs of a token's experts ``[t, top_k, n]``, weighted, in float32 or wider."""
    wide = torch.promote_types(y.dtype, torch.float32)
    return (y.to(wide) * routing_weights[..., None].to(wide)).sum(1).to(y.dtype)


def grad_bias(grad_y: Tensor, expert_ids: Tensor, experts: int) -> Tensor:
    """Sums the gradients ``[t, top_k, n]`` of each expert's outputs, in float32 or wider."""
    # A product, because adding at indices has no fixed order on a GPU.
    wide = torch.promote_types(grad_y.dtype, torch.float32)
    rows = torch.arange(experts, device=expert_ids.device)[:, None]
    hits = (expert_ids.reshape(1, -1) == rows).to(wide)
    return hits @ grad_y.to(wide).flatten(0, 1)
