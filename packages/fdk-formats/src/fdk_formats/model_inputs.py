"""Inputs of whole models: how calibration calls a model, and in which dtype it runs."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fdk_formats.torch_internals import map_tensors


@dataclass(frozen=True)
class Call:
    """Arguments of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def to(self, device: torch.device) -> "Call":
        """Returns the call with its tensors on a device."""
        return Call(_moved(self.args, device), _moved(self.kwargs, device))

    def run(self, module: nn.Module) -> Any:
        """Calls a module, on the device of its weights."""
        moved = self.to(device_of(module))
        return module(*moved.args, **moved.kwargs)


def calls_of(inputs: Iterable[Any]) -> list[Call]:
    """Returns the inputs as calls of the model."""
    if isinstance(inputs, Tensor):
        inputs = inputs.split(1)
    elif isinstance(inputs, (str, bytes, Mapping)):
        raise ValueError(
            f"calibrate: inputs must be an iterable of model inputs, got "
            f"{type(inputs).__name__}; for a text see token_windows"
        )
    calls = []
    for each in inputs:
        if isinstance(each, Call):
            calls.append(each)
        elif isinstance(each, Mapping):
            calls.append(Call((), dict(each)))
        else:
            calls.append(Call(each if isinstance(each, tuple) else (each,), {}))
    if not calls:
        raise ValueError("calibrate: no calibration inputs")
    return calls


def _moved(value: Any, device: torch.device) -> Any:
    """Moves the tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(each, device) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_moved(each, device) for each in value)
    return value


def device_of(module: nn.Module) -> torch.device:
    """Returns the device of a module's tensors."""
    tensors = (*module.parameters(), *module.buffers())
    return next((t.device for t in tensors), torch.device("cpu"))


def has_bfloat16_units(device: torch.device) -> bool:
    """Returns whether bf16 products are fast: on x86 without units they take 8 times as long.

    True where torch does not say.
    """
    ask: Any = getattr(torch.cpu, "get_capabilities", dict)
    capabilities: dict[str, Any] = ask() if device.type == "cpu" else {}
    units = ("avx512_bf16", "amx_bf16")
    return capabilities.get("architecture") != "x86_64" or any(map(capabilities.get, units))


@contextmanager
def in_fast_dtype(model: nn.Module, calls: Iterable[Call], device: torch.device) -> Iterator[None]:
    """Turns a bf16 model into float32, and back, where bf16 products are slow.

    Not a model that is called with floating inputs, which would have to change as well.
    """
    floating: list[bool] = []
    map_tensors(Tensor, lambda t: floating.append(t.is_floating_point()), [vars(c) for c in calls])
    if any(floating) or has_bfloat16_units(device):
        yield
        return
    tensors = [*model.parameters(), *model.buffers()]
    narrow = [tensor for tensor in tensors if tensor.dtype == torch.bfloat16]
    for tensor in narrow:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor in narrow:
            tensor.data = tensor.data.bfloat16()
