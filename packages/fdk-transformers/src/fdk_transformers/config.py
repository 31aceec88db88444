"""FdkConfig: which layers of a Hugging Face model are quantised, and to which format."""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers.utils.quantization_config import QuantizationConfigMixin

from fdk_formats.backends import check_activations
from fdk_formats.format import Format
from fdk_formats.layer_kinds import check_include
from fdk_transformers.registration import METHOD

# Arguments that a saved model needs no more.
NOT_SAVED = ("backend", "calibration", "epochs", "importance", "fuse")


class FdkConfig(QuantizationConfigMixin):
    """Settings of a model that ``from_pretrained`` quantises: the arguments of ``quantise_model``.

    Args:
        format: format of every layer that no override matches, for example ``"kmeans4-g64"``. None
            only in a saved folder, whose files have the formats.
        skip: regular expressions, searched in the dotted name of a layer; a match is not quantised.
            They add to the default, ``lm_head``. None skips nothing, not even the head.
        overrides: from regular expression to format, or to None to skip. The first match wins, also
            over ``skip``.
        default_skip: False to let ``skip`` replace the default.
        include: more kinds of layers: ``embedding`` and ``conv1d`` (GPT-2).
        backend: ``auto`` or a backend's name. Not saved: each machine chooses.
        activations: ``int8`` rounds the input of every layer to 8 bits.
        importance: by layer name, ``[k]`` or ``[n, k]``: the weight of each squared error.
        calibration: token ids ``[windows, tokens]`` to quantise for, see ``fdk_formats.calibrate``.
            The model is then loaded in 16 bits first, and must be on one device.
        epochs: how often scales are trained on each input of ``calibration``; None for the default.
        fuse: compute layers of one input as one product, see ``fdk_formats.fuse_layers``. With it
            the model is loaded in 16 bits first. Not saved.

    Raises:
        ValueError: if an argument is malformed.

    Example:
        >>> config = FdkConfig("kmeans4-g64", overrides={r"down_proj$": "int8-g64"})
        >>> AutoModelForCausalLM.from_pretrained(name, quantization_config=config)
    """

    def __init__(
        self,
        format: Format | str | None = None,
        skip: str | Sequence[str] | None = (),
        overrides: Mapping[str, Format | str | None] | None = None,
        *,
        default_skip: bool = True,
        include: Sequence[str] = (),
        backend: str = "auto",
        activations: str = "float",
        importance: Mapping[str, Tensor] | None = None,
        calibration: Iterable[Any] | None = None,
        epochs: int | None = None,
        fuse: bool | Sequence[Sequence[str]] = False,
        quant_method: str = METHOD,
    ) -> None:
        if quant_method != METHOD:
            raise ValueError(f"FdkConfig: quant_method must be {METHOD!r}, got {quant_method!r}")
        check_include(include)
        check_activations(activations)
        self.quant_method: Any = METHOD
        self.format = None if format is None else str(Format.parse(format))
        given = [skip] if isinstance(skip, str) else skip
        self.skip = None if given is None else [str(pattern) for pattern in given]
        self.overrides = {
            pattern: None if wanted is None else str(Format.parse(wanted))
            for pattern, wanted in (overrides or {}).items()
        }
        for pattern in (*self.overrides, *(self.skip or ())):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"FdkConfig: wanted regular expressions, got {pattern!r}: {error}"
                ) from None
        self.default_skip, self.include = default_skip, list(include)
        self.backend, self.activations = backend, activations
        self.importance, self.calibration, self.epochs = importance, calibration, epochs
        self.fuse = fuse

    def rules(self) -> dict[str, Any]:
        """Returns the arguments of ``quantise_model`` that choose layers and formats."""
        names = ("format", "skip", "overrides", "default_skip", "include", "importance")
        return {name: getattr(self, name) for name in names}

    def saved(self) -> "FdkConfig":
        """Returns the settings without those that a saved model needs no more."""
        own = {name: value for name, value in vars(self).items() if name not in NOT_SAVED}
        return FdkConfig(**own)

    def to_dict(self) -> dict[str, Any]:
        """Returns what ``config.json`` gets."""
        own = vars(self).items()
        return {name: copy.copy(value) for name, value in own if name not in NOT_SAVED}

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a setting: transformers asks a configuration of another model for its method."""
        return self.to_dict().get(name, default)

    def __iter__(self) -> Any:
        """Yields the items of ``to_dict``, for ``dict(config)``."""
        yield from self.to_dict().items()

    def __deepcopy__(self, memo: dict[int, Any]) -> "FdkConfig":
        """Returns a shallow copy: transformers copies configurations, and calibration is data."""
        return copy.copy(self)
