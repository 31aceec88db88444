"""quantise_model: a copy of a model whose linear layers are quantised."""

import copy
import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from fdk_formats.backends import NoBackendError, Problem, check_activations, select
from fdk_formats.format import Format
from fdk_formats.fuse import fuse_layers, groups_of, rows_of, siblings
from fdk_formats.linear import QuantisedLinear, QuantisedWeight
from fdk_formats.quantise import quantise
from fdk_formats.report import model_report, relative_error
from fdk_formats.scales import GroupedWeight, check_codebook
from fdk_formats.tensor import QuantisedTensor

# The output head: few weights, much of the loss. The original keeps it in 16 bits too.
DEFAULT_SKIP = r"(^|\.)lm_head$"

# What torch calls around forward and backward; a layer's own hooks go with it.
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)

logger = logging.getLogger(__name__)


def quantise_model(
    model: nn.Module,
    format: Format | str,
    skip: str | Sequence[str] | None = DEFAULT_SKIP,
    overrides: Mapping[str, Format | str | None] | None = None,
    backend: str = "auto",
    *,
    activations: str = "float",
    importance: Mapping[str, Tensor] | None = None,
    codebook: Tensor | Mapping[str, Tensor] | None = None,
    fuse: bool | Sequence[Sequence[str]] = False,
    progress: bool = True,
) -> nn.Module:
    """A copy of ``model`` with its ``nn.Linear`` layers quantised; the source is left untouched.

    Tied weights stay tied: linear layers that share a weight share the quantised one, and a linear
    layer whose weight something else uses too (an embedding) is left as it is. Subclasses of
    ``nn.Linear`` are left as they are: their owners may reach for ``.weight``. ``model_report``
    tells of the result; what was left and why is logged at level INFO.

    Args:
        model: any module, a single ``nn.Linear`` included.
        format: of every layer that no override names.
        skip: regular expressions searched in the dotted name of a layer; a match is left as it is.
            None or an empty list skips none.
        overrides: regular expression to format, or to None to leave the layer; the first match of
            a name wins, over ``skip`` too.
        backend: see ``select``.
        activations: ``int8`` rounds the input of every layer to 8 bits, see ``fdk_formats.int8``.
        importance: per layer name, see ``quantise``; that of layers that share a weight adds up.
        codebook: ``[2^bits]`` ascending values in units of the scale, see ``quantise``: one for
            every layer whose format has the codebook and the bits of ``format`` (``custom4`` or
            ``kmeans4``), whatever its groups and scales; layers that an override gives another
            codebook or other bits do without. Or one per layer name, as those that
            ``fake_quantise`` trained with; ``kmeans`` is fitted to the layers that have none.
        fuse: compute layers of one input as one product, see ``fuse_layers``: those named q_proj,
            k_proj and v_proj, and gate_proj and up_proj; or the names that are given. Files and
            ``state_dict`` are those of separate layers, and each loads into either. With ``kmeans``
            the layers of a group get one codebook, unless ``codebook`` has one for some of them.
        progress: show a bar on a terminal.

    Raises:
        ValueError: where a layer does not fit its format, or computes its weight (pruned, or
            normed by ``torch.nn.utils``), or a name of ``importance`` or ``codebook`` or a pattern
            of ``overrides`` fits no layer, or a format takes no codebook, needs one or takes
            another size, or ``fuse`` names no groups of layers (nothing has been quantised then),
            or a weight holds NaN or infinity, or a codebook does not ascend. The message names the
            layer.
        TypeError: for a model that is no module, a codebook that is no floating tensor.
        NoBackendError: where no backend takes a layer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantise_model: model must be a module, got {type(model).__name__}")
    check_activations(activations)
    groups = groups_of(fuse)
    default = Format.parse(format)
    chosen = {
        _pattern("overrides", pattern): None if wanted is None else Format.parse(wanted)
        for pattern, wanted in (overrides or {}).items()
    }
    skips = [_pattern("skip", text) for text in ([skip] if isinstance(skip, str) else skip or ())]
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    names = _names(model, linears)
    _check_overrides(names, chosen)
    formats = _choose_formats(names, default, skips, chosen)
    for name in formats:
        _check_parameters(name, linears[name])
    for name, owner in _tied_elsewhere(model, formats).items():
        logger.info("left %s: tied to %s", name, owner)
        del formats[name]
    if not formats:
        warnings.warn(
            f"quantise_model: nothing to quantise: {len(linears)} linear layers, all left",
            stacklevel=2,
        )
    codebooks = _codebooks(linears, formats, default, codebook)
    for name, wanted in formats.items():
        with _naming(name):
            check_codebook(codebooks.get(id(linears[name].weight)), wanted)
        _check_layer(name, linears[name], wanted, backend, activations)
    importances = _importances(linears, formats, importance or {})
    together = _with_one_codebook(linears, formats, codebooks, groups)
    parts: dict[str, QuantisedTensor] = {}

    weights: dict[int, QuantisedWeight] = {}
    # deepcopy takes what its memo holds instead of a copy: the quantised layer for the linear one.
    memo: dict[int, object] = {}
    for name in _progress(formats) if progress else formats:
        linear = linears[name]
        key = id(linear.weight)
        if key not in weights:
            if name in together and name not in parts:
                parts |= _quantise_group(together[name], linears, formats[name], importances)
            q = parts.pop(name, None)
            if q is None:
                q = _quantise_layer(
                    name, linear.weight, formats[name], importances.get(key), codebooks.get(key)
                )
            with _naming(name):
                weight = QuantisedWeight(
                    q, backend=backend, dtype=linear.weight.dtype, activations=activations
                )
            weight.relative_error = relative_error(linear.weight.detach(), q)
            weights[key] = weight
        layer = QuantisedLinear(weights[key], linear.bias)
        if linear.bias is not None:  # a bias that something shares stays shared
            layer.bias = memo.setdefault(id(linear.bias), layer.bias)  # type: ignore[assignment]
        for hooks in HOOKS:
            setattr(layer, hooks, copy.copy(getattr(linear, hooks)))
        memo[id(linear)] = layer.train(linear.training)
    result: nn.Module = copy.deepcopy(model, memo)
    fuse_layers(result, groups)
    logger.info("%s", model_report(result))
    return result


def _pattern(argument: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"quantise_model: {argument} must be regular expressions, got {text!r}: {error}"
        ) from None


def _with_one_codebook(
    linears: Mapping[str, nn.Linear],
    formats: Mapping[str, Format],
    codebooks: Mapping[int, Tensor],
    groups: Sequence[Sequence[str]],
) -> dict[str, tuple[str, ...]]:
    """By layer, the group to fuse whose codebook is fitted: to all rows, for a product has one."""
    uses = Counter(id(linears[name].weight) for name in formats)

    def fits(names: tuple[str, ...]) -> bool:
        weights = [linears[name].weight for name in names]
        kinds = {
            (formats[n], w.shape[1], w.dtype, w.device) for n, w in zip(names, weights, strict=True)
        }
        is_given = any(id(weight) in codebooks for weight in weights)
        fitted = formats[names[0]].codebook == "kmeans" and not is_given
        return fitted and len(kinds) == 1 and all(uses[id(weight)] == 1 for weight in weights)

    found: dict[str, tuple[str, ...]] = {}
    for names in filter(fits, siblings(formats, groups)):
        if not found.keys() & set(names):  # the first group of a layer, as in fuse_layers
            found |= dict.fromkeys(names, names)
    return found


def _quantise_group(
    names: Sequence[str],
    linears: Mapping[str, nn.Linear],
    format: Format,
    importances: Mapping[int, Tensor],
) -> dict[str, QuantisedTensor]:
    """Layers quantised as one weight of all their rows, and cut apart again."""
    weights = [linears[name].weight for name in names]
    for name, weight in zip(names, weights, strict=True):  # all at once they have no name
        with _naming(name):
            GroupedWeight.of(weight.detach(), format, importances.get(id(weight)))
    importance = None
    if any(id(weight) in importances for weight in weights):
        given = [importances.get(id(weight), weight.new_ones(())) for weight in weights]
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
) -> QuantisedTensor:
    with _naming(name):
        return quantise(weight.detach(), format, importance=importance, codebook=codebook)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Errors name the layer."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"quantise_model: layer {name}: {error}") from None


def _check_parameters(name: str, linear: nn.Linear) -> None:
    """Pruning and norms of ``torch.nn.utils`` make a weight, or a bias, anew before each call."""
    for part in ("weight", "bias"):
        if getattr(linear, part) is not None and part not in linear._parameters:
            raise ValueError(
                f"quantise_model: layer {name}: its {part} must be a parameter, and is computed of "
                f"others (pruned or normed): make that permanent, or skip it"
            )


def _names(model: nn.Module, linears: Mapping[str, nn.Linear]) -> dict[str, list[str]]:
    """All names of each layer, by the first: a module may stand in several places."""
    firsts = {id(module): name for name, module in linears.items()}
    names: dict[str, list[str]] = {name: [] for name in linears}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in firsts:
            names[firsts[id(module)]].append(name)
    return names


def _check_overrides(
    names: Mapping[str, Sequence[str]], overrides: Mapping[re.Pattern[str], Format | None]
) -> None:
    every = [name for of_one in names.values() for name in of_one]
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
    """The format of each layer that is to be quantised. An override speaks before a skip."""
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
    linears: Mapping[str, nn.Linear], formats: Mapping[str, Format], given: Mapping[str, Tensor]
) -> dict[int, Tensor]:
    """Importance by id of the weight; those of layers that share a weight add up."""
    _check_names("importance", given, formats)
    importances: dict[int, Tensor] = {}
    for name, importance in given.items():
        key = id(linears[name].weight)
        importances[key] = importances[key] + importance if key in importances else importance
    return importances


def _codebooks(
    linears: Mapping[str, nn.Linear],
    formats: Mapping[str, Format],
    default: Format,
    given: Tensor | Mapping[str, Tensor] | None,
) -> dict[int, Tensor]:
    """The caller's codebooks by id of the weight."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        check_codebook(given, default)  # though an override may have every layer
        kind = default.codebook, default.bits
        alike = [name for name, format in formats.items() if (format.codebook, format.bits) == kind]
        given = dict.fromkeys(alike, given)
    _check_names("codebook", given, formats)
    codebooks: dict[int, Tensor] = {}
    for name, codebook in given.items():
        with _naming(name):
            check_codebook(codebook, formats[name])
        other = codebooks.setdefault(id(linears[name].weight), codebook)
        if other is not codebook and not torch.equal(other, codebook):
            raise ValueError(
                f"quantise_model: layer {name}: shares its weight, and must have the codebook of "
                f"the layers that it shares it with: {other.tolist()[:8]}..., "
                f"got {codebook.tolist()[:8]}..."
            )
    return codebooks


def _check_names(argument: str, given: Mapping[str, Tensor], formats: Mapping[str, Format]) -> None:
    if unknown := given.keys() - formats.keys():
        raise ValueError(
            f"quantise_model: {argument} names {', '.join(sorted(unknown))}, "
            f"wanted names of layers to quantise: {', '.join(formats)}"
        )


def _check_layer(
    name: str, linear: nn.Linear, format: Format, backend: str, activations: str
) -> None:
    n, k = linear.weight.shape
    weight = linear.weight
    try:
        format.group_size_for(k)
        select(Problem(format, n, k, weight.dtype, weight.device, activations), backend)
    except ValueError as error:
        raise ValueError(f"quantise_model: layer {name}: {error}; skip or override it") from None
    except NoBackendError as error:
        raise NoBackendError(f"quantise_model: layer {name}: {error}") from None


def _tied_elsewhere(model: nn.Module, formats: Mapping[str, Format]) -> dict[str, str]:
    """Layers whose weight is also a parameter of something that is not quantised alike."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    # named_modules gives a module once, named_parameters under each of its names.
    names = {id(module): name for name, module in model.named_modules()}
    modules = dict(model.named_modules(remove_duplicate=False))
    tied = {}
    for name in formats:
        for owner in owners[id(modules[name].weight)]:
            parent, _, attribute = owner.rpartition(".")
            first_name = names[id(modules[parent])]
            if attribute != "weight" or formats.get(first_name) != formats[name]:
                tied[name] = owner
                break
    return tied


def _progress(names: Iterable[str]) -> Iterator[str]:
    """The names, with a bar on a terminal: tqdm's where it is installed."""
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
