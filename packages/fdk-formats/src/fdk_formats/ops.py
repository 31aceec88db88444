"""The convention of fdk's torch ops: one functional op per packed layout, and its gradient."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library

Kernel = Callable[..., Tensor]
PLAIN = nullcontext()


class Op:
    """An op, and a call of it that transforms of torch.func take, but for those of forward mode.

    ``torch.func.grad``, ``vjp`` and ``jacrev`` refuse a gradient that torch.library registered:
    under a transform a call is that of an autograd.Function, which has the same gradient.

    Attributes:
        op: ``torch.ops.<namespace>.<name>.default``.
        function: the autograd.Function; None for an op without a gradient.
    """

    def __init__(self, op: Callable[..., Any], function: Any) -> None:
        self.op, self.function = op, function

    def __call__(self, *args: Any) -> Any:
        """``op(*args)``.

        Raises:
            NotImplementedError: in forward mode, for a tensor with a tangent.
        """
        if torch.compiler.is_compiling():
            return self.op(*args)
        if self.function is not None and functorch_level() is not None:
            return self.function.apply(*args)
        if _has_tangent(args):
            # torch itself says so only where a tensor requires a gradient too; elsewhere the
            # tangent of the result would be zero.
            raise _no_forward_mode(self.op)
        return self.op(*args)


class LinearOp(Op):
    """A linear op, and a call of it that goes straight to its kernels where nothing is watching.

    torch's dispatcher enters Python twice for an op with a gradient, 20 us a call together. It is
    needed where torch records a gradient, traces, profiles or transforms; elsewhere a call runs
    the op's own kernels, with the same checks.

    Attributes:
        op: ``torch.ops.<namespace>.<name>``, for ``opcheck`` and for graphs.
        grad_op: calls ``torch.ops.<namespace>.<name>_grad_x``.
        layout_args: how many arguments the layout has.
    """

    def __init__(
        self,
        plain: Op,
        grad_op: Callable[..., Tensor],
        layout_args: int,
        run: Kernel,
        devices: frozenset[str],
    ) -> None:
        super().__init__(plain.op, plain.function)
        self.grad_op, self.layout_args = grad_op, layout_args
        self._run, self._devices = run, devices

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        """``op(x, *layout, bias, n, k)``.

        Raises:
            NotImplementedError: in forward mode, for x or a bias with a tangent.
        """
        if not self.is_direct(x, args[-3]) or x.device.type not in self._devices:
            y: Tensor = super().__call__(x, *args)
            return y
        return self._run(x, *args)

    def is_direct(self, x: Tensor, bias: Tensor | None) -> bool:
        """Whether torch has no more to do with a call than to run it: a layout may do so itself."""
        # In this order, for torch.compile traces no further than the first.
        return not (torch.compiler.is_compiling() or _watched(x, bias))


# Bound here: a call asks all of them.
depth_of_dispatch_modes = torch._C._len_torch_dispatch_stack
depth_of_function_modes = torch._C._len_torch_function_stack
functorch_level = torch._C._functorch.peek_interpreter_stack
_jit_trace = torch._C._get_tracing_state
is_profiled = torch._C._autograd._profiler_enabled


def _watched(x: Tensor, bias: Tensor | None) -> bool:
    """Whether torch has more to do with a call than to run it."""
    return (
        ((x.requires_grad or (bias is not None and bias.requires_grad)) and torch.is_grad_enabled())
        or type(x) is not Tensor
        or x.is_neg()
        or x._is_zerotensor()
        or (bias is not None and (bias.is_neg() or bias._is_zerotensor()))
        or depth_of_dispatch_modes() > 0
        or depth_of_function_modes() > 0
        or functorch_level() is not None
        or _jit_trace() is not None
        or is_profiled()
        or forward_ad._current_level >= 0
    )


def _has_tangent(args: Sequence[Any]) -> bool:
    """Whether forward mode differentiates by one of them."""
    return forward_ad._current_level >= 0 and any(
        isinstance(arg, Tensor) and forward_ad.unpack_dual(arg).tangent is not None for arg in args
    )


def alike(*tensors: Tensor) -> Callable[..., bool]:
    """Tells other tensors with which torch's dispatcher would do as it would now with these.

    Those of the same type, dtype, device, sizes, strides, ``requires_grad`` and dispatch keys. Keys
    change with transforms, jit's trace, autocast and inference mode. Of what ``is_direct`` asks are
    left modes, gradients, forward mode's too, and the profiler. (Modes of dispatch change keys, but
    torch.compile does not look at those of modes of its own, such as FakeTensorMode.)
    """
    # One call of 0.13 us where 14 took 0.7 (Python 3.11, without a GPU).
    guards = _guards()
    if guards is None:
        return nothing_is_alike
    sizes = [list(tensor.shape) for tensor in tensors]
    strides = [_strides(tensor) for tensor in tensors]
    check: Callable[..., bool] = guards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check
    return check


def nothing_is_alike(*tensors: Tensor) -> bool:
    """What ``alike`` returns where torch cannot tell."""
    return False


@cache
def _guards() -> Any:
    """torch.compile's check of tensors, if it is as we know it: no version of torch promises it."""
    x, y = torch.empty(1, 2, device="cpu"), torch.empty(2, device="cpu")
    try:
        guards: Any = torch._C._dynamo.guards.TensorGuards
        check = guards(
            x, y, dynamic_dims_sizes=[[1, 2], [2]], dynamic_dims_strides=[[None, 1], [1]]
        ).check
        is_known = check(x, y) and not (check(x, x) or check(x, y[:1]) or check(x.half(), y))
    except Exception:
        return None
    return guards if is_known else None


def _strides(tensor: Tensor) -> list[int | None]:
    """None where any will do."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [None if size == 1 else stride for size, stride in pairs]


def _function(
    op: Callable[..., Any], backward: Callable[..., Any], setup_context: Callable[..., None] | None
) -> type[torch.autograd.Function]:
    def forward(*args: Any) -> Any:
        return op(*args)

    def jvp(*_: Any) -> Any:
        raise _no_forward_mode(op)

    methods = {"forward": forward, "jvp": jvp, "backward": backward}
    methods["setup_context"] = setup_context or (lambda ctx, inputs, output: None)
    members = {name: staticmethod(method) for name, method in methods.items()}
    return type("Transformed", (torch.autograd.Function,), {"generate_vmap_rule": True, **members})


def _no_forward_mode(op: Callable[..., Any]) -> NotImplementedError:
    return NotImplementedError(
        f"{op}: has no forward-mode derivative (jvp, jacfwd), only backward's"
    )


def define_op(
    library: Library,
    signature: str,
    *,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    of_rows: bool = False,
    dispatch_keys: Sequence[str] = ("CompositeExplicitAutograd",),
) -> Op:
    """Defines a functional op with its fake and, where it has one, its gradient.

    Args:
        library: made by the caller, ``Library("fdk_cpu", "FRAGMENT")``.
        signature: name and schema, ``"round(Tensor x, int bits) -> Tensor"``.
        run: the kernel.
        fake: the same for tensors without values.
        backward: see ``torch.library.register_autograd``, as for ``setup_context``.
        of_rows: whether the first argument and the result are ``[..., size]``: a batch of them,
            by ``torch.func.vmap``, is more rows then. Other batches are taken one by one.
        dispatch_keys: where the kernel runs, ``("CUDA",)``; anywhere by default.

    Returns:
        What calls ``torch.ops.<namespace>.<name>.default``.
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

    def batched(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        first, *others = args
        if of_rows and in_dims[1:] == (None,) * len(others):
            return op(first.movedim(in_dims[0], 0), *others), 0
        pairs = list(zip(args, in_dims, strict=True))
        if info.batch_size == 0:  # there is none to run, and shapes are those of one
            results = [fake(*(_one_of(arg, dim) for arg, dim in pairs))]
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

    torch.library.register_vmap(qualified, batched, lib=library)
    return Op(op, None if backward is None else _function(op, backward, setup_context))


def _one_of(arg: Any, dim: int | None) -> Any:
    """An argument as one of a batch along ``dim`` would be, without values."""
    return arg if dim is None else arg.new_empty(arg.movedim(dim, 0).shape[1:])


def _stacked(tensors: list[Tensor], count: int) -> Tensor:
    """A batch of them, or an empty one, in the shape of the first."""
    return torch.stack(tensors) if count else tensors[0].new_empty((0, *tensors[0].shape))


def define_linear_op(
    library: Library,
    name: str,
    *,
    layout: str,
    forward: Kernel,
    grad_x: Kernel | LinearOp,
    dispatch_keys: Sequence[str],
) -> LinearOp:
    """Defines ``y = x @ W_hat.T + bias`` over one packed layout, with fake and gradient.

    Two ops come to be, in the namespace of ``library``:

        <name>(Tensor x, <layout>, Tensor? bias, int n, int k) -> Tensor
        <name>_grad_x(Tensor grad_y, <layout>, int n, int k) -> Tensor

    with ``x :: [..., k]``, ``bias :: [n]``, ``y, grad_y :: [..., n]``. Both are functional. The
    gradient reaches x and bias; the layout's tensors are kept for it as they are, no copy.

    Args:
        library: made by the caller, ``Library("fdk_cpu", "FRAGMENT")``.
        name: of the op, ``lut_linear``.
        layout: the layout's arguments as schema text, tensors first: ``"Tensor packed, Tensor
            scale, int bits"``. The first is a tensor on the layout's device.
        forward: ``(x :: [m, k], *layout, bias, n, k) -> [m, n]``, with m > 0, n > 0, x and bias
            contiguous.
        grad_x: ``(grad_y :: [m, n], *layout, n, k) -> [m, k]``, likewise. Or another op, whose
            gradient this one has too (straight through what it rounds) and whose layout arguments
            come first in ``layout``: then no ``<name>_grad_x`` is defined.
        dispatch_keys: where the kernels run: ``("CUDA",)``.

    Returns:
        The op, to be called by the layout.
    """
    layout_args = layout.count(",") + 1
    kept_args = grad_x.layout_args if isinstance(grad_x, LinearOp) else layout_args

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
        # The common case first: what follows takes 3 us.
        plain = x.ndim == 2 and x.is_contiguous() and x.shape[0] > 0 and n > 0
        if plain and not torch.is_autocast_enabled(x.device.type):
            return forward(x, *args)
        rows = _rows(x).contiguous()
        if rows.shape[0] == 0 or n == 0:
            return x.new_empty((*x.shape[:-1], n))
        with _no_autocast(x.device.type):
            return forward(rows, *args).view(*x.shape[:-1], n)

    def fake(x: Tensor, *args: Any) -> Tensor:
        *_, bias, n, k = args
        check(x, args[0], bias, n, k)
        return x.new_empty((*x.shape[:-1], n))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *args, bias, n, k = inputs
        _keep_layout(ctx, args[:kept_args], n, k)
        ctx.bias_dtype = None if bias is None else bias.dtype

    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        dx = dbias = None
        if ctx.needs_input_grad[0]:
            dx = grad_op(grad_y, *_kept_layout(ctx), ctx.n, ctx.k)
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
        of_rows=True,
        dispatch_keys=dispatch_keys,
    )
    if isinstance(grad_x, LinearOp):
        grad_op = grad_x.grad_op
    else:
        grad_op = _define_gradient(library, name, layout, op, grad_x, dispatch_keys)
    devices = frozenset(key.lower() for key in dispatch_keys)
    return LinearOp(op, grad_op, layout_args, run, devices)


def _define_gradient(
    library: Library,
    name: str,
    layout: str,
    op: Callable[..., Tensor],
    grad_x: Kernel,
    dispatch_keys: Sequence[str],
) -> Op:
    """Defines ``<name>_grad_x``, whose own gradient is the op."""
    layout_args = layout.count(",") + 1

    def run(grad_y: Tensor, *args: Any) -> Tensor:
        *_, n, k = args
        if grad_y.ndim < 1 or grad_y.shape[-1] != n:
            raise ValueError(f"{name}: grad_y must be [..., {n}], got {list(grad_y.shape)}")
        rows = _rows(grad_y).contiguous()
        if rows.shape[0] == 0 or n == 0:
            return grad_y.new_zeros((*grad_y.shape[:-1], k))
        with _no_autocast(grad_y.device.type):
            return grad_x(rows, *args).view(*grad_y.shape[:-1], k)

    def fake(grad_y: Tensor, *args: Any) -> Tensor:
        return grad_y.new_empty((*grad_y.shape[:-1], args[-1]))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *args, n, k = inputs
        _keep_layout(ctx, args, n, k)

    def backward(ctx: Any, grad_dx: Tensor) -> tuple[Tensor | None, ...]:
        dgrad_y = op(grad_dx, *_kept_layout(ctx), None, ctx.n, ctx.k)
        return dgrad_y, *[None] * layout_args, None, None

    return define_op(
        library,
        f"{name}_grad_x(Tensor grad_y, {layout}, int n, int k) -> Tensor",
        run=run,
        fake=fake,
        backward=backward,
        setup_context=setup_context,
        of_rows=True,
        dispatch_keys=dispatch_keys,
    )


def _rows(tensor: Tensor) -> Tensor:
    """``[..., n]`` as ``[m, n]``. (reshape(-1, n) does not know m where n is 0.)"""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _no_autocast(device: str) -> AbstractContextManager[object]:
    """Kernels get x as it is; torch functions within them must not cast it again."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else PLAIN


def _keep_layout(ctx: Any, layout_args: Sequence[Any], n: int, k: int) -> None:
    ctx.save_for_backward(*(arg for arg in layout_args if isinstance(arg, Tensor)))
    # None in a tensor's place marks where the saved ones go back.
    ctx.layout_args = [None if isinstance(arg, Tensor) else (arg,) for arg in layout_args]
    ctx.n, ctx.k = n, k


def _kept_layout(ctx: Any) -> list[Any]:
    saved = iter(ctx.saved_tensors)
    return [next(saved) if arg is None else arg[0] for arg in ctx.layout_args]
