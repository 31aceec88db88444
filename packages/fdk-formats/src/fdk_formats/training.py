"""Training whole models with quantised weights: ``prepare_qat`` and ``convert``."""

import copy
import itertools
import logging
import re
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from fdk_formats.format import Format
from fdk_formats.fuse import checked_groups, fuse_layers
from fdk_formats.model import chosen_layers, codebooks_of, replace_layers
from fdk_formats.packed_module import compute_dtype
from fdk_formats.qat import fake_quantise
from fdk_formats.quantise import quantise
from fdk_formats.report import model_report
from fdk_formats.scales import GroupedWeight, check_codebook
from fdk_formats.tensor import QuantisedTensor

LEARNABLE = ("codebook", "scale")

logger = logging.getLogger(__name__)


@dataclass
class QATState:
    """The settings of a ``QATLinear``, and its count of steps.

    Attributes:
        format: format that its weight is trained for.
        refit_every: steps of the optimiser from one refit to the next; None for no refit.
        step: steps so far; None where the buffer ``refit_step`` says it.
    """

    format: Format
    refit_every: int | None
    step: int | None = None


class QATLinear(nn.Linear):
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

    def forward(self, x: Tensor) -> Tensor:
        """Computes ``x @ W_hat.T + bias``, under autocast in its dtype."""
        dtype = compute_dtype(self.weight)
        weight = fake_quantise(
            self.weight, self.qat.format, self.codebook, scale_log2=self.scale_log2, dtype=dtype
        )
        return nn.functional.linear(x, weight, self.bias)

    @property
    @torch.no_grad()
    def quantised(self) -> QuantisedTensor:
        """The quantised weight, whose dequantised values ``forward`` computes with."""
        codebook = None if self.codebook is None else self.codebook.sort().values
        return quantise(self.weight, self.qat.format, codebook=codebook, scale_log2=self.scale_log2)

    @torch.no_grad()
    def refit(self) -> None:
        """Refits codebook and searched scales to the weight as it is; those learned stay."""
        weight, codebook = _whole(self.weight), self.codebook
        grouped = GroupedWeight.of(weight, self.qat.format)
        table = None if codebook is None else _whole(codebook).to(torch.float32).sort().values
        searches = self.scale_log2 is not None and _is_buffer(self, "scale_log2")
        if searches:
            self.scale_log2.copy_(grouped.searched_log2(table))  # type: ignore[union-attr]
        if codebook is not None and self.qat.format.is_fitted and _is_buffer(self, "codebook"):
            assert table is not None
            scale_log2 = None if self.scale_log2 is None else _whole(self.scale_log2)
            codebook.copy_(grouped.refit(table, scale_log2))

    def stepped(self) -> None:
        """Counts a step of the optimiser, and refits if it is time."""
        state = self.qat
        assert state.refit_every is not None
        if state.step is None:
            state.step = int(self.refit_step)
        state.step += 1
        self.refit_step.fill_(state.step)
        if state.step % state.refit_every == 0:
            self.refit()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.qat.step = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _refit_after_steps(self)  # copies and unpickled layers too


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
    """Makes the ``nn.Linear`` layers of a model train with quantised weights.

    Each becomes a ``QATLinear``: still an ``nn.Linear``, with the same parameters under the same
    names, which ``state_dict`` holds as before. Beside them it has its codebook. Train it
    as any model, then call ``convert``.

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
        A module of the same structure with ``QATLinear`` layers.

    Raises:
        ValueError: see ``quantise_model``; also if a layer is a subclass of ``nn.Linear``
            (parametrised, or prepared already) and not skipped. The message names the layer.
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
        sources, formats = chosen_layers(model, default, skip, overrides, default_skip, ("linear",))
        given = codebooks_of(sources, formats, default, codebook)
    if "codebook" in learn and not any(f.accepts_codebook for f in formats.values()):
        raise ValueError(f"prepare_qat: {default} has no codebook to learn; kmeans and custom have")
    # By id of the weight: layers that share it share what belongs to it.
    tensors: dict[int, dict[str, Tensor | None]] = {}
    keys = {name: id(sources[name].weight) for name in formats}
    for name, wanted in formats.items():
        key, weight = keys[name], sources[name].weight.detach()
        try:
            check_codebook(given.get(key), wanted)
            if key not in tensors:
                tensors[key] = _training_tensors(weight, wanted, given.get(key), learn)
        except (TypeError, ValueError) as error:
            raise type(error)(f"prepare_qat: layer {name}: {error}; skip or override it") from None
    if not inplace:
        model = copy.deepcopy(model)
    for name, wanted in formats.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        _prepare(layer, wanted, tensors[keys[name]], refit_every)
    return model


def convert(
    model: nn.Module,
    *,
    backend: str = "auto",
    activations: str = "float",
    fuse: bool | Sequence[Sequence[str]] = False,
    inplace: bool = False,
) -> nn.Module:
    """Replaces the layers that ``prepare_qat`` made by quantised ones.

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
        A module of the same structure with ``QuantisedLinear`` layers.

    Raises:
        ValueError: if the model has no prepared layer, or one is sharded.
        NoBackendError: if no backend supports a layer.
    """
    check_activations(activations)
    groups = checked_groups(fuse)
    layers = {name: each for name, each in model.named_modules() if isinstance(each, QATLinear)}
    if not layers:
        raise ValueError("convert: wanted a model of prepare_qat, got one without a QATLinear")
    for name, layer in layers.items():
        if tensor_parallel.is_dtensor(layer.weight):
            raise ValueError(
                f"convert: layer {name}: its weight is a DTensor: gather the state_dict, load it "
                f"into a prepared model that is not sharded, and convert that"
            )
    # The weight of a shared one after the first is not used.
    trained = {name: layer.quantised for name, layer in layers.items()}
    if not inplace:
        model = copy.deepcopy(model)
    whole = nn.Sequential(model) if "" in layers else model  # a layer alone has no parent
    for name in layers:
        _restore(model.get_submodule(name))
    named = {"0" if name == "" else name: q for name, q in trained.items()}
    replace_layers(whole, named, backend=backend, activations=activations)
    result = model if whole is model else whole.get_submodule("0")
    fuse_layers(result, groups)
    logger.info("%s", model_report(result))
    return result


def _restore(layer: nn.Module) -> None:
    """Makes a layer the nn.Linear that it was."""
    assert isinstance(layer, QATLinear)
    for name in ("codebook", "scale_log2", "refit_step"):
        if hasattr(layer, name):
            delattr(layer, name)
    del layer.qat
    layer.__class__ = nn.Linear  # type: ignore[assignment]


def refit(model: nn.Module) -> None:
    """Refits every codebook that is not learned, and every searched scale, of a prepared model.

    Only needed with optimisers that are not torch's, or for other times than ``refit_every`` gives.
    Every process of a sharded model has to call it.
    """
    for layer in model.modules():
        if isinstance(layer, QATLinear):
            layer.refit()


def _training_tensors(
    weight: Tensor, format: Format, codebook: Tensor | None, learn: Collection[str]
) -> dict[str, Tensor | None]:
    """Makes the codebook and scale factors of a layer."""
    n, k = weight.shape
    shape = n, k // format.group_size_for(k)
    tensors: dict[str, Tensor | None] = {"codebook": None, "scale_log2": None}
    is_real = not weight.is_meta
    if format.accepts_codebook:
        if codebook is None and is_real:
            codebook = GroupedWeight.of(weight, format).fit().codebook
        start = torch.tensor(uniform_values(format.bits)) if codebook is None else codebook
        tensors["codebook"] = start.detach().to(weight.device, torch.float32, copy=True)
    is_searched = format.scale_rule == "search"
    if is_searched or "scale" in learn:
        tensors["scale_log2"] = (
            GroupedWeight.of(weight, format).searched_log2(tensors["codebook"])
            if is_searched and is_real
            else torch.zeros(shape, device=weight.device)
        )
    for name in LEARNABLE:
        key = "scale_log2" if name == "scale" else name
        tensor = tensors[key]
        if name in learn and tensor is not None:  # FSDP wants parameters of one dtype
            tensors[key] = nn.Parameter(tensor.to(weight.dtype))
    return tensors


def _prepare(
    layer: nn.Linear, format: Format, tensors: Mapping[str, Tensor | None], refit_every: int
) -> None:
    layer.__class__ = QATLinear
    assert isinstance(layer, QATLinear)
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            layer.register_parameter(name, tensor)
        else:
            layer.register_buffer(name, tensor)
    refitted = (
        format.is_fitted and _is_buffer(layer, "codebook"),
        layer.scale_log2 is not None and _is_buffer(layer, "scale_log2"),
    )
    is_refitted = refit_every > 0 and any(refitted)
    layer.qat = QATState(format, refit_every if is_refitted else None, 0)
    if is_refitted:
        step = torch.zeros((), dtype=torch.int64, device=layer.weight.device)
        layer.register_buffer("refit_step", step)
    _refit_after_steps(layer)


def _check_subclasses(model: nn.Module, skip: str | Sequence[str] | None) -> None:
    """Raises ValueError for a subclass of nn.Linear that nobody skipped."""
    given = [skip] if isinstance(skip, str) else skip or ()
    for name, module in model.named_modules():
        if type(module) is nn.Linear or not isinstance(module, nn.Linear):
            continue
        if not any(re.search(pattern, name) for pattern in given):
            raise ValueError(
                f"prepare_qat: layer {name}: is a {type(module).__name__}, which may do more "
                f"than nn.Linear: skip it, or make it an nn.Linear (remove its parametrisation)"
            )


def _is_buffer(layer: nn.Module, name: str) -> bool:
    return name in dict(layer.named_buffers(recurse=False))


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

_serial = itertools.count()
_refitted: "weakref.WeakValueDictionary[int, QATLinear]" = weakref.WeakValueDictionary()


@cache
def _install_hook() -> None:
    register_optimizer_step_post_hook(_after_step)


def _refit_after_steps(layer: QATLinear) -> None:
    if layer.qat.refit_every is not None:
        _install_hook()
        _refitted[next(_serial)] = layer


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    # In the order in which layers were made, which is that of every process of a sharded model.
    for layer in list(_refitted.values()):
        if isinstance(layer, QATLinear) and id(layer.weight) in stepped:
            layer.stepped()
