"""What quantising did to a model: layers, bits, bytes and error."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fdk_formats.format import Format
from fdk_formats.linear import QuantisedLinear
from fdk_formats.packing import CODES_PER_CHUNK
from fdk_formats.tensor import QuantisedTensor


@torch.no_grad()
def relative_error(weight: Tensor, q: QuantisedTensor) -> float:
    """Relative RMS error ``||W - W_hat|| / ||W||`` of a quantised weight; 0 for an exact one.

    ``W_hat`` is that of float32; the difference and the squares are taken in float64, in chunks of
    rows.

    Raises:
        ValueError, TypeError: where ``weight`` is no tensor of the shape of ``q``.
    """
    if not isinstance(weight, Tensor):
        raise TypeError(f"relative_error: weight must be a tensor, got {type(weight).__name__}")
    if not isinstance(q, QuantisedTensor):
        raise TypeError(f"relative_error: q must be a QuantisedTensor, got {type(q).__name__}")
    if weight.shape != q.shape:
        raise ValueError(f"relative_error: weight must be {q.shape}, got {list(weight.shape)}")
    step = max(1, CODES_PER_CHUNK // q.shape[1])
    error = torch.zeros((), dtype=torch.float64, device=weight.device)
    total = error.clone()
    for start in range(0, q.shape[0], step):
        source = weight[start : start + step].to(torch.float64)
        error += (source - q.rows(start, start + step).to(torch.float64)).square().sum()
        total += source.square().sum()
    return float((error / total).sqrt()) if total > 0 else 0.0 if error == 0 else float("inf")


@dataclass(frozen=True)
class LayerReport:
    """One quantised layer.

    Attributes:
        name: dotted, in the model; the first of a tied weight.
        bytes_before: of the weight in the layer's 16- or 32-bit dtype.
        bytes_after: of its canonical tensors.
        relative_error: see ``relative_error``; None where the layer was loaded, not quantised.
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
    """All quantised layers of a model, and what is not quantised.

    Attributes:
        layers: in the order of the model.
        left: names of linear layers that are not quantised.
        other_bytes: of all parameters, biases included, that are not quantised.
    """

    layers: tuple[LayerReport, ...]
    left: tuple[str, ...]
    other_bytes: int

    @property
    def bytes_before(self) -> int:
        """Of the weights that are now quantised."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Of the weights that are now quantised."""
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def bits_per_weight(self) -> float:
        """Mean over all quantised weights, codebooks not counted."""
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
    """Reports on a model that ``quantise_model`` or ``load_model`` made.

    Raises:
        TypeError: for what is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model_report: model must be an nn.Module, got {type(model).__name__}")
    layers, left, seen = [], [], set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            left.append(name)
        if not isinstance(module, QuantisedLinear) or id(module.weight) in seen:
            continue
        weight = module.weight
        seen.add(id(weight))
        n, k = weight.shape
        layers.append(
            LayerReport(
                name=name,
                format=weight.format,
                shape=weight.shape,
                bits_per_weight=weight.format.bits_per_weight(k),
                bytes_before=n * k * weight.dtype.itemsize,
                bytes_after=weight.canonical_bytes,
                backend=weight.backend_name,
                relative_error=weight.relative_error,
            )
        )
    other_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return ModelReport(tuple(layers), tuple(left), other_bytes)
