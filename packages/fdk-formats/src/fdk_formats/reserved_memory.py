"""Memory on the CPU whose address stays reserved after its pages are given back.

accelerate tells tied weights apart by ``data_ptr``, as long as their parameters live. The values of
a ``StoredTensor`` move into a kernel's layout meanwhile, and another tensor that got the address of
the freed memory would be taken for the weight.
"""

import mmap
import weakref

from torch import Tensor, frombuffer, uint8

# Not on Windows.
IS_AVAILABLE = hasattr(mmap, "MADV_DONTNEED")


class ReservedMemory:
    """An address for one tensor's values, which take memory only while a tensor is in it.

    Args:
        nbytes: size in bytes, at least 1.
    """

    def __init__(self, nbytes: int) -> None:
        # Pages of shared memory, mmap's default, are not given back by MADV_DONTNEED.
        self._region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._address = frombuffer(self._region, dtype=uint8, count=1).data_ptr()
        self._view: weakref.ref[memoryview] | None = None

    @property
    def is_in_use(self) -> bool:
        """True while a tensor in it is alive."""
        return self._view is not None and self._view() is not None

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether a tensor starts at this address."""
        return tensor.data_ptr() == self._address

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Copies a tensor here; its pages go when the last tensor on this memory does."""
        view = memoryview(self._region)
        self._view = weakref.ref(view)
        # torch keeps the view as long as the storage lives.
        weakref.finalize(view, self._region.madvise, mmap.MADV_DONTNEED).atexit = False
        held = frombuffer(view, dtype=tensor.dtype, count=tensor.numel())
        return held.view(tensor.shape).copy_(tensor)
