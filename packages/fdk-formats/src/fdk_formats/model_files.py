"""Whole models in one file: save_model writes one that quantise_model made, load_model reads it."""

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fdk_formats.files import load, save
from fdk_formats.fuse import fuse_layers, groups_of
from fdk_formats.linear import QuantisedLinear, QuantisedWeight
from fdk_formats.tensor import QuantisedTensor


def save_model(
    path: str | os.PathLike[str], model: nn.Module, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes every quantised weight, every other parameter, all buffers and extra state of a model.

    A quantised layer ``x`` is stored as the weight ``x.weight`` and the tensor ``x.bias``,
    whatever its backend; tied weights are stored once. See ``save``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"save_model: model must be a module, got {type(model).__name__}")
    modules = dict(model.named_modules(remove_duplicate=False))
    weights = {name: m for name, m in modules.items() if isinstance(m, QuantisedWeight)}
    unpacked = {weight: weight.unpack() for weight in set(weights.values())}
    tensors: dict[str, QuantisedTensor | Tensor] = {n: unpacked[w] for n, w in weights.items()}
    parts = tuple(f"{name}." for name in weights)
    # Not state_dict: it would unpack every weight again, and it leaves out the buffers (rotary
    # frequencies) that a model on meta has nowhere else.
    plain = _named_tensors(model)
    tensors |= {name: value.detach() for name, value in plain if not name.startswith(parts)}
    for name, module in modules.items():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            tensors[f"{name}._extra_state".removeprefix(".")] = module.get_extra_state()
    save(path, tensors, metadata=metadata)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Models built in the block have their parameters on the meta device, and real buffers.

    What ``load_model`` wants of a model too large to be built in full. Under
    ``torch.device("meta")`` the buffers are on meta as well, and those that no file holds (the
    rotary frequencies of a llama) are lost. A parameter is allocated before it goes to meta, one
    at a time; that of an ``nn.Linear`` or ``nn.Embedding`` is never written. Modules that other
    threads build meanwhile are met too.
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        # One that is there already may be tied, and is kept; a subclass knows itself what it is.
        if type(parameter) is not nn.Parameter or parameter.device.type == "meta":
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    # torch's annotation forgets that such a hook may return a parameter to take instead.
    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def load_model(
    source: str | os.PathLike[str] | Mapping[str, QuantisedTensor | Tensor],
    model: nn.Module,
    backend: str = "auto",
    *,
    device: torch.device | str | int | None = None,
    activations: str = "float",
    fuse: bool | Sequence[Sequence[str]] = False,
) -> nn.Module:
    """A copy of ``model`` with the quantised layers and all tensors of a file, or of a mapping.

    Args:
        source: the path of a file that ``save_model`` or ``save`` wrote; or tensors by name, such
            as a reader of ``fdk_formats.readers`` returns: a QuantisedTensor ``x.weight`` for each
            quantised layer ``x``, and tensors for the rest. Tied parameters may have one name each.
        model: of the same architecture, not quantised, in the dtype that the result is to have.
            May be on the meta device, which costs no memory, but for buffers that neither
            ``source`` nor ``state_dict`` holds: see ``parameters_on_meta``. It is left untouched.
        backend: see ``select``.
        device: of the result; None for that of the model, and the CPU for a model on meta.
        activations: ``int8`` rounds the input of every quantised layer to 8 bits, see
            ``fdk_formats.int8``; a file says nothing of it.
        fuse: compute layers of one input as one product, see ``fuse_layers``; True for q_proj,
            k_proj and v_proj, and gate_proj and up_proj. A file says nothing of it either.

    Raises:
        ValueError: where the file is damaged (see ``load``), or does not fit the model: the
            message names the tensors that are missing, unexpected or of another shape. Where
            ``fuse`` names no groups of layers.
        TypeError: for a model that is no module, or what is no tensor in a mapping.
        NoBackendError: where no backend takes a layer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"load_model: model must be a module, got {type(model).__name__}")
    groups = groups_of(fuse)
    if device is None:
        first = next(model.parameters(), None)
        device = "cpu" if first is None or first.device.type == "meta" else first.device
    if isinstance(source, Mapping):
        where, tensors = "load_model", _copied(source, device)
    else:
        where, tensors = os.fspath(source), load(source, device=device)
    plain = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    weights: dict[int, QuantisedWeight] = {}
    memo: dict[int, object] = {}
    for name, q in tensors.items():
        if isinstance(q, Tensor):
            continue
        linear = _linear(where, model, name, q)
        if id(q) not in weights:
            try:
                weights[id(q)] = QuantisedWeight(
                    q, backend=backend, dtype=linear.weight.dtype, activations=activations
                )
            except ValueError as error:
                raise ValueError(f"{where}: {name}: {error}") from None
        # The bias is a placeholder: load_state_dict fills it with the other tensors.
        layer = QuantisedLinear(weights[id(q)], linear.bias)
        if linear.bias is not None:  # a bias that something shares stays shared
            layer.bias = memo.setdefault(id(linear.bias), layer.bias)  # type: ignore[assignment]
        memo[id(linear)] = layer.train(linear.training)
    result: nn.Module = copy.deepcopy(model, memo)
    ties = _ties(result)
    plain = _as_in(result, _apart(result, _tied(ties, plain)))
    quantised = tensors.keys() - plain.keys()
    _load_buffers(result, plain, plain.keys() - model.state_dict().keys())
    _load_plain(where, result, plain, quantised)
    for first_name, *names in ties:
        parameter = result.get_parameter(first_name)
        for name in names:
            parent, _, attribute = name.rpartition(".")
            setattr(result.get_submodule(parent), attribute, parameter)
    result = result.to(device)
    fuse_layers(result, groups)
    return result


def _copied(
    given: Mapping[str, QuantisedTensor | Tensor], device: torch.device | str | int
) -> dict[str, QuantisedTensor | Tensor]:
    """The caller's tensors on a device; plain ones are copied, for the model may train them."""
    copies: dict[int, QuantisedTensor | Tensor] = {}  # two names of one tensor stay that
    for name, value in given.items():
        if not isinstance(value, QuantisedTensor | Tensor):
            raise TypeError(
                f"load_model: {name} must be a QuantisedTensor or a tensor, "
                f"got {type(value).__name__}"
            )
        if id(value) not in copies:
            if isinstance(value, Tensor):
                copies[id(value)] = value.detach().to(device, copy=True)
            else:
                copies[id(value)] = value.to(device)
    return {name: copies[id(value)] for name, value in given.items()}


def _linear(where: str, model: nn.Module, name: str, q: QuantisedTensor) -> nn.Linear:
    parent = name.removesuffix(".weight") if name != "weight" else ""
    try:
        module = model.get_submodule(parent)
    except AttributeError:
        raise ValueError(f"{where}: {name}: the model has no layer {parent!r}") from None
    if not isinstance(module, nn.Linear) or module.weight.shape != q.shape:
        shape = list(module.weight.shape) if isinstance(module, nn.Linear) else ""
        raise ValueError(
            f"{where}: {name} needs a Linear of weight {list(q.shape)}, "
            f"the model has {type(module).__name__} {shape}"
        )
    return module


def _tied(ties: Sequence[Sequence[str]], plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, under every name of a parameter of several: other projects store one of them."""
    filled = dict(plain)
    for names in ties:
        if found := [plain[name] for name in names if name in plain]:
            filled |= {name: found[0] for name in names if name not in plain}
    return filled


def _apart(model: nn.Module, plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with a copy for each further one of the model that has the same in the file."""
    own = {name: id(tensor) for name, tensor in _named_tensors(model)}
    taken: dict[int, int | str] = {}
    apart = {}
    for name, tensor in plain.items():
        owner = own.get(name, name)
        is_first = taken.setdefault(id(tensor), owner) == owner
        apart[name] = tensor if is_first else tensor.clone()
    return apart


def _as_in(model: nn.Module, plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, floating ones in the dtypes that the model's have."""
    own = _named_tensors(model)
    dtypes = {name: tensor.dtype for name, tensor in own if tensor.is_floating_point()}
    return {
        name: tensor.to(dtypes[name]) if name in dtypes and tensor.is_floating_point() else tensor
        for name, tensor in plain.items()
    }


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _load_buffers(model: nn.Module, plain: dict[str, Tensor], beyond_state_dict: set[str]) -> None:
    """Moves the buffers that ``load_state_dict`` would not know from ``plain`` to the model."""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for name in buffers & beyond_state_dict:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, plain.pop(name))


def _load_plain(
    where: str, model: nn.Module, plain: dict[str, Tensor], quantised: set[str]
) -> None:
    try:
        # assign: a model on meta has nothing to copy into
        keys = model.load_state_dict(plain, strict=False, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{where}: does not fit the model: {error}") from None
    missing = [key for key in keys.missing_keys if key.rpartition(".")[0] not in quantised]
    if missing or keys.unexpected_keys:
        raise ValueError(
            f"{where}: does not fit the model: missing {', '.join(missing) or 'nothing'}; "
            f"unexpected {', '.join(keys.unexpected_keys) or 'nothing'}"
        )
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if left := [name for name, tensor in tensors if tensor.device.type == "meta"]:
        raise ValueError(
            f"{where}: holds no {', '.join(left)}, which the model has on the meta device only; "
            f"build the model under fdk_formats.parameters_on_meta(), whose buffers are real"
        )


def _ties(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one and the same, which assigning each would untie."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]
