"""Launches of kernels that Triton has compiled, remembered: what is left of a call is addresses."""

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

# Triton reads the same variable when a kernel is defined. The interpreter takes no assembly, and
# truncates where a GPU rounds to bf16: there products are float32, and torch rounds the result.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton compiles a kernel anew for addresses that are no multiple of this.
ALIGNMENT = 16
# What every kernel is compiled with. Products and sums were always fused: Triton 3.9 asks that a
# kernel says so, for 3.10 is to fuse none.
OPTIONS = {"enable_fp_fusion": True}
HERE = nullcontext()


class Launch:
    """What is left of a launch once its kernel is compiled: addresses.

    Triton finds the kernel of a call from all of its arguments, which takes longer than the call.

    Args:
        kernel: compiled, as a first launch returned it.
        grid: of programs, or of clusters of them.
        rest: every argument after the tensors.
        cluster: programs of a cluster, along the grid's first dimension.

    Raises:
        RuntimeError: Triton would not launch clusters of a kernel compiled without them.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], rest: tuple[object, ...], cluster: int = 1
    ) -> None:
        self.run = kernel.run
        packed = kernel.packed_metadata
        if cluster > 1:
            # For Triton a cluster is one program with tensors spread over it. Compiled as one of
            # its own, a program needs no more than the launch to be part of a cluster.
            if packed != (kernel.metadata.num_warps, 1, kernel.metadata.shared):
                raise RuntimeError(f"no way to launch clusters: packed metadata is {packed}")
            packed = packed[0], cluster, packed[2]
        # No metadata and no hooks: those serve Triton's own profiler.
        self.fixed: tuple[object, ...] = (kernel.function, packed, None, None, None)
        if (direct := _without_wrapper(kernel.run)) is not None:
            self.run, options = direct
            self.fixed = (kernel.function, *options, *self.fixed[1:])
        self.grid, self.rest = (*grid, 1, 1)[:3], rest
        # What comes before the addresses, for the stream of the last launch.
        self._head: tuple[Any, ...] = (*self.grid, None, *self.fixed)

    def __call__(self, addresses: tuple[Any, ...], device: int) -> None:
        """Launches on the current stream of a device, which must be the current one.

        An address may be a descriptor of TMA.
        """
        stream, head = torch_internals.current_raw_stream(device), self._head
        if head[3] != stream:
            head = self._head = (*self.grid, stream, *self.fixed)
        self.run(*(head + addresses + self.rest))


def _without_wrapper(run: Any) -> tuple[Callable[..., object], tuple[object, ...]] | None:
    """What Triton's launcher calls for a kernel without scratch memory, and what it adds.

    The launcher asks for scratch memory in Python, twice, and hands over 50 arguments once more. No
    version of Triton promises this; others than 3.6 are called as they are.
    """
    if not triton.__version__.startswith("3.6.") or not hasattr(run, "launch"):
        return None
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    return run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)


_launches: dict[tuple[object, ...], Launch] = {}


def relaunch(key: tuple[object, ...], tensors: Sequence[Tensor]) -> bool:
    """Launches what ``launch`` has launched under the same key; False where it has not.

    A key holds all that decides about kernel, grid and arguments, alignment and device excepted.
    """
    if INTERPRETED:
        return False
    device = tensors[0].get_device()
    found = remembered(device, key)
    if found is None:
        return False
    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    if reduce(or_, addresses) % ALIGNMENT:
        return False
    found(addresses, device)
    return True


def remembered(device: int, key: tuple[object, ...]) -> Launch | None:
    """What ``launch`` has launched on a device under a key, if it has."""
    return _launches.get((device, key))


def launch(
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
    """Launches a kernel through Triton, which compiles it where it has not, and remembers it.

    False where ``is_right`` refuses what was compiled, which is then not remembered: another thread
    must not find it. What it has written is not the result.
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
        _launches[tensors[0].get_device(), key] = Launch(compiled, grid, rest)
    return True


def prepared(
    key: tuple[object, ...],
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    sizes: Sequence[int],
    constants: dict[str, Any],
    cluster: int,
    /,
    **options: int,
) -> Launch:
    """A launch of a kernel that Triton compiles and loads, remembered, and not launched."""
    names = kernel.arg_names
    compile_time = {name: constants[name] for name in names if name in constants}
    options = OPTIONS | options
    compiled = kernel.warmup(*arguments, *sizes, grid=grid, **compile_time, **options)
    made = Launch(compiled, grid, (*sizes, *compile_time.values()), cluster)
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    if are_aligned(tensors):
        _launches[tensors[0].get_device(), key] = made
    return made


def are_aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether a kernel compiled for aligned addresses takes them."""
    return not reduce(or_, [tensor.data_ptr() for tensor in tensors]) % ALIGNMENT


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether a tensor is on a GPU that is not the current one, where Triton would launch."""
    return tensor.is_cuda and tensor.get_device() != torch.cuda.current_device()


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes a tensor's GPU the current one."""
    return torch.cuda.device(tensor.device) if is_elsewhere(tensor) else HERE
