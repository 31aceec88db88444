"""Loads machine code into a context and launches it with little work on the host."""

import ctypes
import struct
import threading
from types import ModuleType
from typing import Any

import torch

from fdk_cuda.nvrtc.cache import cached_cubin
from fdk_cuda.nvrtc.compiler import Program, architecture
from fdk_cuda.nvrtc.driver import check, cuda, in_context, use_primary_context
from fdk_formats import torch_internals

POINTER_BYTES = 8
MAX_ALIGNMENT = 64  # alignment of a tensor map, the widest member of a kernel's struct


class Kernel:
    """A kernel of a program, compiled and loaded per device at first use.

    Args:
        program: has the kernel as ``extern "C"``.
        entry: name of the kernel.
    """

    def __init__(self, program: Program, entry: str) -> None:
        self.program, self.entry = program, entry
        self._loaded: dict[int, Any] = {}

    def load(self, device: int) -> Any:
        """Returns the kernel's handle on a device."""
        if (loaded := self._loaded.get(device)) is not None:
            return loaded[1]
        driver = cuda()
        cubin = cached_cubin(self.program, architecture(torch.cuda.get_device_capability(device)))
        with torch.cuda.device(device):
            use_primary_context(device)
            module = check(driver.cuModuleLoadData(cubin), f"loading {self.program.name}")
            function = check(
                driver.cuModuleGetFunction(module, self.entry.encode()), f"finding {self.entry}"
            )
            # The maximum of the device: launches share the kernel and use different amounts.
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            properties = torch.cuda.get_device_properties(device)
            most = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
            check(driver.cuFuncSetAttribute(function, limit, most), f"loading {self.entry}")
        self._loaded[device] = module, function
        return function


class Launch:
    """A kernel with everything that stays the same from call to call.

    The kernel takes one argument, a struct; a call gives its fields.

    Args:
        kernel: the kernel to launch.
        device: index of the GPU.
        fields: fields of the struct, in the notation of ``struct``, native order and alignment.
        grid: thread blocks.
        threads: number of threads in a thread block.
        shared_bytes: dynamic shared memory of a thread block.
        cluster: thread blocks of a cluster; above 1 it needs compute capability 9.0.
        overlap: programmatic dependent launch: the kernel may start before the previous one of the
            stream has ended, and waits for it itself.
    """

    def __init__(
        self,
        kernel: Kernel,
        device: int,
        *,
        fields: str,
        grid: int,
        threads: int,
        shared_bytes: int,
        cluster: int = 1,
        overlap: bool = False,
    ) -> None:
        driver = cuda()
        self.function = kernel.load(device)
        self.what = f"launching {kernel.entry}"
        # The argument list (one pointer), then the struct it points to.
        self.struct = struct.Struct(f"@P{fields}")
        # The compiler's struct may end in padding, which the driver copies too.
        padded = -(-(self.struct.size - POINTER_BYTES) // MAX_ALIGNMENT) * MAX_ALIGNMENT
        self.buffer_bytes = POINTER_BYTES + padded
        self.device, self.grid, self.threads = device, grid, threads
        self.shared_bytes = shared_bytes
        self.attributes = _attributes(driver, cluster, overlap)
        # Bound: looking them up by name takes a third of a microsecond.
        self._launch, self._success = driver.cuLaunchKernelEx, driver.CUresult.CUDA_SUCCESS
        self._configs: dict[int, Any] = {}

    def __call__(self, *values: int | float | bytes) -> None:
        """Launches on the device's current stream; ``values`` are the struct's fields."""
        # A buffer per call: the driver copies it before it returns, and no threads share it.
        buffer, address = self._arguments()
        self.struct.pack_into(buffer, 0, address + POINTER_BYTES, *values)
        self.start(address)

    def bound(self, *fixed: int | float) -> "BoundLaunch":
        """Returns this launch with its last fields fixed; before them must be five addresses."""
        return BoundLaunch(self, fixed)

    def start(self, address: int) -> None:
        """Launches with the argument list at ``address``, which the driver copies."""
        if torch.cuda.current_device() == self.device:
            self.start_here(address)
        else:
            with torch.cuda.device(self.device):
                self.start_here(address)

    def start_here(self, address: int) -> None:
        """Does what ``start`` does, if the launch's device is torch's current one."""
        stream = torch_internals.current_raw_stream(self.device)
        config = self._configs.get(stream) or self._config(stream)
        status = self._launch(config, self.function, address, 0)
        if status[0] is self._success:
            return
        if status[0] == cuda().CUresult.CUDA_ERROR_INVALID_CONTEXT:
            status = in_context(self.device, self._launch, config, self.function, address, 0)
        check(status, self.what)

    def _arguments(self) -> tuple[Any, int]:
        """Returns a buffer for an argument list, and its address."""
        buffer = ctypes.create_string_buffer(self.buffer_bytes)
        return buffer, ctypes.addressof(buffer)

    def _config(self, stream: int) -> Any:
        driver = cuda()
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        config.hStream = driver.CUstream(stream)
        config.attrs = self.attributes
        config.numAttrs = len(self.attributes)
        self._configs[stream] = config
        return config


class BoundLaunch:
    """A launch of which only the first five fields, all addresses, change between calls.

    Args:
        launch: the launch to bind.
        fixed: the fields after the addresses.
    """

    def __init__(self, launch: Launch, fixed: tuple[int | float, ...]) -> None:
        self._launch, self._fixed = launch, fixed
        self._pack, self._start = struct.Struct("@5P").pack_into, launch.start_here
        # A buffer per thread: the driver reads it without the interpreter's lock.
        self._local = threading.local()

    def __call__(self, first: int, second: int, third: int, fourth: int, fifth: int) -> None:
        """Launches on the current stream of the launch's device, which must be the current one."""
        # Five named parameters: ``*addresses`` takes 0.13 us more, of 0.6.
        try:
            buffer, address = self._local.kept
        except AttributeError:
            buffer, address = self._local.kept = self._launch._arguments()
            values = address + POINTER_BYTES, *[0] * 5, *self._fixed
            self._launch.struct.pack_into(buffer, 0, *values)
        self._pack(buffer, POINTER_BYTES, first, second, third, fourth, fifth)
        self._start(address)


def _attributes(driver: ModuleType, cluster: int, overlap: bool) -> list[Any]:
    attributes = []
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimension = attribute.value.clusterDim
        dimension.x, dimension.y, dimension.z = cluster, 1, 1
        attributes.append(attribute)
    if overlap:
        attribute = driver.CUlaunchAttribute()
        ids = driver.CUlaunchAttributeID
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    return attributes
