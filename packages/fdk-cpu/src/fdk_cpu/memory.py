"""Memory that weights are kept in. Reading and copying as fast as it goes, for benchmarks."""

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from fdk_cpu import _native
from fdk_cpu.checks import check_placed
from fdk_cpu.runtime import num_threads


def read_sum(data: Tensor) -> int:
    """Reads a tensor once: the sum, modulo 2^64, of its bytes as 64-bit words (and what is left).

    Raises:
        ValueError: for a tensor that is not contiguous or not on the CPU.
        TypeError: for a subclass of tensor, or what is none.
    """
    _check("read_sum", "data", data)
    return _native.read_sum((data.data_ptr(), data.nbytes), num_threads())


def copy_memory(source: Tensor, to: Tensor) -> None:
    """Copies the bytes of one tensor to another of as many bytes.

    Raises:
        ValueError: for tensors that are not contiguous, not on the CPU, or of different size, and
            for two that overlap.
        TypeError: for a subclass of tensor, or what is none.
    """
    _check("copy_memory", "source", source)
    _check("copy_memory", "to", to)
    sizes = (source.data_ptr(), source.nbytes), (to.data_ptr(), to.nbytes)
    if abs(source.data_ptr() - to.data_ptr()) < min(source.nbytes, to.nbytes):
        raise ValueError("copy_memory: source and to must not overlap, got memory that both hold")
    _native.copy_memory(*sizes, num_threads())
    if not to.is_inference():
        increment_version(to)  # as every write does: a backward that has kept it then says so


def weight_memory(count: int, dtype: torch.dtype) -> Tensor:
    """A tensor ``[count, dtype]`` of no particular value, for what is read again and again.

    From 2 MiB on it lies in huge pages, where Linux gives some
    (``/sys/kernel/mm/transparent_hugepage/enabled`` says ``madvise`` or ``always``).
    """
    nbytes = count * dtype.itemsize
    if nbytes >= _native.HUGE_PAGE:
        try:
            return torch.frombuffer(_native.WeightMemory(nbytes), dtype=torch.uint8).view(dtype)
        except MemoryError:
            pass  # torch says how much was wanted
    return torch.empty(count, dtype=dtype, device="cpu")


def _check(caller: str, name: str, tensor: Tensor) -> None:
    # A subclass may have no memory: torch.compile's fake tensors.
    if type(tensor) not in (Tensor, Parameter):
        raise TypeError(f"{caller}: {name} must be a plain tensor, got {type(tensor).__name__}")
    check_placed(caller, name, tensor)
