"""The convention of fdk's torch ops: one functional op per packed layout, and its gradient.

``define_linear_op`` makes both from two functions that launch kernels: checks of the arguments,
the fake (meta) kernel, autograd and the rules of torch.func are the same for every layout.
``define_op`` does the same for any functional op.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library

from fdk_formats.torch_internals import in_transform, is_direct_call, is_plain_call, is_recorded

Kernel = Callable[..., Tensor]
# Used for device types without autocast, and where autocast is off already.
_UNCHANGED = nullcontext()


class Op:
    """An op of torch that also works under the transforms of torch.func, except forward mode.

    ``torch.func.grad``, ``vjp`` and ``jacrev`` refuse gradients that torch.library registered, so
    under a transform a call goes through an autograd.Function with the same gradient.

    Attributes:
        op: ``torch.ops.<namespace>.<name>.default``.
        function: the autograd.Function, or None for an op without a gradient.
    """

    def __init__(self, op: Callable[..., Any], function: Any) -> None:
        self.op, self.function = op, function

    def __call__(self, *args: Any) -> Any:
        """Returns ``op(*args)``.

        Raises:
            NotImplementedError: in forward mode, for a tensor with a tangent.
        """
        if torch.compiler.is_compiling():
            return self.op(*args)
        if self.function is not None and in_transform():
            return self.function.apply(*args)
        if any(isinstance(arg, Tensor) and _has_tangent(arg) for arg in args):
            # torch raises only where a tensor requires a gradient too. Elsewhere the result would
            # have a tangent of zero.
            raise _no_forward_mode(self.op)
        return self.op(*args)


class LinearOp(Op):
    """A linear op whose direct calls run its kernels without torch's dispatcher.

    The dispatcher enters Python twice for an op with a gradient, 20 us a call, and some 100 us a
    call with its gradient. Only calls that torch traces, profiles or transforms need it; see
    ``is_direct_call``.

    Attributes:
        op: ``torch.ops.<namespace>.<name>.default``, for ``opcheck`` and for graphs.
        grad_op: calls ``torch.ops.<namespace>.<name>_grad_x``.
        layout_args: number of the layout's arguments.
    """

    def __init__(
        self,
        op: Op,
        grad_op: Op,
        layout_args: int,
        run: Kernel,
        recorded: type[torch.autograd.Function],
        devices: frozenset[str],
    ) -> None:
        super().__init__(op.op, op.function)
        self.grad_op, self.layout_args = grad_op, layout_args
        self._run, self._recorded, self._devices = run, recorded, devices

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        """Returns ``op(x, *layout, bias, n, k)``.

        Raises:
            NotImplementedError: in forward mode, for x or a bias with a tangent.
        """
        bias = args[-3]
        if is_direct_call(x, bias) and x.device.type in self._devices:
            if not is_recorded(x, bias):
                return self._run(x, *args)
            recorded: Tensor = self._recorded.apply(x, *args)
            return recorded
        y: Tensor = super().__call__(x, *args)
        return y


class GradOp(Op):
    """The gradient of a linear op, whose plain calls run its kernels as those of ``LinearOp`` do.

    In a backward pass nearly all are plain: autograd records it only for second derivatives.
    """

    def __init__(self, op: Op, run: Kernel, devices: frozenset[str]) -> None:
        super().__init__(op.op, op.function)
        self._run, self._devices = run, devices

    def __call__(self, grad_y: Tensor, *args: Any) -> Tensor:
        """Returns ``op(grad_y, *layout, n, k)``."""
        if is_plain_call(grad_y, None) and grad_y.device.type in self._devices:
            return self._run(grad_y, *args)
        dx: Tensor = super().__call__(grad_y, *args)
        return dx


def define_op(
    library: Library,
    signature: str,
    *,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    batches_rows: bool = False,
    dispatch_keys: Sequence[str] = ("CompositeExplicitAutograd",),
) -> Op:
    """Defines a functional op with its fake kernel and, where it has one, its gradient.

    Args:
        library: the caller's library, ``Library("fdk_cpu", "FRAGMENT")``.
        signature: name and schema, ``"round(Tensor x, int bits) -> Tensor"``.
        run: the kernel.
        fake: the same for tensors without values.
        backward: see ``torch.library.register_autograd``.
        setup_context: see ``torch.library.register_autograd``.
        batches_rows: whether the first argument and the result are ``[..., size]``, so that a
            batch of ``torch.func.vmap`` is one call with more rows. Other batches are one call
            for each.
        dispatch_keys: where the kernel runs, ``("CUDA",)``; anywhere by default.

    Returns:
        The op, to be called.
    """
    name = library.define(signature)
    qualified = f"{library.ns}::{name}"
    for key in dispatch_keys:
        library.impl(name, run, key)
    torch.library.register_fake(qualified, fake, lib=library)
    if backward is not None:
        torch.library.register_autograd(
            qualified, backward, setup_context=setup_context, lib=library
        )
    op = getattr(getattr(torch.ops, library.ns), name).default
    torch.library.register_vmap(qualified, _vmap_rule(op, fake, batches_rows), lib=library)
    return Op(op, None if backward is None else _function(op, backward, setup_context))


def define_linear_op(
    library: Library,
    name: str,
    *,
    layout: str,
    forward: Kernel,
    grad_x: Kernel | LinearOp,
    dispatch_keys: Sequence[str],
) -> LinearOp:
    """Defines ``y = x @ W_hat.T + bias`` over one packed layout, with fake kernel and gradient.

    Defines two functional ops in the namespace of ``library``:

        <name>(Tensor x, <layout>, Tensor? bias, int n, int k) -> Tensor
        <name>_grad_x(Tensor grad_y, <layout>, int n, int k) -> Tensor

    with ``x :: [..., k]``, ``bias :: [n]``, ``y, grad_y :: [..., n]``. x and bias have gradients.
    The layout's tensors are saved for them, not copied.

    Args:
        library: the caller's library, ``Library("fdk_cpu", "FRAGMENT")``.
        name: name of the op, ``lut_linear``.
        layout: the layout's arguments as schema text, tensors first: ``"Tensor packed, Tensor
            scale, int bits"``. The first is a tensor on the layout's device.
        forward: ``(x :: [m, k], *layout, bias, n, k) -> [m, n]``, a new contiguous tensor: it is
            resized in place, because autograd refuses in-place work on an op's result that is a
            view. It is called with m > 0 and n > 0, and with x and bias contiguous.
        grad_x: ``(grad_y :: [m, n], *layout, n, k) -> [m, k]``, likewise. Or another op whose
            gradient this one shares (straight through what it rounds) and whose layout arguments
            come first in ``layout``; then no ``<name>_grad_x`` is defined.
        dispatch_keys: where the kernels run: ``("CUDA",)``.

    Returns:
        The op, to be called by the layout.
    """
    layout_args = layout.count(",") + 1
    saved_args = grad_x.layout_args if isinstance(grad_x, LinearOp) else layout_args

    def check(x: Tensor, first: Tensor, bias: Tensor | None, n: int, k: int) -> None:
        if x.ndim < 1 or x.shape[-1] != k:
            raise ValueError(f"{name}: x must be [..., {k}], got {list(x.shape)}")
        if x.device != first.device:
            raise ValueError(f"{name}: x must be on {first.device}, got {x.device}")
        if not x.is_floating_point():
            raise TypeError(f"{name}: x must be floating, got {x.dtype}")
        if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype):
            raise ValueError(
                f"{name}: bias must be {x.dtype} [{n}], got {bias.dtype} {list(bias.shape)}"
            )
        if bias is not None and bias.device != x.device:
            raise ValueError(f"{name}: bias must be on {x.device}, got {bias.device}")

    def run(x: Tensor, *args: Any) -> Tensor:
        bias, n, k = args[-3:]
        check(x, args[0], bias, n, k)
        if bias is not None and not bias.is_contiguous():
            args = *args[:-3], bias.contiguous(), n, k
        # Most calls end here; the rest of the function takes 3 us.
        is_matrix = x.ndim == 2 and x.is_contiguous() and x.shape[0] > 0 and n > 0
        if is_matrix and not torch.is_autocast_enabled(x.device.type):
            return forward(x, *args)
        rows = _rows(x).contiguous()
        if rows.shape[0] == 0 or n == 0:
            return x.new_empty((*x.shape[:-1], n))
        with no_autocast(x.device.type):
            return forward(rows, *args).resize_(*x.shape[:-1], n)

    def fake(x: Tensor, *args: Any) -> Tensor:
        *_, bias, n, k = args
        check(x, args[0], bias, n, k)
        return x.new_empty((*x.shape[:-1], n))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *args, bias, n, k = inputs
        save_arguments(ctx, args[:saved_args])
        ctx.n, ctx.k = n, k
        ctx.bias_dtype = None if bias is None else bias.dtype

    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        dx = dbias = None
        if ctx.needs_input_grad[0]:
            dx = grad_op(grad_y, *saved_arguments(ctx), ctx.n, ctx.k)
        if ctx.needs_input_grad[-3]:
            wide = torch.promote_types(grad_y.dtype, torch.float32)
            dbias = _rows(grad_y).sum(0, dtype=wide).to(ctx.bias_dtype)
        return dx, *[None] * layout_args, dbias, None, None

    op = define_op(
        library,
        f"{name}(Tensor x, {layout}, Tensor? bias, int n, int k) -> Tensor",
        run=run,
        fake=fake,
        backward=backward,
        setup_context=setup_context,
        batches_rows=True,
        dispatch_keys=dispatch_keys,
    )
    if isinstance(grad_x, LinearOp):
        grad_op = grad_x.grad_op
    else:
        grad_op = _define_grad_op(library, name, layout, op, grad_x, dispatch_keys)
    recorded = _recorded_function(name, run, backward, setup_context)
    return LinearOp(op, grad_op, layout_args, run, recorded, devices_of(dispatch_keys))


def _define_grad_op(
    library: Library,
    name: str,
    layout: str,
    op: Kernel,
    grad_x: Kernel,
    dispatch_keys: Sequence[str],
) -> GradOp:
    """Defines ``<name>_grad_x``, whose own gradient is ``op``."""
    layout_args = layout.count(",") + 1

    def run(grad_y: Tensor, *args: Any) -> Tensor:
        *_, n, k = args
        if grad_y.ndim < 1 or grad_y.shape[-1] != n:
            raise ValueError(f"{name}: grad_y must be [..., {n}], got {list(grad_y.shape)}")
        rows = _rows(grad_y).contiguous()
        if rows.shape[0] == 0 or n == 0:
            return grad_y.new_zeros((*grad_y.shape[:-1], k))
        with no_autocast(grad_y.device.type):
            return grad_x(rows, *args).resize_(*grad_y.shape[:-1], k)

    def fake(grad_y: Tensor, *args: Any) -> Tensor:
        return grad_y.new_empty((*grad_y.shape[:-1], args[-1]))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *args, n, k = inputs
        save_arguments(ctx, args)
        ctx.n, ctx.k = n, k

    def backward(ctx: Any, grad_dx: Tensor) -> tuple[Tensor | None, ...]:
        dgrad_y = op(grad_dx, *saved_arguments(ctx), None, ctx.n, ctx.k)
        return dgrad_y, *[None] * layout_args, None, None

    grad_op = define_op(
        library,
        f"{name}_grad_x(Tensor grad_y, {layout}, int n, int k) -> Tensor",
        run=run,
        fake=fake,
        backward=backward,
        setup_context=setup_context,
        batches_rows=True,
        dispatch_keys=dispatch_keys,
    )
    return GradOp(grad_op, run, devices_of(dispatch_keys))


def devices_of(dispatch_keys: Sequence[str]) -> frozenset[str]:
    """Returns the device types of dispatch keys."""
    return frozenset(key.lower() for key in dispatch_keys)


def _recorded_function(
    name: str, run: Kernel, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> type[torch.autograd.Function]:
    """Makes the autograd.Function of direct calls, which runs the kernel itself.

    Its name, as in ``lut_linearBackward``, is what ``grad_fn`` shows.
    """

    def forward(ctx: Any, *args: Any) -> Tensor:
        y = run(*args)
        setup_context(ctx, args, y)
        return y

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), members)


def _function(
    op: Callable[..., Any], backward: Callable[..., Any], setup_context: Callable[..., None] | None
) -> type[torch.autograd.Function]:
    """Makes the autograd.Function of an op, see ``Op``."""

    def forward(*args: Any) -> Any:
        return op(*args)

    def jvp(*_: Any) -> Any:
        raise _no_forward_mode(op)

    methods = {"forward": forward, "jvp": jvp, "backward": backward}
    methods["setup_context"] = setup_context or (lambda ctx, inputs, output: None)
    members = {name: staticmethod(method) for name, method in methods.items()}
    return type("Transformed", (torch.autograd.Function,), {"generate_vmap_rule": True, **members})


def _vmap_rule(
    op: Callable[..., Any], fake: Callable[..., Any], batches_rows: bool
) -> Callable[..., tuple[Any, Any]]:
    """Makes the function for ``torch.library.register_vmap``, see ``define_op``."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        first, *others = args
        if batches_rows and in_dims[1:] == (None,) * len(others):
            return op(first.movedim(in_dims[0], 0), *others), 0
        pairs = list(zip(args, in_dims, strict=True))
        if info.batch_size == 0:  # Nothing to run: the fake kernel gives the shapes of one call.
            results = [fake(*(_without_batch(arg, dim) for arg, dim in pairs))]
        else:
            results = [
                op(*(arg if dim is None else arg.select(dim, index) for arg, dim in pairs))
                for index in range(info.batch_size)
            ]
        if isinstance(results[0], Tensor):
            return _stacked(results, info.batch_size), 0
        kind = type(results[0])  # tuple or list, as the op returns them
        columns = map(list, zip(*results, strict=True))
        stacked = kind(_stacked(column, info.batch_size) for column in columns)
        return stacked, kind([0] * len(stacked))

    return rule


def _without_batch(arg: Any, dim: int | None) -> Any:
    """Returns an argument in the shape of one of a batch along ``dim``, without values."""
    return arg if dim is None else arg.new_empty(arg.movedim(dim, 0).shape[1:])


def _stacked(tensors: list[Tensor], count: int) -> Tensor:
    """Returns ``count`` tensors as a batch; where there is none, the first gives the shape."""
    return torch.stack(tensors) if count else tensors[0].new_empty((0, *tensors[0].shape))


def _has_tangent(tensor: Tensor) -> bool:
    """Returns whether forward mode differentiates by a tensor."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def _no_forward_mode(op: Callable[..., Any]) -> NotImplementedError:
    return NotImplementedError(
        f"{op}: has no forward-mode derivative (jvp, jacfwd), only backward's"
    )


def _rows(tensor: Tensor) -> Tensor:
    """Returns ``[..., n]`` as ``[m, n]``; reshape(-1, n) cannot infer m if n is 0."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def no_autocast(device: str) -> AbstractContextManager[object]:
    """Keeps autocast from casting again within a kernel, whose x has been cast already."""
    return (
        torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _UNCHANGED
    )


def save_arguments(ctx: Any, args: Sequence[Any]) -> None:
    """Saves arguments of an op for backward, tensors as autograd wants them."""
    ctx.save_for_backward(*(arg for arg in args if isinstance(arg, Tensor)))
    # None marks the place of a saved tensor; an argument that is not a tensor is in a tuple.
    ctx.saved_args = [None if isinstance(arg, Tensor) else (arg,) for arg in args]


def saved_arguments(ctx: Any) -> list[Any]:
    """Returns the arguments that ``save_arguments`` saved."""
    saved = iter(ctx.saved_tensors)
    return [next(saved) if arg is None else arg[0] for arg in ctx.saved_args]
