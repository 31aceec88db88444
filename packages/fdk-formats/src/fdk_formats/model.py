"""Quantising whole models, and reporting on them."""

import copy
import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from fdk_formats.backends import NoBackendError, Problem, check_activations, select
from fdk_formats.format import Format
from fdk_formats.fuse import checked_groups, fuse_layers, rows_of, siblings
from fdk_formats.linear import QuantisedLinear
from fdk_formats.quantise import quantise
from fdk_formats.scales import GroupedWeight, check_codebook
from fdk_formats.tensor import QuantisedTensor, relative_error

# The output head has few of the weights and much of the loss; other quantisers skip it too.
DEFAULT_SKIP = r"(^|\.)lm_head$"

# torch's dicts of hooks, which a quantised layer inherits.
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
    """Returns a copy of a model with its ``nn.Linear`` layers quantised.

    Tied weights stay tied: layers that share a weight share the quantised one. A layer whose weight
    something else uses too, such as an embedding, is not quantised; nor are subclasses of
    ``nn.Linear``, whose owners may access ``.weight``. ``model_report`` reports on the result.
    Layers that are not quantised are logged with the reason at level INFO.

    Args:
        model: any module, a single ``nn.Linear`` included. It is left untouched.
        format: format of every layer that no override matches, for example ``"nf4-g64"``.
        skip: regular expressions, searched in the dotted name of a layer. A match is not quantised.
            None or an empty list skips none.
        overrides: from regular expression to format, or to None to skip. The first match wins, also
            over ``skip``.
        backend: ``auto`` or a backend's name, see ``select``.
        activations: ``int8`` rounds the input of every layer to 8 bits, see ``fdk_formats.int8``.
        importance: by layer name, see ``quantise``. Those of layers that share a weight are added.
        codebook: by layer name, such as the codebooks that ``fake_quantise`` trained with;
            ``kmeans`` is fitted to layers without one. Or one ``[2^bits]`` table for every layer
            with the codebook and bits of ``format`` (``custom4`` or ``kmeans4``), whatever its
            group size and scales. See ``quantise``.
        fuse: compute layers of one input as one product, see ``fuse_layers``. True is q_proj,
            k_proj and v_proj, and gate_proj and up_proj. Files and ``state_dict`` stay those of
            separate layers. With ``kmeans``, the layers of a group get one codebook, unless
            ``codebook`` has one for some of them.
        progress: show a progress bar on a terminal.

    Returns:
        A module of the same structure, with ``QuantisedLinear`` layers.

    Raises:
        ValueError: if a layer does not fit its format, its weight is computed (pruned, or normed by
            ``torch.nn.utils``) or not finite; if a codebook is missing, not wanted, of another size
            or not ascending; if a name or pattern matches no layer; if ``fuse`` is malformed. The
            message names the layer.
        TypeError: if ``model`` is not a module, or a codebook not a floating tensor.
        NoBackendError: if no backend supports a layer.

    Example:
        >>> small = quantise_model(model, "kmeans4-g64", overrides={r"down_proj$": "int8-g64"})
        >>> print(model_report(small))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantise_model: model must be a module, got {type(model).__name__}")
    check_activations(activations)
    groups = checked_groups(fuse)
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
    together = _sharing_codebook(linears, formats, codebooks, groups)
    quantised: dict[str, QuantisedTensor] = {}

    owners: dict[int, QuantisedLinear] = {}
    # deepcopy uses its memo instead of copying: the quantised layer replaces the linear one.
    memo: dict[int, object] = {}
    for name in _progress(formats) if progress else formats:
        linear = linears[name]
        key = id(linear.weight)
        if key not in owners:
            if name in together and name not in quantised:
                quantised |= _quantise_group(together[name], linears, formats[name], importances)
            q = quantised.pop(name, None)
            if q is None:
                q = _quantise_layer(
                    name, linear.weight, formats[name], importances.get(key), codebooks.get(key)
                )
            error = relative_error(linear.weight.detach(), q)
        else:
            q, error = owners[key].quantised, owners[key].relative_error
        with _naming(name):
            layer = QuantisedLinear.from_quantised(
                q, linear.bias, backend=backend, dtype=linear.weight.dtype, activations=activations
            )
        layer.relative_error = error
        layer.tie_weight(owners.setdefault(key, layer))
        if linear.bias is not None:  # keep a shared bias shared
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


def _sharing_codebook(
    linears: Mapping[str, nn.Linear],
    formats: Mapping[str, Format],
    codebooks: Mapping[int, Tensor],
    groups: Sequence[Sequence[str]],
) -> dict[str, tuple[str, ...]]:
    """Returns, by layer, the groups to fuse whose codebook is fitted to all their rows."""
    uses = Counter(id(linears[name].weight) for name in formats)

    def fits(names: tuple[str, ...]) -> bool:
        weights = [linears[name].weight for name in names]
        kinds = {
            (formats[n], w.shape[1], w.dtype, w.device) for n, w in zip(names, weights, strict=True)
        }
        is_given = any(id(weight) in codebooks for weight in weights)
        is_fitted = formats[names[0]].is_fitted and not is_given
        return is_fitted and len(kinds) == 1 and all(uses[id(weight)] == 1 for weight in weights)

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
    """Quantises layers as one weight of all their rows, and returns the rows of each."""
    weights = [linears[name].weight for name in names]
    for name, weight in zip(names, weights, strict=True):  # errors name the layer
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
    """Adds the name of the layer to errors."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"quantise_model: layer {name}: {error}") from None


def _check_parameters(name: str, linear: nn.Linear) -> None:
    """Raises ValueError if ``torch.nn.utils`` recomputes a weight or bias before each call."""
    parameters = dict(linear.named_parameters(recurse=False))
    for attribute in ("weight", "bias"):
        if getattr(linear, attribute) is not None and attribute not in parameters:
            raise ValueError(
                f"quantise_model: layer {name}: its {attribute} must be a parameter, and is "
                f"computed from others (pruned or normed): make that permanent, or skip it"
            )


def _names(model: nn.Module, linears: Mapping[str, nn.Linear]) -> dict[str, list[str]]:
    """Returns all names of each layer by its first: a module may be registered several times."""
    firsts = {id(module): name for name, module in linears.items()}
    names: dict[str, list[str]] = {name: [] for name in linears}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in firsts:
            names[firsts[id(module)]].append(name)
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
    linears: Mapping[str, nn.Linear], formats: Mapping[str, Format], given: Mapping[str, Tensor]
) -> dict[int, Tensor]:
    """Returns importance by id of the weight, added up over layers that share it."""
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
    """Returns layers whose weight belongs to something not quantised to the same format too."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    # named_modules yields a module once, named_parameters under each of its names.
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


# Reports


@dataclass(frozen=True)
class LayerReport:
    """Report on one quantised layer.

    Attributes:
        name: dotted name in the model; the first of a tied weight.
        format: format of the weight.
        shape: ``(n, k)``.
        bits_per_weight: bits of a code plus its share of scale and zero point.
        bytes_before: bytes of the weight in the layer's dtype.
        bytes_after: bytes of its canonical tensors.
        backend: name of the backend in use.
        relative_error: see ``relative_error``; None if the layer was loaded.
    """

    name: str
    format: Format
    shape: tuple[int, int]
    bits_per_weight: float
    bytes_before: int
    bytes_after: int
    backend: str
    relative_error: float | None


@dataclass(frozen=True)
class ModelReport:
    """Report on a model; ``str`` prints a table.

    Attributes:
        layers: the quantised layers, in the order of the model.
        left: names of linear layers that are not quantised.
        other_bytes: bytes of all other parameters, biases included.
    """

    layers: tuple[LayerReport, ...]
    left: tuple[str, ...]
    other_bytes: int

    @property
    def bytes_before(self) -> int:
        """Bytes of the quantised weights before quantising."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Bytes of the quantised weights."""
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def bits_per_weight(self) -> float:
        """Mean bits per weight over the quantised weights, without codebooks."""
        sizes = [layer.shape[0] * layer.shape[1] for layer in self.layers]
        bits = sum(s * layer.bits_per_weight for s, layer in zip(sizes, self.layers, strict=True))
        return bits / sum(sizes) if sizes else 0.0

    def __str__(self) -> str:
        lines = [f"{'layer':40} {'format':24} {'bits':>6} {'bytes':>22} {'error':>8}"]
        for layer in self.layers:
            error = "" if layer.relative_error is None else f"{layer.relative_error:.4f}"
            size = f"{layer.bytes_before} -> {layer.bytes_after}"
            lines.append(
                f"{layer.name:40} {layer.format!s:24} {layer.bits_per_weight:6.3f} "
                f"{size:>22} {error:>8}"
            )
        lines += [f"{name:40} not quantised" for name in self.left]
        lines.append(
            f"{len(self.layers)} layers, {self.bits_per_weight:.3f} bits per weight, "
            f"{self.bytes_before} -> {self.bytes_after} bytes; {self.other_bytes} bytes of other "
            f"parameters"
        )
        return "\n".join(lines)


def model_report(model: nn.Module) -> ModelReport:
    """Reports formats, bits, bytes and errors of the quantised layers of a model.

    Args:
        model: result of ``quantise_model`` or ``load_model``.

    Raises:
        TypeError: if ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model_report: model must be an nn.Module, got {type(model).__name__}")
    layers, left, seen = [], [], set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not isinstance(module, QuantisedLinear):
            left.append(name)
        if not isinstance(module, QuantisedLinear) or id(module.stored) in seen:
            continue
        seen.add(id(module.stored))
        n, k = module.out_features, module.in_features
        layers.append(
            LayerReport(
                name=name,
                format=module.format,
                shape=(n, k),
                bits_per_weight=module.format.bits_per_weight(k),
                bytes_before=n * k * module.dtype.itemsize,
                bytes_after=sum(p.nbytes for p in module.stored.parameters().values()),
                backend=module.backend_name,
                relative_error=module.relative_error,
            )
        )
    own = {id(p) for m in model.modules() if isinstance(m, QuantisedLinear) for p in m.stored.parameters().values()}
    other_bytes = sum(p.nbytes for p in model.parameters() if id(p) not in own)
    return ModelReport(tuple(layers), tuple(left), other_bytes)
