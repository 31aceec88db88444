"""Private names of torch that fdk uses, with a fallback for versions that lack one.

No version of torch promises these names. They were tested with torch 2.11 and 2.13. Where
one is missing, calls go through torch's dispatcher or through a slower public function.

In ``torch._C``:

- ``_len_torch_dispatch_stack``: number of active modes that see every op, such as FakeTensorMode.
- ``_functorch.peek_interpreter_stack``: the innermost transform of torch.func (grad, vmap, jvp).
- ``_functorch.is_functorch_wrapped_tensor``, ``.is_batchedtensor``, ``.get_unwrapped``: whether
  ``torch.func.vmap`` maps over a tensor.
- ``_autograd._profiler_enabled``: whether a profiler records every op.
- ``_cuda_getCurrentRawStream``: the handle of a stream, without making a Stream of it.

- ``_is_any_autocast_enabled``: whether autocast is on for some device, in a fifth of the time of
  asking for a tensor's device.
- ``DisableTorchFunctionSubclass``: calls a function of torch on a tensor subclass itself.
- ``DisableTorchFunction``: the same without modes that see functions, as torch.export has.

Elsewhere:

- ``torch.utils._pytree.tree_map_only``: applies a function within nested arguments.
- ``torch.utils._python_dispatch._disable_current_modes``: real tensors amid a trace.
- ``_dynamo_marked_constant``: what ``torch.compiler.assume_constant_result`` sets on a function.
- ``DTensor._local_tensor``: this process's shard, without a view made for autograd.

- ``torch.autograd.forward_ad._current_level``: at least 0 in forward mode.
- ``Tensor._make_wrapper_subclass``: a tensor subclass whose values are held elsewhere.
- ``Tensor._version``: number of in-place changes of a tensor.
- ``with_module`` and ``module`` of a hook before ``load_state_dict``: the module it is called with.
- ``torch._inductor.config``: options of torch.compile for a measurement.
- ``torch._inductor.codegen.triton.TritonKernel``: writes the code of a kernel. The names of it that
  fdk uses are in ``fdk_cuda.inductor``.

Layouts and layers also use what ``nn.Module`` offers its subclasses under a leading underscore.
They override ``_apply``, ``_save_to_state_dict`` and ``_load_from_state_dict``, because hooks can
add to these but not replace them. They read ``_buffers``, ``_modules``, ``_parameters`` and the
dictionaries of hooks, because finding a buffer as an attribute takes 0.5 us.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import has_torch_function
from torch.utils._pytree import tree_map_only

P = ParamSpec("P")
R = TypeVar("R")


def _private(name: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of ``torch._C`` with a dotted name, or ``otherwise`` without it."""
    try:
        found: Callable[..., Any] = attrgetter(name)(torch._C)
    except AttributeError:
        return otherwise
    return found


def bind_load_hooks(module: nn.Module) -> None:
    """Lets hooks before ``load_state_dict`` that came from another module be called with this."""
    hook: Any
    for hook in module._load_state_dict_pre_hooks.values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(module)


def _stream_handle(device: int) -> int:
    handle: int = torch.cuda.current_stream(device).cuda_stream
    return handle


# Where torch cannot be asked about a mode, a transform or a profiler, one may be active.
_dispatch_modes = _private("_len_torch_dispatch_stack", lambda: 1)
_innermost_transform = _private("_functorch.peek_interpreter_stack", lambda: "unknown")
# Whether autocast may be on; where the name is missing, the slower check always follows.
may_autocast = _private("_is_any_autocast_enabled", lambda: True)
_is_profiling = _private("_autograd._profiler_enabled", lambda: True)
_is_jit_tracing: Callable[[], bool] = getattr(torch.jit, "is_tracing", lambda: True)
# The level is a variable of the module, so each call reads it there.
_forward_ad: Any = forward_ad
if not hasattr(forward_ad, "_current_level"):
    _forward_ad = SimpleNamespace(_current_level=0)
# (device index) -> handle of its current stream.
current_raw_stream: Callable[[int], int] = _private("_cuda_getCurrentRawStream", _stream_handle)


def in_dispatch_mode() -> bool:
    """Returns whether a TorchDispatchMode is active, which sees every op."""
    return bool(_dispatch_modes() > 0)


def in_transform() -> bool:
    """Returns whether a transform of torch.func is active, such as ``grad`` or ``vmap``."""
    return _innermost_transform() is not None


def is_traced() -> bool:
    """Returns whether torch.compile, a dispatch mode or a torch.func transform traces ops."""
    return torch.compiler.is_compiling() or in_dispatch_mode() or in_transform()


def is_batched(tensor: Tensor) -> bool:
    """Returns whether ``torch.func.vmap`` maps over a tensor, at any level of transforms."""
    try:
        functorch = torch._C._functorch
        while functorch.is_functorch_wrapped_tensor(tensor):
            if functorch.is_batchedtensor(tensor):
                return True
            tensor = functorch.get_unwrapped(tensor)
    except AttributeError:
        pass  # Another torch: vmap raises its own error for what it cannot map.
    return False


def in_place_version(tensor: Tensor) -> object:
    """Returns a value that equals an earlier one unless the tensor was changed in place since.

    Always None for inference tensors, which have no version, and in compiled code, which would
    ask for it at run time.
    """
    if torch.compiler.is_compiling() or tensor.is_inference():
        return None
    return getattr(tensor, "_version", object())


def tensor_without_memory(
    cls: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Any:
    """Makes a tensor of a subclass that has metadata only; it must define its operations."""
    with torch.inference_mode(False):  # an inference tensor cannot be detached outside
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


def map_tensors(cls: type[Tensor], fn: Callable[[Any], Any], tree: Any) -> Any:
    """Applies a function to the tensors of a class in nested arguments."""
    return tree_map_only(cls, fn, tree)


def without_torch_function() -> AbstractContextManager[object]:
    """Makes functions of torch run on tensor subclasses without their ``__torch_function__``."""
    context: AbstractContextManager[object] = torch._C.DisableTorchFunctionSubclass()
    return context


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function that torch.compile runs as it is while it traces, once for each graph.

    As ``torch.compiler.assume_constant_result`` does, which imports the compiler: seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Makes operations run on real tensors while a mode traces the caller."""
    from torch.utils._python_dispatch import _disable_current_modes

    # Functions too: torch.export would record no_grad, and cannot save such a region if empty.
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def local_tensor(sharded: Any) -> Tensor:
    """Returns the shard of a DTensor that this process holds."""
    tensor: Tensor = sharded._local_tensor
    return tensor


def inductor_config() -> Any:
    """Returns the options of torch.compile's inductor, whose import takes a second."""
    from torch._inductor import config

    return config


def inductor_kernel_class() -> Any:
    """Returns the class of the kernels that torch.compile generates; its import takes seconds."""
    from torch._inductor.codegen.triton import TritonKernel

    return TritonKernel


def is_plain_call(x: Tensor, bias: Tensor | None) -> bool:
    """Returns whether torch has only to run an op over x and bias, so that a kernel may do it.

    False under autograd in reverse mode, and where ``is_direct_call`` is.

    It takes 0.8 us, 1.1 us with a bias (Zen 4, Python 3.11); torch's dispatcher takes 20 us.

    Args:
        x: activations.
        bias: bias of the layer, or None.
    """
    return is_direct_call(x, bias) and not is_recorded(x, bias)


def is_direct_call(x: Tensor, bias: Tensor | None) -> bool:
    """Returns whether torch has only to run an op over x and bias, and to record its gradient.

    False under autograd in forward mode, torch.compile and other tracers, function and dispatch
    modes, transforms of torch.func, and profilers. False for tensor subclasses (but a bias may be a
    Parameter), negative views, and tensors without memory.

    Args:
        x: activations.
        bias: bias of the layer, or None.
    """
    # First, because torch.compile traces no further.
    if torch.compiler.is_compiling():
        return False
    if (
        type(x) is not Tensor
        or has_torch_function((x,))
        or _dispatch_modes() > 0
        or _innermost_transform() is not None
        or _forward_ad._current_level >= 0
        or _is_jit_tracing()
        or _is_profiling()
        or not _has_memory(x)
    ):
        return False
    return bias is None or (type(bias) in (nn.Parameter, Tensor) and _has_memory(bias))


def is_recorded(x: Tensor, bias: Tensor | None) -> bool:
    """Returns whether autograd records an op over x and bias."""
    return torch.is_grad_enabled() and (
        x.requires_grad or (bias is not None and bias.requires_grad)
    )


def _has_memory(tensor: Tensor) -> bool:
    """Returns whether the memory of a tensor has its values."""
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # sparse, or a batch of gradients (``is_grads_batched``)
        return False
    # An address of 0: empty, or zeros for which torch has no memory.
    return address != 0 and not tensor.is_neg()
