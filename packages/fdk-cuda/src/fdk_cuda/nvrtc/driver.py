"""The CUDA driver through its Python bindings."""

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any


@cache
def _primary_context(device: int) -> Any:
    """Returns the context that torch uses on a device."""
    driver = cuda()
    handle = check(driver.cuDeviceGet(device), "finding the GPU")
    return check(driver.cuDevicePrimaryCtxRetain(handle), "retaining the GPU's context")


def use_primary_context(device: int) -> None:
    """Sets the context that torch uses on a device as that of this thread."""
    check(cuda().cuCtxSetCurrent(_primary_context(device)), "setting the GPU's context")


def in_context(device: int, call: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    """Returns the result of a driver call that needs a context.

    A thread in which torch has not called CUDA yet has none (autograd's thread of a second GPU);
    it gets that of the device.
    """
    result = call(*arguments)
    if result[0] == cuda().CUresult.CUDA_ERROR_INVALID_CONTEXT:
        use_primary_context(device)
        result = call(*arguments)
    return result


@cache
def cuda() -> ModuleType:
    """Returns the bindings of the driver. Importing ``fdk_cuda`` must not load them."""
    from cuda.bindings import driver  # type: ignore[import-untyped]

    module: ModuleType = driver
    return module


def check(result: tuple[Any, ...], action: str) -> Any:
    """Returns the value of a driver call.

    Args:
        result: what the call returned: status, then values.
        action: what the call does, for the error message.

    Raises:
        RuntimeError: the call failed.
    """
    status, *values = result
    if status.value:
        _, text = cuda().cuGetErrorString(status)
        raise RuntimeError(f"{action}: {status.name} ({text.decode()})")
    return values[0] if values else None
