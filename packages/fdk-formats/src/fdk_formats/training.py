"""Training whole models with quantised weights: ``prepare_qat`` and ``convert``."""

import copy
import logging
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fdk_formats import tensor_parallel
from fdk_formats.backends import check_activations
from fdk_formats.codebooks import uniform_values
from fdk_formats.experts import (
    QuantisedExperts,
    dense_projection,
    is_described,
    is_experts,
    local_experts,
    routed_experts,
)
from fdk_formats.format import Format
from fdk_formats.fuse import checked_groups, fuse_layers
from fdk_formats.instance_attributes import check_patches
from fdk_formats.layer_kinds import matrix_of
from fdk_formats.model import check_layer_codebook, chosen_layers, codebooks_of, replace_layers
from fdk_formats.packed_module import compute_dtype
from fdk_formats.qat import fake_quantise
from fdk_formats.quantise import of_expert, quantise, quantise_stack
from fdk_formats.report import model_report
from fdk_formats.scales import GroupedWeight
from fdk_formats.tensor import CanonicalWeight, QuantisedTensor

LEARNABLE = ("codebook", "scale")

logger = logging.getLogger(__name__)


@dataclass
class QATState:
    """The settings of a weight that is trained as it will be quantised, and its count of steps.

    Attributes:
        format: format that the weight is trained for.
        refit_every: steps of the optimiser from one refit to the next; None for no refit.
        step: steps so far; None where the buffer ``refit_step`` says it.
    """

    format: Format
    refit_every: int | None
    step: int | None = None


class QATModule(nn.Module):
    """A module that computes with weights as they will be quantised.

    Beside each weight it holds the tensors ``codebook``, ``scale_log2`` and ``refit_step``, under
    the names that ``attribute_of`` gives.
    """

    def states(self) -> dict[str, QATState]:
        """Returns the states of the weights, by the names of their parameters."""
        raise NotImplementedError

    def matrices(self, name: str) -> Tensor:
        """Returns a parameter as ``[n, k]`` or ``[experts, n, k]``."""
        weight: Any = getattr(self, name)
        return weight  # type: ignore[no-any-return]

    def quantised_weight(self, name: str) -> CanonicalWeight:
        """Quantises a weight: its dequantised values are those that ``forward`` computes with."""
        format, codebook = self.states()[name].format, self._tensor(name, "codebook")
        ascending = None if codebook is None else codebook.detach().sort().values
        weight, scale_log2 = self.matrices(name).detach(), self._tensor(name, "scale_log2")
        quantiser: Any = quantise if weight.ndim == 2 else quantise_stack
        q: CanonicalWeight = quantiser(weight, format, codebook=ascending, scale_log2=scale_log2)
        return q

    def fake_quantised(self, name: str, dtype: torch.dtype) -> Tensor:
        """Computes the weight that ``forward`` multiplies with, differentiable."""
        return fake_quantise(
            self.matrices(name),
            self.states()[name].format,
            self._tensor(name, "codebook"),
            scale_log2=self._tensor(name, "scale_log2"),
            dtype=dtype,
        )

    @torch.no_grad()
    def refit(self) -> None:
        """Refits codebooks and searched scales to the weights as they are; those learned stay."""
        for name in self.states():
            self._refit(name)

    def stepped(self, trained: Collection[int]) -> None:
        """Counts a step of an optimiser, and refits where it is time.

        Args:
            trained: ids of the optimiser's parameters.
        """
        for name, state in self.states().items():
            if state.refit_every is None or id(getattr(self, name)) not in trained:
                continue
            refit_step: Any = self._tensor(name, "refit_step")
            state.step = (int(refit_step) if state.step is None else state.step) + 1
            refit_step.fill_(state.step)
            if state.step % state.refit_every == 0:
                self._refit(name)

    @torch.no_grad()
    def _refit(self, name: str) -> None:
        format = self.states()[name].format
        codebook, scale_log2 = (self._tensor(name, each) for each in ("codebook", "scale_log2"))
        searches = self._has_buffer(name, "scale_log2")
        fits = format.is_fitted and self._has_buffer(name, "codebook")
        gathered = [
            None if each is None else _whole(each)
            for each in (self.matrices(name), codebook, scale_log2)
        ]
        for weight, table, factor in matrices_with_codebook(*gathered):  # views of the buffers
            grouped = GroupedWeight.of(weight, format)
            ascending: Any = None if table is None else table.to(torch.float32).sort().values
            if searches:
                factor.copy_(grouped.searched_log2(ascending))
            if fits:
                table.copy_(grouped.refit(ascending, factor))

    def _tensor(self, name: str, tensor: str) -> Tensor | None:
        found: Tensor | None = getattr(self, attribute_of(name, tensor), None)
        return found

    def _has_buffer(self, name: str, tensor: str) -> bool:
        return self._buffers.get(attribute_of(name, tensor)) is not None

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        for state in self.states().values():
            state.step = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _refit_after_steps(self)  # copies and unpickled layers too


class QATLinear(QATModule, nn.Linear):
    """An ``nn.Linear`` that computes with its quantised weight; made by ``prepare_qat``.

    ``weight`` and ``bias`` are the parameters of the layer that it was made of.

    Attributes:
        qat: format and settings.
        codebook: ``[2^bits]``, a parameter if it is learned, else a buffer. None for formats with a
            fixed codebook.
        scale_log2: ``[n, k/G]``, log2 of a factor on each scale of the rule; a parameter if it is
            learned, a buffer for the rule ``search``, else None.
        refit_step: buffer of the steps so far, where codebook or scales are refitted.
    """

    qat: QATState
    codebook: Tensor | None
    scale_log2: Tensor | None
    refit_step: Tensor

    def states(self) -> dict[str, QATState]:
        """See ``QATModule``."""
        return {"weight": self.qat}

    def forward(self, x: Tensor) -> Tensor:
        """Computes ``x @ W_hat.T + bias``, under autocast in its dtype."""
        weight = self.fake_quantised("weight", compute_dtype(self.weight))
        return nn.functional.linear(x, weight, self.bias)

    @property
    def quantised(self) -> QuantisedTensor:
        """The quantised weight, whose dequantised values ``forward`` computes with."""
        q: Any = self.quantised_weight("weight")
        return q  # type: ignore[no-any-return]


class QATExperts(QATModule):
    """A module of experts that computes with its quantised weights; made by ``prepare_qat``.

    Parameters, attributes and other modules are those of the module of transformers that it was
    made of. Its forward pass is that of the ``QuantisedExperts`` that ``convert`` makes of it.

    Beside a projection, such as ``gate_up_proj``, it has

    - ``gate_up_proj_codebook``: ``[experts, 2^bits]``, or ``[2^bits]`` where all experts were given
      one; a parameter if it is learned, else a buffer. None for formats with a fixed codebook.
    - ``gate_up_proj_scale_log2``: ``[experts, n, k/G]``, see ``QATLinear``.
    - ``gate_up_proj_refit_step``: buffer of the steps so far, where something is refitted.

    Attributes:
        experts_class: class of the module that it was made of.
        qat: format and settings of each projection that is trained quantised, by its name.
    """

    experts_class: type[nn.Module]
    qat: dict[str, QATState]
    has_post_expert_norm = False  # not set by transformers before 5.20

    def states(self) -> dict[str, QATState]:
        """See ``QATModule``."""
        return self.qat

    def matrices(self, name: str) -> Tensor:
        """See ``QATModule``."""
        weight = super().matrices(name)
        return weight.transpose(1, 2) if self.is_transposed else weight

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Computes the weighted sum of each token's experts, see ``QuantisedExperts.forward``."""
        own: Any = self
        first = self._projection("gate_up_proj" if own.has_gate else "up_proj")
        expert_ids, down = local_experts(self, top_k_index), self._projection("down_proj")
        return routed_experts(self, first, down, hidden_states, expert_ids, top_k_weights)

    def _projection(self, name: str) -> Callable[..., Tensor]:
        def products(input: Tensor, *routing: Tensor) -> Tensor:
            if name in self.qat:
                weight = self.fake_quantised(name, compute_dtype(input))
            else:
                weight = self.matrices(name)
            bias, (expert_ids, *weights) = self._parameters.get(f"{name}_bias"), routing
            return dense_projection(input, expert_ids, weight, bias, *weights)

        return products

    def extra_repr(self) -> str:
        """Shows the formats."""
        return ", ".join(f"{name}={state.format}" for name, state in self.qat.items())


def attribute_of(name: str, tensor: str) -> str:
    """Returns the attribute of a ``QATModule`` that holds a tensor of a weight.

    Args:
        name: name of the weight's parameter.
        tensor: ``codebook``, ``scale_log2`` or ``refit_step``.
    """
    return tensor if name == "weight" else f"{name}_{tensor}"


def matrices_with_codebook(
    weight: Any, codebook: Any, scale_log2: Any
) -> list[tuple[Tensor, Any, Any]]:
    """Splits a stack into the matrices that have a codebook each.

    Args:
        weight: ``[n, k]``, which is one, or ``[experts, n, k]``.
        codebook: ``[2^bits]``, for all experts, ``[experts, 2^bits]`` or None.
        scale_log2: ``[..., n, k/G]`` or None.

    Returns:
        Matrix, codebook and factors of scales, of each; the last two as views.
    """
    if weight.ndim == 2:
        return [(weight, codebook, scale_log2)]
    if codebook is not None and codebook.ndim == 1:
        rows = None if scale_log2 is None else scale_log2.flatten(0, 1)
        return [(weight.flatten(0, 1), codebook, rows)]
    return [
        (each, of_expert(codebook, expert), of_expert(scale_log2, expert))
        for expert, each in enumerate(weight)
    ]


def prepare_qat(
    model: nn.Module,
    format: Format | str,
    skip: str | Sequence[str] | None = (),
    overrides: Mapping[str, Format | str | None] | None = None,
    *,
    default_skip: bool = True,
    codebook: Tensor | Mapping[str, Tensor] | None = None,
    learn: Collection[str] = (),
    refit_every: int = 100,
    inplace: bool = False,
) -> nn.Module:
    """Makes the ``nn.Linear`` layers and the experts of a model train with quantised weights.

    Each layer becomes a ``QATLinear``: still an ``nn.Linear``, with the same parameters under the
    same names, which ``state_dict`` holds as before. Beside them it has its codebook. A module of
    experts becomes ``QATExperts``, likewise. Train it as any model, then call ``convert``.

    Scales follow the weight at every step, by the format's rule; those of the rule ``search`` keep
    their ratio to the largest magnitude from one refit to the next. A ``kmeans`` codebook is fitted
    once, and refitted from where it is after every ``refit_every`` steps of the optimiser that
    trains the weight. ``refit`` does so for an optimiser that is not torch's.

    Args:
        model: any module, a single ``nn.Linear`` included. It is left untouched unless ``inplace``.
        format: see ``quantise_model``, as for ``skip``, ``overrides`` and ``default_skip``.
        skip: see there.
        overrides: see there.
        default_skip: see there.
        codebook: what to start from, for ``custom`` and ``kmeans``; see ``quantise_model``.
        learn: what gets a gradient: ``codebook`` (of ``kmeans`` and ``custom``), ``scale``, or
            both. See ``fake_quantise``. Learned scales are factors on those of the rule. Weight
            decay pulls a codebook to zero: give it a group without.
        refit_every: steps from one refit to the next; 0 for none.
        inplace: True to change ``model`` itself. Its parameters stay the same objects.

    Returns:
        A module of the same structure with ``QATLinear`` layers and ``QATExperts``.

    Raises:
        ValueError: see ``quantise_model``; also if a layer is a subclass of ``nn.Linear``
            (parametrised, or prepared already) or experts are, and not skipped. The message names
            the layer.
        TypeError: if ``model`` is not a module.

    Example:
        >>> model = prepare_qat(model, "kmeans2-g64")
        >>> train(model)
        >>> model = convert(model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepare_qat: model must be a module, got {type(model).__name__}")
    if isinstance(learn, str) or not set(learn) <= set(LEARNABLE):
        raise ValueError(f"prepare_qat: learn: wanted a list of {LEARNABLE}, got {learn!r}")
    if type(refit_every) is not int or refit_every < 0:
        raise ValueError(f"prepare_qat: refit_every must be at least 0, got {refit_every!r}")
    default = Format.parse(format)
    with _spoken_by("prepare_qat"):
        _check_subclasses(model, skip)
        kinds = "linear", "experts"
        sources, formats = chosen_layers(model, default, skip, overrides, default_skip, kinds)
        given = codebooks_of(sources, formats, default, codebook)
    if "codebook" in learn and not any(f.accepts_codebook for f in formats.values()):
        raise ValueError(f"prepare_qat: {default} has no codebook to learn; kmeans and custom have")
    # By id of the weight: layers that share it share what belongs to it.
    tensors: dict[int, dict[str, Tensor | None]] = {}
    keys = {name: id(sources[name].weight) for name in formats}
    for name, wanted in formats.items():
        key, weight = keys[name], matrix_of(sources[name]).detach()
        try:
            check_layer_codebook(given.get(key), wanted, sources[name])
            if key not in tensors:
                tensors[key] = _training_tensors(weight, wanted, given.get(key), learn)
        except (TypeError, ValueError) as error:
            raise type(error)(f"prepare_qat: layer {name}: {error}; skip or override it") from None
    if not inplace:
        check_patches("prepare_qat", model, None)
        model = copy.deepcopy(model)
    for name, wanted in formats.items():
        is_linear = isinstance(sources[name], nn.Linear)
        parent, _, parameter = (name, "", "weight") if is_linear else name.rpartition(".")
        module = model.get_submodule(parent)
        _prepare(module, parameter, wanted, tensors[keys[name]], refit_every)
    return model


def convert(
    model: nn.Module,
    *,
    backend: str = "auto",
    activations: str = "float",
    fuse: bool | Sequence[Sequence[str]] = False,
    inplace: bool = False,
) -> nn.Module:
    """Replaces the layers and experts that ``prepare_qat`` made by quantised ones.

    Codebooks and scales are those that were trained with: the dequantised weight of a layer is
    bit for bit what the training layer computed with, in the dtype of the weight. After autocast,
    it is so in autocast's dtype: ``convert(model).bfloat16()``. After mixed precision of FSDP,
    convert ``model.bfloat16()``, because the layer saw rounded weights.

    Args:
        model: a prepared model. It is left untouched unless ``inplace``.
        backend: see ``quantise_model``, as for ``activations``, ``fuse`` and ``inplace``.
        activations: see there.
        fuse: see there.
        inplace: see there.

    Returns:
        A module of the same structure with ``QuantisedLinear`` layers and ``QuantisedExperts``.

    Raises:
        ValueError: if the model has no prepared layer, or one is sharded; if a patched ``forward``
            would go on to call modules of ``model``, see ``quantise_model``.
        NoBackendError: if no backend supports a layer.
    """
    check_activations(activations)
    groups = checked_groups(fuse)
    modules = {name: each for name, each in model.named_modules() if isinstance(each, QATModule)}
    if not modules:
        raise ValueError(
            "convert: wanted a model of prepare_qat, got one without a QATLinear or QATExperts"
        )
    trained: dict[str, CanonicalWeight] = {}
    for module_name, module in modules.items():
        for parameter in module.states():
            name = _layer_name(module_name, parameter)
            if tensor_parallel.is_dtensor(getattr(module, parameter)):
                raise ValueError(
                    f"convert: layer {name}: its weight is a DTensor: gather the state_dict, load "
                    f"it into a prepared model that is not sharded, and convert that"
                )
            # The weight of a shared one after the first is not used.
            trained[name] = module.quantised_weight(parameter)
    if not inplace:
        check_patches("convert", model, None)
        model = copy.deepcopy(model)
    # A layer, or a module of experts, alone has no parent.
    whole, prefix = (nn.Sequential(model), "0.") if "" in modules else (model, "")
    for name in modules:
        _restore(model.get_submodule(name))
    named = {f"{prefix}{name}".removesuffix("."): q for name, q in trained.items()}
    replace_layers(whole, named, backend=backend, activations=activations)
    result = whole.get_submodule(prefix.removesuffix("."))
    fuse_layers(result, groups)
    logger.info("%s", model_report(result))
    return result


def _layer_name(module: str, parameter: str) -> str:
    """Returns the name that patterns of ``overrides`` match: that of a projection of experts."""
    return module if parameter == "weight" else f"{module}.{parameter}".removeprefix(".")


def _restore(module: nn.Module) -> None:
    """Makes a module the one of torch or transformers that it was."""
    assert isinstance(module, QATModule)
    for parameter in module.states():
        for tensor in ("codebook", "scale_log2", "refit_step"):
            if hasattr(module, attribute := attribute_of(parameter, tensor)):
                delattr(module, attribute)
    owner: Any = module
    del owner.qat
    if isinstance(module, QATExperts):
        owner.__class__ = owner.__dict__.pop("experts_class")
    else:
        owner.__class__ = nn.Linear


def refit(model: nn.Module) -> None:
    """Refits every codebook that is not learned, and every searched scale, of a prepared model.

    Only needed with optimisers that are not torch's, or for other times than ``refit_every`` gives.
    Every process of a sharded model has to call it.
    """
    for module in model.modules():
        if isinstance(module, QATModule):
            module.refit()


def _training_tensors(
    weight: Tensor, format: Format, codebook: Tensor | None, learn: Collection[str]
) -> dict[str, Tensor | None]:
    """Makes the codebook and scale factors of a weight ``[n, k]`` or ``[experts, n, k]``."""
    *experts, n, k = weight.shape
    shape = *experts, n, k // format.group_size_for(k)
    tensors: dict[str, Tensor | None] = {"codebook": None, "scale_log2": None}
    is_real = not weight.is_meta
    if format.accepts_codebook:
        start = torch.tensor(uniform_values(format.bits)).expand(*experts, -1)
        if codebook is not None:
            start = codebook
        elif is_real:
            parts = weight.reshape(-1, n, k)
            fitted: list[Any] = [GroupedWeight.of(each, format).fit().codebook for each in parts]
            start = torch.stack(fitted).view(start.shape)
        tensors["codebook"] = start.detach().to(weight.device, torch.float32, copy=True)
    is_searched = format.scale_rule == "search"
    if is_searched or "scale" in learn:
        tensors["scale_log2"] = found = torch.zeros(shape, device=weight.device)
        if is_searched and is_real:
            for part, table, factor in matrices_with_codebook(weight, tensors["codebook"], found):
                factor.copy_(GroupedWeight.of(part, format).searched_log2(table))
    for name in LEARNABLE:
        key = "scale_log2" if name == "scale" else name
        tensor = tensors[key]
        if name in learn and tensor is not None:  # FSDP wants parameters of one dtype
            tensors[key] = nn.Parameter(tensor.to(weight.dtype))
    return tensors


def _prepare(
    module: nn.Module,
    parameter: str,
    format: Format,
    tensors: Mapping[str, Tensor | None],
    refit_every: int,
) -> None:
    """Makes a module train one of its weights quantised."""
    owner: Any = module
    if parameter == "weight":
        owner.__class__ = QATLinear
    elif not isinstance(module, QATExperts):
        owner.experts_class, owner.qat = type(module), {}
        owner.__class__ = QATExperts
    for name, tensor in tensors.items():
        attribute = attribute_of(parameter, name)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(attribute, tensor)
        else:
            owner.register_buffer(attribute, tensor)
    refitted = (
        format.is_fitted and owner._has_buffer(parameter, "codebook"),
        owner._has_buffer(parameter, "scale_log2"),
    )
    is_refitted = refit_every > 0 and any(refitted)
    state = QATState(format, refit_every if is_refitted else None, 0)
    if parameter == "weight":
        owner.qat = state
    else:
        owner.qat[parameter] = state
    if is_refitted:
        step = torch.zeros((), dtype=torch.int64, device=getattr(owner, parameter).device)
        owner.register_buffer(attribute_of(parameter, "refit_step"), step)
    _refit_after_steps(owner)


def _check_subclasses(model: nn.Module, skip: str | Sequence[str] | None) -> None:
    """Raises ValueError for a subclass of nn.Linear, or of experts, that nobody skipped."""
    given = [skip] if isinstance(skip, str) else skip or ()
    for name, module in model.named_modules():
        if any(re.search(pattern, name) for pattern in given):
            continue
        found = f"prepare_qat: layer {name}: is a {type(module).__name__}"
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            raise ValueError(
                f"{found}, which may do more than nn.Linear: skip it, or make it an nn.Linear "
                f"(remove its parametrisation)"
            )
        is_changed = is_described(module) and not is_experts(module)
        if is_changed and not isinstance(module, QuantisedExperts):
            raise ValueError(
                f"{found}, whose projections are not parameters of three dimensions, or are "
                f"prepared already: skip it, or make them parameters (remove a parametrisation)"
            )


def _whole(tensor: Tensor) -> Tensor:
    """Returns a tensor, gathered from all processes if it is sharded."""
    return tensor.full_tensor() if tensor_parallel.is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


@contextmanager
def _spoken_by(caller: str) -> Iterator[None]:
    """Lets errors of the checks of ``quantise_model`` name another caller."""
    try:
        yield
    except (TypeError, ValueError) as error:
        text = str(error)
        if not text.startswith("quantise_model: "):
            raise
        raise type(error)(f"{caller}: {text.removeprefix('quantise_model: ')}") from None


# Refits after steps of an optimiser. A forward pass must not change a codebook: activation
# checkpointing runs it twice, and torch.compile would trace the change.

# In the order in which they were prepared or copied.
_refitted: "weakref.WeakKeyDictionary[QATModule, None]" = weakref.WeakKeyDictionary()


@cache
def _install_hook() -> None:
    register_optimizer_step_post_hook(_after_step)


def _refit_after_steps(module: QATModule) -> None:
    if any(state.refit_every is not None for state in module.states().values()):
        _install_hook()
        _refitted[module] = None


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    # In the order in which modules were made, that of every process of a sharded model.
    for module in list(_refitted):
        if isinstance(module, QATModule):  # not converted in place since
            module.stepped(trained)
