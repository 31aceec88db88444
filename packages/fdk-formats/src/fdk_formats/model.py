"""Quantising the layers of whole models."""

import copy
import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fdk_formats.backends import NoBackendError, check_activations, select
from fdk_formats.calibration import EPOCHS, advise_calibration, calibrate_weights
from fdk_formats.experts import (
    PROJECTIONS,
    ExpertLinear,
    experts_like,
    layers_and_projections,
)
from fdk_formats.format import Format
from fdk_formats.fuse import checked_groups, fuse_layers, rows_of, siblings
from fdk_formats.instance_attributes import carry_over, check_patches
from fdk_formats.layer_kinds import (
    check_include,
    check_source,
    kind_of,
    matrix_of,
    parameter_name,
    quantised_like,
)
from fdk_formats.model_inputs import calls_of
from fdk_formats.quantise import check_stack_arguments, quantise, quantise_stack
from fdk_formats.quantised_module import QuantisedModule, call_model_hooks
from fdk_formats.report import left_weights, model_report, summary_of
from fdk_formats.scales import GroupedWeight, check_codebook
from fdk_formats.stored_weight import problem_of, zero_weight
from fdk_formats.tensor import CanonicalWeight, QuantisedTensor, relative_error

# The output head has few of the weights and much of the loss; other quantisers skip it too.
DEFAULT_SKIP = r"(^|\.)lm_head$"
# A share of the weights that may be left without a warning.
UNREMARKABLE = 0.05

logger = logging.getLogger(__name__)


def quantise_model(
    model: nn.Module,
    format: Format | str,
    skip: str | Sequence[str] | None = (),
    overrides: Mapping[str, Format | str | None] | None = None,
    backend: str = "auto",
    *,
    default_skip: bool = True,
    include: Sequence[str] = (),
    activations: str = "float",
    calibration: Iterable[Any] | None = None,
    epochs: int = EPOCHS,
    importance: Mapping[str, Tensor] | None = None,
    codebook: Tensor | Mapping[str, Tensor] | None = None,
    fuse: bool | Sequence[Sequence[str]] = False,
    inplace: bool = False,
    progress: bool = True,
) -> nn.Module:
    """Quantises the ``nn.Linear`` layers of a model, and the experts of its mixtures.

    Experts that transformers holds as 3-D parameters become ``QuantisedExperts``; each of their
    projections has a name, as ``layers.0.mlp.experts.gate_up_proj``, for the patterns below.

    Tied weights stay tied: layers that share a weight share the quantised one. A layer whose weight
    something else uses too, such as an embedding, is not quantised; nor are subclasses of
    ``nn.Linear``, whose owners may do more than call them. What is left is logged with the reason
    at level INFO; at level WARNING if it is more than the skipped layers and more than 5 % of the
    weights. ``model_report`` reports on the result.

    A model on the meta device gives a plan: layers of the right formats and sizes without values,
    for ``model_report`` or for ``load_state_dict(assign=True)``.

    Args:
        model: any module, a single ``nn.Linear`` included. It is left untouched unless ``inplace``.
        format: format of every layer that no override matches, for example ``"nf4-g64"``.
        skip: regular expressions, searched in the dotted name of a layer. A match is not quantised.
            They add to the default, the output head ``lm_head``. None skips nothing, not even
            the head.
        overrides: from regular expression to format, or to None to skip. The first match wins, also
            over ``skip``.
        backend: ``auto`` or a backend's name, see ``select``.
        default_skip: False to let ``skip`` replace the default.
        include: more kinds of layers to quantise: ``embedding`` (``nn.Embedding``) and ``conv1d``
            (the linear layer of GPT-2, which becomes a ``QuantisedLinear``).
        activations: ``int8`` rounds the input of every layer to 8 bits, see ``fdk_formats.int8``.
        calibration: inputs of the model, such as token ids ``[windows, tokens]``, to quantise
            linear layers and experts for, block after block; see ``calibrate_weights``. It lowers
            the error of a language model several times at 3 bits and fewer. Layers of other kinds
            are not calibrated. Not with ``importance`` or ``codebook``. Each layer's
            ``relative_error`` is that before scales were trained.
        epochs: how often scales are trained on each input of ``calibration``, for language models;
            0 for calibration without training.
        importance: by layer name, see ``quantise``, and ``quantise_stack`` for experts. Those of
            layers that share a weight are added.
        codebook: by layer name, such as the codebooks that ``fake_quantise`` trained with;
            ``kmeans`` is fitted to layers without one. Or one ``[2^bits]`` table for every layer
            with the codebook and bits of ``format`` (``custom4`` or ``kmeans4``), whatever its
            group size and scales. See ``quantise``.
        fuse: compute layers of one input as one product, see ``fuse_layers``. True is q_proj,
            k_proj and v_proj, and gate_proj and up_proj. Files and ``state_dict`` stay those of
            separate layers. With ``kmeans``, the layers of a group get one codebook, unless
            ``codebook`` has one for some of them.
        inplace: True to change ``model`` itself, a layer at a time: peak memory is that of one
            layer more. An error leaves the layers before it quantised.
        progress: show a progress bar on a terminal.

    Returns:
        A module of the same structure with ``QuantisedLinear`` layers; ``model`` if ``inplace``,
        unless it is a layer itself.

    Raises:
        ValueError: if a layer does not fit its format, its weight is computed (pruned, or normed by
            ``torch.nn.utils``), sharded or not finite; if a layer's ``forward`` is patched or it
            holds more than ``nn.Linear`` does; if a patched ``forward`` would go on to call modules
            that are replaced, or copied without ``inplace``; if a codebook is missing, not wanted,
            of another size or not ascending; if a name or an override matches no layer; if ``fuse``
            is malformed; if a layer to calibrate is on the meta device. The message names the
            layer.
        TypeError: if ``model`` is not a module, or a codebook not a floating tensor.
        NoBackendError: if no backend supports a layer.

    Example:
        >>> small = quantise_model(model, "kmeans4-g64", overrides={r"down_proj$": "int8-g64"})
        >>> print(model_report(small))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantise_model: model must be a module, got {type(model).__name__}")
    check_activations(activations)
    if calibration is not None and (importance or codebook is not None):
        raise ValueError("quantise_model: wanted calibration, or importance and codebook, got both")
    groups = checked_groups(fuse)
    default = Format.parse(format)
    check_include(include)
    kinds = ("linear", "experts", *include)
    sources, formats = chosen_layers(model, default, skip, overrides, default_skip, kinds)
    replaced = _modules_of({name: sources[name] for name in formats}) if inplace else None
    check_patches("quantise_model", model, replaced)
    codebooks = codebooks_of(sources, formats, default, codebook)
    for name, wanted in formats.items():
        with _naming(name):
            check_layer_codebook(codebooks.get(id(sources[name].weight)), wanted, sources[name])
        _check_layer(name, sources[name], wanted, backend, activations)
    importances = _importances(sources, formats, importance or {})
    together = _sharing_codebook(sources, formats, codebooks, groups)
    quantised: dict[str, CanonicalWeight] = {}

    settings: dict[str, Any] = {"backend": backend, "activations": activations}
    if calibration is not None:
        if empty := [name for name in formats if matrix_of(sources[name]).is_meta]:
            raise ValueError(
                f"quantise_model: layer {empty[0]}: calibration needs its values, and it is on the "
                f"meta device: load the model first"
            )
        if not inplace:  # calibration changes the weights
            model, inplace = copy.deepcopy(model), True
            known = dict(layers_and_projections(model))
            sources = {name: known[name] for name in sources}
        calls = calls_of(calibration)
        kinds_of = {name: kind_of(sources[name]) for name in formats}
        chosen = {n: f for n, f in formats.items() if kinds_of[n] in ("linear", "experts")}
        calibrated = calibrate_weights(model, chosen, calls, epochs=epochs, progress=progress)
        for name in [name for name in formats if name not in chosen]:
            logger.info("%s (%s): quantised without calibration", name, kinds_of[name])
        # A layer of a shared weight after the one that was calibrated.
        names = sorted(formats, key=lambda name: name not in calibrated)
        quantised, together = {n: layer.quantised for n, layer in calibrated.items()}, {}
    else:
        advise_calibration(formats.values())
        calibrated, names = {}, list(formats)
    owners: dict[int, QuantisedModule] = {}
    # By id of a module of the source, its copy: deepcopy uses it instead of copying.
    memo: dict[int, Any] = {}
    copied: list[tuple[Any, Any]] = []
    places = _places(model) if inplace else {}
    # By id of a module of experts: its projections to quantise, and those that were.
    wanted_of: dict[int, int] = Counter(
        id(sources[name].owner[0]) for name in formats if isinstance(sources[name], ExpertLinear)
    )
    mixtures: dict[int, dict[str, Any]] = {}
    for name in _progress(names) if progress and not calibrated else names:
        source = sources[name]
        weight, key = matrix_of(source), id(source.weight)
        if key not in owners:
            if name in together and name not in quantised:
                quantised |= _quantise_group(together[name], sources, formats[name], importances)
            if name not in quantised:
                quantised[name] = _quantise_layer(
                    name, weight, formats[name], importances.get(key), codebooks.get(key)
                )
        layer = _counterpart(name, quantised.pop(name, None), source, owners, settings)
        if name in calibrated:  # the weight has changed since
            layer.relative_error = calibrated[name].relative_error
        if inplace:
            _replace(source, layer, places)
            model = layer if model is source else model
            sources[name] = layer
        else:
            bias = getattr(source, "bias", None)
            if bias is not None:  # keep a shared bias shared
                layer.bias = memo.setdefault(id(bias), layer.bias)
            memo[id(source)] = layer
        if isinstance(source, ExpertLinear):
            owner = source.owner[0]
            done = mixtures.setdefault(id(owner), {})
            done[source.name] = layer
            if len(done) == wanted_of[id(owner)]:
                mixture = experts_like(owner, done)
                if inplace:
                    mixture.take_over(owner)
                    _replace(owner, mixture, places)
                    model = mixture if model is owner else model
                else:
                    memo[id(owner)] = mixture
                    copied.append((owner, mixture))
        del source, weight
    result = model
    if not inplace:
        # Now that every layer is in memo: a hook may be a method of another module of the copy.
        for owner, mixture in copied:
            mixture.take_over(owner, memo)
        layers = [sources[name] for name in formats]
        copied += [(s, memo[id(s)]) for s in layers if not isinstance(s, ExpertLinear)]
        for source, layer in copied:
            carry_over(source, layer, memo)
        result = copy.deepcopy(model, memo)
    fuse_layers(result, groups)
    logger.info("%s", model_report(result))
    call_model_hooks(result)
    return result


def choose_formats(
    model: nn.Module,
    format: Format | str,
    skip: str | Sequence[str] | None = (),
    overrides: Mapping[str, Format | str | None] | None = None,
    *,
    backend: str = "auto",
) -> dict[str, Format]:
    """Returns the format of each linear layer and projection of experts to quantise, by name.

    Args:
        model: see ``quantise_model``, as for the other arguments.
        format: of layers that no override matches.
        skip: regular expressions of layers to leave, in addition to the output head.
        overrides: from regular expression to format, or to None to leave a layer.
        backend: see ``quantise_model``.

    Raises:
        NoBackendError: if no backend supports a layer.
        ValueError: if a layer does not fit its format or cannot be quantised, an override matches
            none, or an argument is wrong.
    """
    sources, formats = chosen_layers(
        model, Format.parse(format), skip, overrides, True, ("linear", "experts")
    )
    for name, wanted in formats.items():
        _check_layer(name, sources[name], wanted, backend, "float")
    return formats


def chosen_layers(
    model: nn.Module,
    default: Format,
    skip: str | Sequence[str] | None,
    overrides: Mapping[str, Format | str | None] | None,
    default_skip: bool,
    kinds: Sequence[str],
) -> tuple[dict[str, Any], dict[str, Format]]:
    """Returns all layers of some kinds (see ``kind_of``), and the formats of those to quantise."""
    chosen = {
        _pattern("overrides", pattern): None if wanted is None else Format.parse(wanted)
        for pattern, wanted in (overrides or {}).items()
    }
    given = [skip] if isinstance(skip, str) else skip or ()
    skips = [_pattern("skip", text) for text in given]
    modules = layers_and_projections(model)
    sources = {name: module for name, module in modules if kind_of(module) in kinds}
    names = _names(model, sources)
    _check_overrides(names, chosen)
    _warn_of_unmatched(names, skips)
    if default_skip and skip is not None:
        skips.append(re.compile(DEFAULT_SKIP))
    formats = _choose_formats(names, default, skips, chosen)
    skipped = {
        parameter_name(alias, sources[name])
        for name in names.keys() - formats.keys()
        for alias in names[name]
    }
    for name in formats:
        check_source("quantise_model", name, sources[name])
    for name, owner in _tied_elsewhere(model, sources, formats).items():
        logger.info("left %s: tied to %s", name, owner)
        del formats[name]
    _warn_of_left(model, formats, sources, skipped, skips)
    return sources, formats


def replace_layers(
    model: nn.Module,
    layers: Mapping[str, CanonicalWeight],
    *,
    backend: str = "auto",
    activations: str = "float",
) -> None:
    """Replaces layers of a model, in place, by quantised ones, as ``quantise_model`` does.

    Layers that share a weight share the first one's quantised weight; hooks, attributes and every
    name of a layer stay.

    Args:
        model: the model; not itself one of the layers.
        layers: quantised weights by the dotted name of their layer, or of a projection of experts,
            whose module becomes ``QuantisedExperts``.
        backend: see ``quantise_model``.
        activations: see ``quantise_model``.

    Raises:
        ValueError: if a layer cannot be replaced, see ``quantise_model``.
    """
    known = dict(layers_and_projections(model, remove_duplicate=False))
    sources: dict[str, Any] = {}
    for name in layers:
        source = sources[name] = known.get(name)
        if source is None:
            raise AttributeError(f"replace_layers: the model has no layer {name!r}")
        if source is model or kind_of(source) is None:
            raise ValueError(
                f"replace_layers: wanted names of layers within the model, got {name!r}, which is "
                f"{'the model itself' if source is model else f'a {type(source).__name__}'}"
            )
        check_source("replace_layers", name, source)
    check_patches("replace_layers", model, _modules_of(sources))
    places, owners = _places(model), dict[int, QuantisedModule]()
    settings: dict[str, Any] = {"backend": backend, "activations": activations}
    # By id of a module of experts, the module and its quantised projections.
    mixtures: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
    for name, q in layers.items():
        source = sources[name]
        layer = _counterpart(name, q, source, owners, settings)
        _replace(source, layer, places)
        if isinstance(source, ExpertLinear):
            owner = source.owner[0]
            mixtures.setdefault(id(owner), (owner, {}))[1][source.name] = layer
    for owner, done in mixtures.values():
        mixture = experts_like(owner, done)
        mixture.take_over(owner)
        _replace(owner, mixture, places)
    call_model_hooks(model)


def _counterpart(
    name: str,
    q: CanonicalWeight | None,
    source: Any,
    owners: dict[int, QuantisedModule],
    settings: Mapping[str, Any],
) -> QuantisedModule:
    """Makes the quantised counterpart of a layer.

    Args:
        name: of the layer.
        q: its weight; not needed where another layer with the same weight came before.
        source: the layer.
        owners: by id of a weight, the first layer made of it; extended.
        settings: arguments ``backend`` and ``activations`` of ``QuantisedLinear``.
    """
    owner, weight = owners.get(id(source.weight)), matrix_of(source).detach()
    q = owner.quantised if owner else q
    assert q is not None
    with _naming(name):
        layer = quantised_like(source, q, getattr(source, "bias", None), weight.dtype, settings)
    if owner is None:
        owners[id(source.weight)] = layer
        if weight.device.type != "meta":
            layer.relative_error = relative_error(weight, q)
    elif type(layer) is type(owner):  # an embedding and a head have each their own
        layer.tie_weight(owner)
    return layer.train(source.training)


def _replace(
    source: Any, layer: Any, places: Mapping[int, Sequence[tuple[nn.Module, str]]]
) -> None:
    """Puts a layer in the place of its source, wherever that is registered."""
    if getattr(source, "bias", None) is not None:
        layer.bias = source.bias  # a shared bias stays shared
    if not isinstance(source, ExpertLinear):  # made for the work on its owner
        carry_over(source, layer)
    for parent, attribute in places.get(id(source), ()):
        parent._modules[attribute] = layer


def _modules_of(sources: Mapping[str, Any]) -> dict[int, str]:
    """Returns names of layers by id of their module, that of the experts for a projection."""
    return {
        id(source.owner[0] if isinstance(source, ExpertLinear) else source): name
        for name, source in sources.items()
    }


def _places(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Returns, by id of a module, its parents and its name in each."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            places.setdefault(id(child), []).append((parent, name))
    return places


def _warn_of_unmatched(
    names: Mapping[str, Sequence[str]], skips: Sequence[re.Pattern[str]]
) -> None:
    every = [name for aliases in names.values() for name in aliases]
    for pattern in skips:
        if not any(map(pattern.search, every)):
            logger.warning("quantise_model: skip %r matches no linear layer", pattern.pattern)


def _warn_of_left(
    model: nn.Module,
    formats: Mapping[str, Format],
    sources: Mapping[str, Any],
    skipped: set[str],
    skips: Sequence[re.Pattern[str]],
) -> None:
    """Logs the weights that are not quantised; warns where they are many and nobody asked."""
    chosen = {id(sources[name].weight) for name in formats}
    quantised = sum(sources[name].weight.numel() for name in formats)
    left = [
        weight
        for weight in left_weights(model)
        if id(model.get_parameter(weight.name)) not in chosen
    ]
    total = quantised + sum(weight.weights for weight in left)
    for weight in left:
        if weight.name.removesuffix(".weight") not in sources:  # their reasons are logged already
            logger.info("left %s: %s", weight.name, weight.kind)
    unasked = [
        weight
        for weight in left
        if weight.name not in skipped and not any(skip.search(weight.name) for skip in skips)
    ]
    share = sum(weight.weights for weight in unasked) / max(1, total)
    if not formats:
        warnings.warn(
            f"quantise_model: nothing to quantise: {len(sources)} linear layers, all left",
            stacklevel=4,  # the caller of quantise_model or choose_formats
        )
    elif share > UNREMARKABLE:
        logger.warning(
            "quantise_model: %.0f %% of the weights are left as they are: %s",
            100 * share,
            summary_of(unasked, total),
        )


def _pattern(argument: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"quantise_model: {argument} must be regular expressions, got {text!r}: {error}"
        ) from None


def _sharing_codebook(
    linears: Mapping[str, Any],
    formats: Mapping[str, Format],
    codebooks: Mapping[int, Tensor],
    groups: Sequence[Sequence[str]],
) -> dict[str, tuple[str, ...]]:
    """Returns, by layer, the groups to fuse whose codebook is fitted to all their rows."""
    uses = Counter(id(linears[name].weight) for name in formats)

    def fits(names: tuple[str, ...]) -> bool:
        weights = [matrix_of(linears[name]) for name in names]
        kinds = {
            (formats[n], w.shape[1], w.dtype, w.device) for n, w in zip(names, weights, strict=True)
        }
        keys = [id(linears[name].weight) for name in names]
        is_given = any(key in codebooks for key in keys)
        is_real = weights[0].device.type != "meta"
        is_fitted = formats[names[0]].is_fitted and not is_given and is_real
        return is_fitted and len(kinds) == 1 and all(uses[key] == 1 for key in keys)

    found: dict[str, tuple[str, ...]] = {}
    for names in filter(fits, siblings(formats, groups)):
        if not found.keys() & set(names):  # the first group of a layer, as in fuse_layers
            found |= dict.fromkeys(names, names)
    return found


def _quantise_group(
    names: Sequence[str],
    linears: Mapping[str, Any],
    format: Format,
    importances: Mapping[int, Tensor],
) -> dict[str, QuantisedTensor]:
    """Quantises layers as one weight of all their rows, and returns the rows of each."""
    weights = [matrix_of(linears[name]) for name in names]
    own = [importances.get(id(linears[name].weight)) for name in names]
    for name, weight, each in zip(names, weights, own, strict=True):  # errors name the layer
        with _naming(name):
            GroupedWeight.of(weight.detach(), format, each)
    importance = None
    if any(each is not None for each in own):
        given = [
            w.new_ones(()) if each is None else each for each, w in zip(own, weights, strict=True)
        ]
        importance = torch.cat(
            [each.expand(weight.shape) for each, weight in zip(given, weights, strict=True)]
        )
    q = _quantise_layer(", ".join(names), torch.cat(weights), format, importance)
    ends = list(accumulate((len(weight) for weight in weights), initial=0))
    return {name: rows_of(q, *span) for name, span in zip(names, pairwise(ends), strict=True)}


def _quantise_layer(
    name: str,
    weight: Tensor,
    format: Format,
    importance: Tensor | None,
    codebook: Tensor | None = None,
) -> Any:
    if weight.device.type == "meta":
        return zero_weight(format, tuple(weight.shape), weight.device)
    with _naming(name):
        if weight.ndim == 3:
            return quantise_stack(weight.detach(), format, importance=importance, codebook=codebook)
        return quantise(weight.detach(), format, importance=importance, codebook=codebook)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Adds the name of the layer to errors."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"quantise_model: layer {name}: {error}") from None


def _names(model: nn.Module, linears: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """Returns all names of each layer by its first: a module may be registered several times."""
    firsts = {id(module): name for name, module in linears.items()}
    names: dict[str, list[str]] = {name: [] for name in linears}
    experts = {
        (id(module.owner[0]), module.name): name
        for name, module in linears.items()
        if isinstance(module, ExpertLinear)
    }
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in firsts:
            names[firsts[id(module)]].append(name)
        for projection in PROJECTIONS:
            if (id(module), projection) in experts:
                alias = f"{name}.{projection}".removeprefix(".")
                names[experts[id(module), projection]].append(alias)
    return names


def _check_overrides(
    names: Mapping[str, Sequence[str]], overrides: Mapping[re.Pattern[str], Format | None]
) -> None:
    every = [name for aliases in names.values() for name in aliases]
    for pattern in overrides:
        if not any(map(pattern.search, every)):
            raise ValueError(
                f"quantise_model: override {pattern.pattern!r} fits no linear layer of "
                f"{', '.join(every) or 'the model, which has none'}"
            )


def _choose_formats(
    names: Mapping[str, Sequence[str]],
    default: Format,
    skips: Sequence[re.Pattern[str]],
    overrides: Mapping[re.Pattern[str], Format | None],
) -> dict[str, Format]:
    """Returns the format of each layer to quantise. Overrides come before skips."""
    formats = {}
    for name, every in names.items():
        matches = [
            wanted for pattern, wanted in overrides.items() if any(map(pattern.search, every))
        ]
        if not matches and any(any(map(pattern.search, every)) for pattern in skips):
            logger.info("left %s: skip", name)
            continue
        wanted = matches[0] if matches else default
        if wanted is None:
            logger.info("left %s: override", name)
        else:
            formats[name] = wanted
    return formats


def _importances(
    linears: Mapping[str, Any], formats: Mapping[str, Format], given: Mapping[str, Tensor]
) -> dict[int, Tensor]:
    """Returns importance by id of the weight, added up over layers that share it."""
    _check_names("importance", given, formats)
    importances: dict[int, Tensor] = {}
    for name, importance in given.items():
        key = id(linears[name].weight)
        importances[key] = importances[key] + importance if key in importances else importance
    return importances


def codebooks_of(
    linears: Mapping[str, Any],
    formats: Mapping[str, Format],
    default: Format,
    given: Tensor | Mapping[str, Tensor] | None,
) -> dict[int, Tensor]:
    """Returns the caller's codebooks by id of the weight."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        check_codebook(given, default)  # even if overrides match every layer
        kind = default.codebook, default.bits
        names = [name for name, format in formats.items() if (format.codebook, format.bits) == kind]
        given = dict.fromkeys(names, given)
    _check_names("codebook", given, formats)
    codebooks: dict[int, Tensor] = {}
    for name, codebook in given.items():
        with _naming(name):
            check_layer_codebook(codebook, formats[name], linears[name])
        other = codebooks.setdefault(id(linears[name].weight), codebook)
        if other is not codebook and not torch.equal(other, codebook):
            raise ValueError(
                f"quantise_model: layer {name}: shares its weight, and must have the codebook of "
                f"the layers that it shares it with: {other.tolist()[:8]}..., "
                f"got {codebook.tolist()[:8]}..."
            )
    return codebooks


def check_layer_codebook(codebook: Tensor | None, format: Format, source: nn.Module) -> None:
    """Checks a caller's codebook; experts may have one each, ``[experts, 2^bits]``."""
    is_stack = isinstance(source, ExpertLinear) and isinstance(codebook, Tensor)
    if is_stack and codebook is not None and codebook.ndim == 2:
        check_stack_arguments("quantise", matrix_of(source).shape, format, codebook, None)
        codebook = codebook[0]
    check_codebook(codebook, format)


def _check_names(argument: str, given: Mapping[str, Tensor], formats: Mapping[str, Format]) -> None:
    if unknown := given.keys() - formats.keys():
        raise ValueError(
            f"quantise_model: {argument} names {', '.join(sorted(unknown))}, "
            f"wanted names of layers to quantise: {', '.join(formats)}"
        )


def _check_layer(name: str, linear: Any, format: Format, backend: str, activations: str) -> None:
    weight = matrix_of(linear)
    shape = tuple(weight.shape)
    activations = "float" if len(shape) == 3 else activations
    try:
        format.group_size_for(shape[-1])
        if weight.device.type != "meta" and kind_of(linear) != "embedding":
            sizes = shape, weight.dtype, weight.device, activations
            select(problem_of(format, *sizes), backend)
    except ValueError as error:
        raise ValueError(f"quantise_model: layer {name}: {error}; skip or override it") from None
    except NoBackendError as error:
        raise NoBackendError(f"quantise_model: layer {name}: {error}") from None


def _tied_elsewhere(
    model: nn.Module, sources: Mapping[str, Any], formats: Mapping[str, Format]
) -> dict[str, str]:
    """Returns layers whose weight belongs to something not quantised to the same format too."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    # named_modules yields a module once, named_parameters under each of its names.
    names = {id(module): name for name, module in model.named_modules()}
    modules = dict(model.named_modules(remove_duplicate=False))
    tied = {}
    for name in formats:
        for owner in owners[id(sources[name].weight)]:
            parent, _, attribute = owner.rpartition(".")
            first_name = names[id(modules[parent])]
            if isinstance(sources[name], ExpertLinear):
                if f"{first_name}.{attribute}".removeprefix(".") == name:
                    continue
                tied[name] = owner
                break
            if attribute != "weight" or formats.get(first_name) != formats[name]:
                tied[name] = owner
                break
    return tied


def _progress(names: Iterable[str]) -> Iterator[str]:
    """Yields the names and shows a progress bar on a terminal, tqdm's if it is installed."""
    names = list(names)
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        for done, name in enumerate(names):
            if sys.stderr.isatty():
                print(f"\rquantise {done + 1}/{len(names)}", end="", file=sys.stderr, flush=True)
            yield name
        if names and sys.stderr.isatty():
            print(file=sys.stderr)
        return
    yield from tqdm(names, desc="quantise", unit="layer", disable=None)
