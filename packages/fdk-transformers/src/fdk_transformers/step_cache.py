"""The step that a model keeps between calls of ``generate``.

A step is used by one call at a time: a call takes it off the model, and others that run meanwhile
make their own. It is used again if it fits and nothing that a graph has captured has changed.
"""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import util
from typing import Any

import torch

from fdk_formats.quantised_module import QuantisedModule
from fdk_formats.torch_internals import in_place_version
from fdk_transformers.decode.llama_step import LlamaStep
from fdk_transformers.graph_step import GraphStep, Step
from fdk_transformers.transformers_internals import attention_implementation
from fdk_transformers.transformers_step import TransformersStep

LENGTHS = 256  # maximal lengths are multiples, so that calls of similar lengths share a step
HOLDER = "_fdk_step"
_lock = threading.Lock()


def available_steps() -> Sequence[type[Step]]:
    """Return the steps that the installed packages have, the fastest first."""
    found: list[type[Step]] = [LlamaStep, TransformersStep]
    if util.find_spec("fdk_cpu"):
        from fdk_transformers.cpu_step import CpuStep

        found.insert(0, CpuStep)
    return tuple(found)


STEPS = available_steps()


class Holder:
    """A step, and the state of the model that it was made for. Copies are empty."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self.state: list[Any] = []

    def __reduce__(self) -> tuple[type["Holder"], tuple[()]]:
        return Holder, ()


def step_class(model: Any, max_length: int) -> type[Step]:
    """Return the fastest step that supports a model.

    Raises:
        ValueError: with the reason of each step, if none does.
    """
    reasons = []
    for step in STEPS:
        reason = step.supports(model, max_length)
        if not issubclass(step, GraphStep) and any(map(is_adapter, model.modules())):
            reason = "it has copies of weights, and the model has adapters"
        if reason is None:
            return step
        reasons.append(f"{step.__name__}: {reason}")
    raise ValueError("; ".join(reasons))


@contextmanager
def step_of(model: Any, batch: int, max_length: int) -> Iterator[Step]:
    """Lend a step: the one that the model keeps, where it fits, or a new one.

    Args:
        model: the model.
        batch: number of sequences.
        max_length: tokens of each, prompt included.

    Raises:
        ValueError: if no step supports the model.
    """
    kind, length = step_class(model, max_length), -(-max_length // LENGTHS) * LENGTHS
    if kind.supports(model, length) is not None:  # a window between the two lengths
        length = max_length
    step = _kept(model)
    fits = type(step) is kind and step is not None and step.batch == batch
    if step is None or not fits or not length <= step.max_length <= 2 * length:
        step = None  # before the new one needs memory
        with torch.inference_mode():
            step = kind(model, batch, length)
    yield step
    holder = Holder()
    holder.step, holder.state = step, state_of(model, step)
    with _lock:
        model.__dict__[HOLDER] = holder


def release_step(model: Any) -> None:
    """Free the cache and the CUDA graphs that ``generate`` keeps for a model's next call.

    Args:
        model: a model of transformers, or one of PEFT around it.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with _lock:
        base.__dict__.pop(HOLDER, None)


def kept_step(model: Any) -> Step | None:
    """Return the step that a model keeps, for reports about it."""
    holder = model.__dict__.get(HOLDER)
    return None if holder is None else holder.step


def _kept(model: Any) -> Step | None:
    """Take the step off a model, if the model is as it was."""
    with _lock:
        holder = model.__dict__.pop(HOLDER, None)
    if holder is None or holder.step is None:
        return None
    return holder.step if holder.state == state_of(model, holder.step) else None


def state_of(model: Any, step: Step) -> list[Any]:
    """Return what a step captures of a model: addresses of weights, and settings of adapters.

    For steps that have copies of weights, also the number of their changes in place. References to
    layouts are weak.
    """
    copies = not isinstance(step, GraphStep)
    state: list[Any] = [attention_implementation(model.config)]
    for module in model.modules():
        tensors = {**module._parameters, **module._buffers}
        if isinstance(module, QuantisedModule):
            layout = module.stored.layout
            state.append(None if layout is None else weakref.ref(layout))
            tensors = {name: t for name, t in tensors.items() if name not in module.weight_names}
        for tensor in tensors.values():
            if tensor is not None:
                state.append((tensor.data_ptr(), tensor.dtype))
                state.append(in_place_version(tensor) if copies else None)
        if is_adapter(module):
            state.append((list(module.active_adapters), module.disable_adapters, module.merged))
            state.append(dict(getattr(module, "scaling", {})))
    return state


def is_adapter(module: Any) -> bool:
    """Return whether a module is a layer of PEFT."""
    return hasattr(module, "merged_adapters")
