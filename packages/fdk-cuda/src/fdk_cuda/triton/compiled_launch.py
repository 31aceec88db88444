"""Launches of compiled Triton kernels by address.

Triton finds the kernel of a call by examining each argument, which takes longer than the launch. So
Triton launches a kernel once for each key, which compiles it; later calls launch what was
compiled, with new addresses.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from operator import or_
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from fdk_formats import torch_internals

# Triton reads the same variable when a kernel is defined. The interpreter has no inline assembly,
# and truncates to bf16 where a GPU rounds: there products are float32, and torch rounds them.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton compiles one kernel for addresses that are multiples of this, and others for the rest.
ALIGNMENT = 16
# Compiler options of every kernel. Triton up to 3.8 always fuses products and sums, 3.9 warns of
# kernels that do not ask for it, and 3.10 fuses only where asked.
OPTIONS = {"enable_fp_fusion": True}
_NO_SWITCH = nullcontext()


class CompiledLaunch:
    """A launch of a compiled kernel, called with addresses.

    Args:
        kernel: compiled, as a first launch returned it.
        grid: number of programs, or of clusters, along each dimension.
        rest: every argument after the tensors.
        cluster: programs of a cluster, along the first dimension of the grid.

    Raises:
        RuntimeError: where Triton would not launch clusters of a kernel compiled without them.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], rest: tuple[object, ...], cluster: int = 1
    ) -> None:
        self.run = kernel.run
        packed = kernel.packed_metadata
        if cluster > 1:
            # Triton's own clusters spread the tensors of one program over several SMs. Here each
            # program is compiled alone, and only the launch makes it part of a cluster.
            if packed != (kernel.metadata.num_warps, 1, kernel.metadata.shared):
                raise RuntimeError(f"no way to launch clusters: packed metadata is {packed}")
            packed = packed[0], cluster, packed[2]
        # Neither metadata nor hooks: only Triton's profiler uses them.
        self.fixed: tuple[object, ...] = (kernel.function, packed, None, None, None)
        if (direct := _without_wrapper(kernel.run)) is not None:
            self.run, options = direct
            self.fixed = (kernel.function, *options, *self.fixed[1:])
        self.grid, self.rest = (*grid, 1, 1)[:3], rest
        # The arguments before the addresses, for the stream of the last launch.
        self._head: tuple[Any, ...] = (*self.grid, None, *self.fixed)

    def __call__(self, addresses: tuple[Any, ...], device: int) -> None:
        """Launches on the current stream of a GPU.

        Args:
            addresses: addresses of the tensors; one may be a TMA descriptor instead.
            device: index of the GPU, which must be the current one.
        """
        stream, head = torch_internals.current_raw_stream(device), self._head
        if head[3] != stream:
            head = self._head = (*self.grid, stream, *self.fixed)
        self.run(*(head + addresses + self.rest))


def _without_wrapper(run: Any) -> tuple[Callable[..., object], tuple[object, ...]] | None:
    """Returns Triton's C launcher and the arguments that its Python wrapper adds.

    The wrapper asks for scratch memory twice and passes 50 arguments on. No version of Triton
    promises these names: None for other versions than 3.6, and for kernels with scratch memory.
    """
    if not triton.__version__.startswith("3.6.") or not hasattr(run, "launch"):
        return None
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    return run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)


# Indexed by GPU and key. A key holds everything that determines kernel, grid and arguments,
# except the GPU and the alignment of addresses.
_compiled: dict[tuple[object, ...], CompiledLaunch] = {}


def find_compiled(device: int, key: tuple[object, ...]) -> CompiledLaunch | None:
    """Returns the launch that was compiled for a key on a GPU, if there is one."""
    return _compiled.get((device, key))


def launch_compiled(key: tuple[object, ...], tensors: Sequence[Tensor]) -> bool:
    """Launches the kernel that was compiled for a key.

    Returns:
        False, without a launch, where none was, or where the tensors are not aligned.
    """
    if INTERPRETED:
        return False
    device = tensors[0].get_device()
    found = find_compiled(device, key)
    if found is None:
        return False
    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    if reduce(or_, addresses) % ALIGNMENT:
        return False
    found(addresses, device)
    return True


def compile_and_launch(
    key: tuple[object, ...],
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    constants: dict[str, Any],
    is_right: Callable[[Any], bool] = lambda compiled: True,
    /,
    **options: int,
) -> bool:
    """Launches a kernel through Triton, which compiles it if needed, for later launches too.

    Args:
        key: the key for ``launch_compiled``.
        kernel: the Triton kernel.
        grid: number of programs along each dimension.
        tensors: its first arguments.
        sizes: the arguments after them.
        constants: ``tl.constexpr`` by name; others than the kernel's are ignored.
        is_right: checks what was compiled.
        options: options of Triton's compiler and of the launch.

    Returns:
        False if ``is_right`` returns False: the output is wrong, and the kernel is not kept, so
        that no other thread finds it.
    """
    names = kernel.arg_names[len(tensors) + len(sizes) :]
    compile_time = {name: constants[name] for name in names}
    compiled = kernel[grid](*tensors, *sizes, **compile_time, **OPTIONS, **options)
    if INTERPRETED:
        return True
    if not is_right(compiled):
        return False
    if are_aligned(tensors):
        rest = (*sizes, *compile_time.values())
        _compiled[tensors[0].get_device(), key] = CompiledLaunch(compiled, grid, rest)
    return True


def compile_launch(
    key: tuple[object, ...],
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    sizes: Sequence[int],
    constants: dict[str, Any],
    cluster: int,
    /,
    **options: int,
) -> CompiledLaunch:
    """Compiles and loads a kernel without launching it, for later launches too.

    Args:
        key: the key for ``find_compiled``.
        kernel: the Triton kernel.
        grid: number of clusters along each dimension.
        arguments: its first ones, tensors and TMA descriptors.
        sizes: the arguments after them.
        constants: ``tl.constexpr`` by name; others than the kernel's are ignored.
        cluster: programs of a cluster.
        options: options of Triton's compiler and of the launch.
    """
    names = kernel.arg_names
    compile_time = {name: constants[name] for name in names if name in constants}
    options = OPTIONS | options
    compiled = kernel.warmup(*arguments, *sizes, grid=grid, **compile_time, **options)
    made = CompiledLaunch(compiled, grid, (*sizes, *compile_time.values()), cluster)
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    if are_aligned(tensors):
        _compiled[tensors[0].get_device(), key] = made
    return made


def are_aligned(tensors: Sequence[Tensor]) -> bool:
    """Returns whether a kernel compiled for aligned addresses can read all of the tensors."""
    return not reduce(or_, [tensor.data_ptr() for tensor in tensors]) % ALIGNMENT


def is_on_other_gpu(tensor: Tensor) -> bool:
    """Returns whether a tensor is on another GPU than the current one, where Triton launches."""
    return tensor.is_cuda and tensor.get_device() != torch.cuda.current_device()


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the GPU of a tensor the current one."""
    return torch.cuda.device(tensor.device) if is_on_other_gpu(tensor) else _NO_SWITCH
