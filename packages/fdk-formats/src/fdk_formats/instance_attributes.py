"""Attributes that users set on modules: hooks, patched forwards and others."""

import copy
import dis
import functools
import logging
import types
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from fdk_formats.torch_internals import bind_load_hooks

# torch's attributes of hooks, which a quantised layer inherits.
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
# torch's dicts of children and tensors, which are replaced or copied in any case.
CONTENTS = ("_modules", "_parameters", "_buffers")
# Attributes of Conv1D that a quantised layer has under other names.
CLASS_ATTRIBUTES = ("nf", "nx")

logger = logging.getLogger(__name__)


def carry_over(source: nn.Module, layer: nn.Module, memo: dict[int, Any] | None = None) -> None:
    """Gives a quantised layer the hooks of its source, and attributes that users set on it.

    Args:
        source: the layer that it replaces.
        layer: its quantised counterpart.
        memo: of ``copy.deepcopy``, for copies; None to share them.
    """
    attributes = {
        name: value
        for name, value in _attributes(source).items()
        if name in HOOKS or (name not in vars(layer) and name not in CLASS_ATTRIBUTES)
    }
    vars(layer).update(attributes if memo is None else copy.deepcopy(attributes, memo))
    bind_load_hooks(layer)


def is_patched(module: nn.Module) -> bool:
    """Returns whether a module has a ``forward`` of its own, and not only its class.

    One that accelerate's hooks leave when they are removed is bound to that of the class.
    """
    own = vars(module).get("forward")
    is_class_method = getattr(own, "__func__", None) is type(module).forward
    return own is not None and not (is_class_method and own.__self__ is module)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Returns a module's attributes.

    Those of torch.compile are left out, which a copy makes again, and a ``forward`` that is that of
    the class.
    """
    left = ["_compiled_call_impl"]
    if "_orig_mod" in module._modules or not is_patched(module):
        left.append("forward")
    return {name: value for name, value in vars(module).items() if name not in left}


def check_forward(caller: str, layer: nn.Module, kind: type[nn.Module]) -> None:
    """Raises ValueError if a layer computes anything else than its kind does."""
    if is_patched(layer) or type(layer).forward is not kind.forward:
        raise ValueError(
            f"{caller}: wanted a layer with the forward of torch.nn.{kind.__name__}, got a "
            f"{type(layer).__name__} with another, which a quantised layer would not call: copy "
            f"its weight to a torch.nn.{kind.__name__}"
        )


def check_patches(
    caller: str, model: nn.Module, replaced: Mapping[int, str] | None, remedy: str | None = None
) -> None:
    """Raises ValueError where a patched forward would go on to call modules of the source.

    Other attributes and hooks that hold such modules are warned of.

    Args:
        caller: name of the function, for messages.
        model: the model.
        replaced: names of the layers that are replaced, by id, for a model changed in place. None
            for a copy, in which every module is another one.
        remedy: for messages; that of a function with ``inplace`` by default.
    """
    if replaced is None:
        own = {id(module): name for name, module in model.named_modules()}
        remedy = remedy or "pass inplace=True, or patch the result"
    else:
        own, remedy = dict(replaced), "remove it, and set it on the result"
    for name, module in model.named_modules():
        for attribute, value in _attributes(module).items():
            if attribute in CONTENTS:
                continue
            called = _module_held_by(value, own, replaced is None, set())
            if called is None:
                continue
            if attribute == "forward":
                raise ValueError(
                    f"{caller}: {_describe(name)}: its forward is patched with a function that "
                    f"calls {_describe(called)} of the source, and would go on to call that one: "
                    f"{remedy}"
                )
            logger.warning(
                "%s: %s of %s holds %s of the source, and will go on to use that one: %s",
                caller,
                "a hook" if attribute in HOOKS else attribute,
                _describe(name),
                _describe(called),
                remedy,
            )


def _describe(name: str) -> str:
    """Names a module in a message."""
    return f"module {name!r}" if name else "the whole model"


def _module_held_by(
    value: object, own: Mapping[int, str], is_copied: bool, seen: set[tuple[int, bool]]
) -> str | None:
    """Returns the name of a module that a value refers to and will refer to afterwards.

    Args:
        value: an attribute of a module. Functions, methods and containers are searched.
        own: names of modules by id.
        is_copied: whether ``copy.deepcopy`` copies the value. It copies containers, bound methods
            and partial functions with all that they hold, but not functions.
        seen: ids of the values that were searched.
    """
    if id(value) in own:
        return None if is_copied else own[id(value)]
    if (id(value), is_copied) in seen:
        return None
    seen.add((id(value), is_copied))
    if isinstance(value, functools.partial):
        held: Iterable[object] = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        held = (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        held, is_copied = _held_by(value), False
    elif isinstance(value, weakref.ref):
        held, is_copied = (value(),), False
    elif isinstance(value, dict):
        held = list(value.values())
    elif isinstance(value, list | tuple | set):
        held = list(value)
    else:
        return None
    found = (_module_held_by(each, own, is_copied, seen) for each in held)
    return next((name for name in found if name is not None), None)


def _held_by(function: types.FunctionType) -> list[object]:
    """Returns the values that a function refers to: in its closure, defaults and globals."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    held = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    known = function.__globals__
    used = [known[name] for name in _globals_of(function.__code__) if name in known]
    # Functions of other files are not followed, nor the libraries that they call.
    held += [v for v in used if getattr(v, "__globals__", known) is known]
    return held


def _globals_of(code: types.CodeType) -> set[str]:
    """Returns the names of globals that code reads, functions within it included."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _globals_of(constant)
    return names


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
