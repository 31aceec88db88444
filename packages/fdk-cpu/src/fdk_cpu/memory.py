"""Memory of packed weights, and reads and copies at full bandwidth, as a reference for kernels."""

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from fdk_cpu import _native
from fdk_cpu.native_args import check_contiguous_cpu
from fdk_cpu.runtime import num_threads


def read_sum(data: Tensor) -> int:
    """Read a tensor once and return the sum of its bytes as 64-bit words, modulo 2^64.

    Bytes after the last whole word are added one by one.

    Raises:
        ValueError: for a tensor that is not contiguous or not on the CPU.
        TypeError: for anything but a plain tensor.
    """
    _check("read_sum", "data", data)
    return _native.read_sum((data.data_ptr(), data.nbytes), num_threads())


def copy_memory(source: Tensor, to: Tensor) -> None:
    """Copy the bytes of one tensor to another of the same size in bytes.

    Raises:
        ValueError: for tensors that are not contiguous, not on the CPU, of different size, or
            that overlap.
        TypeError: for anything but plain tensors.
    """
    _check("copy_memory", "source", source)
    _check("copy_memory", "to", to)
    sizes = (source.data_ptr(), source.nbytes), (to.data_ptr(), to.nbytes)
    if abs(source.data_ptr() - to.data_ptr()) < min(source.nbytes, to.nbytes):
        raise ValueError("copy_memory: source and to must not overlap, got memory that both hold")
    _native.copy_memory(*sizes, num_threads())
    if not to.is_inference():
        increment_version(to)  # so that a backward which saved it raises


def weight_memory(count: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor ``[count, dtype]`` for a packed weight.

    From 2 MiB on it is in huge pages if Linux provides them
    (``/sys/kernel/mm/transparent_hugepage/enabled`` is ``madvise`` or ``always``).
    """
    nbytes = count * dtype.itemsize
    if nbytes >= _native.HUGE_PAGE:
        try:
            return torch.frombuffer(_native.WeightMemory(nbytes), dtype=torch.uint8).view(dtype)
        except MemoryError:
            pass  # torch.empty below raises an error that names the size
    return torch.empty(count, dtype=dtype, device="cpu")


def _check(caller: str, name: str, tensor: Tensor) -> None:
    # A subclass may have no memory, as the fake tensors of torch.compile.
    if type(tensor) not in (Tensor, Parameter):
        raise TypeError(f"{caller}: {name} must be a plain tensor, got {type(tensor).__name__}")
    check_contiguous_cpu(caller, name, tensor)
