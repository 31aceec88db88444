"""Reports on the quantised layers of a model, and on the weights that are left."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from fdk_formats.format import Format
from fdk_formats.quantised_module import QuantisedModule


@dataclass(frozen=True)
class LayerReport:
    """Report on one quantised layer.

    Attributes:
        name: dotted name in the model; the first of a tied weight.
        format: format of the weight.
        shape: ``(n, k)``, or ``(experts, n, k)``.
        bits_per_weight: bits of a code plus its share of scale and zero point.
        bytes_before: bytes of the weight in the layer's dtype.
        bytes_after: bytes of its canonical tensors.
        backend: name of the backend in use.
        relative_error: see ``relative_error``; None if the layer was loaded.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    bits_per_weight: float
    bytes_before: int
    bytes_after: int
    backend: str
    relative_error: float | None


@dataclass(frozen=True)
class LeftWeight:
    """A parameter of two or more dimensions that is not quantised.

    Attributes:
        name: dotted name of the parameter.
        kind: what holds it, for example ``Embedding``, or ``3-D parameter of MixtralExperts``.
        weights: number of its elements.
        nbytes: its bytes.
    """

    name: str
    kind: str
    weights: int
    nbytes: int


@dataclass(frozen=True)
class ModelReport:
    """Report on a model; ``str`` prints a table.

    Attributes:
        layers: the quantised layers, in the order of the model.
        left: the weights that are not quantised, in the order of the model.
        other_bytes: bytes of all parameters that are not quantised, biases and norms included.
    """

    layers: tuple[LayerReport, ...]
    left: tuple[LeftWeight, ...]
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
    def weights(self) -> int:
        """Number of quantised weights."""
        return sum(math.prod(layer.shape) for layer in self.layers)

    @property
    def bits_per_weight(self) -> float:
        """Mean bits per weight over the quantised weights, without codebooks."""
        sizes = [math.prod(layer.shape) for layer in self.layers]
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
        lines += [f"{left.name:40} not quantised: {left.kind}" for left in self.left]
        lines.append(
            f"{len(self.layers)} layers, {self.bits_per_weight:.3f} bits per weight, "
            f"{self.bytes_before} -> {self.bytes_after} bytes; {self.other_bytes} bytes of other "
            f"parameters"
        )
        return "\n".join(lines)


def model_report(model: nn.Module) -> ModelReport:
    """Reports formats, bits, bytes and errors of the quantised layers of a model, and what is left.

    Args:
        model: result of ``quantise_model`` or ``load_model``.

    Raises:
        TypeError: if ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model_report: model must be an nn.Module, got {type(model).__name__}")
    layers, seen, own = [], set(), set()
    for name, module in model.named_modules():
        if not isinstance(module, QuantisedModule):
            continue
        parameters = module.weight_parameters
        own |= {id(parameter) for parameter in parameters}
        if id(parameters[0]) in seen:
            continue
        seen.add(id(parameters[0]))
        shape = module.weight_shape
        layers.append(
            LayerReport(
                name=name,
                format=module.format,
                shape=shape,
                bits_per_weight=module.format.bits_per_weight(shape[-1]),
                bytes_before=math.prod(shape) * module.dtype.itemsize,
                bytes_after=sum(parameter.nbytes for parameter in parameters),
                backend=module.backend_name,
                relative_error=module.relative_error,
            )
        )
    others = [parameter for parameter in model.parameters() if id(parameter) not in own]
    return ModelReport(
        tuple(layers), tuple(left_weights(model)), sum(parameter.nbytes for parameter in others)
    )


def left_weights(model: nn.Module) -> Iterator[LeftWeight]:
    """Yields the weights of a model that are not quantised, each under its first name."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, QuantisedModule):
            seen |= {id(parameter) for parameter in module.weight_parameters}
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2 or not parameter.is_floating_point() or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            kind = type(module).__name__
            if own != "weight":
                kind = f"{parameter.ndim}-D parameter of {kind}"
            full_name = f"{name}.{own}".removeprefix(".")
            yield LeftWeight(full_name, kind, parameter.numel(), parameter.nbytes)


def summary_of(left: list[LeftWeight], total: int) -> str:
    """Describes weights that are left, the largest kind first."""
    sizes: Counter[str] = Counter()
    for weight in left:
        sizes[weight.kind] += weight.weights
    firsts = {weight.kind: weight.name for weight in reversed(left)}
    counts = Counter(weight.kind for weight in left)
    return "; ".join(
        f"{kind} ({firsts[kind]}{f' and {counts[kind] - 1} more' if counts[kind] > 1 else ''}, "
        f"{100 * size / total:.0f} %)"
        for kind, size in sizes.most_common()
    )
