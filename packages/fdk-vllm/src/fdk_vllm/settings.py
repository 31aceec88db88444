"""Settings: what ``quantization_config`` in config.json says, checked."""

import logging
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from fdk_formats.backends import check_activations
from fdk_formats.format import Format
from fdk_formats.layer_kinds import check_include
from fdk_formats.model import DEFAULT_SKIP

FORMAT_VARIABLE = "FDK_VLLM_FORMAT"
KEYS = (
    "quant_method",
    "format",
    "overrides",
    "skip",
    "default_skip",
    "include",
    "activations",
    "backend",
    "fuse",
    "modules_to_not_convert",
)
# Keys that fdk-transformers writes for itself.
IGNORED_KEYS = ("version", "calibration", "progress", "inplace")
EXAMPLE = '{"quantization_config": {"quant_method": "fdk", "format": "kmeans4-g64"}}'

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """Formats of layers by name, and how they are computed.

    Attributes:
        format: format of each layer that no pattern matches. A packed checkpoint needs none.
        overrides: pairs of a pattern and a format, or None to leave the layer; the first that is
            found in the name wins, also over ``skip``.
        skip: patterns of layers to leave.
        include: ``embedding`` to quantise embeddings too.
        activations: ``float`` or ``int8``, see ``fdk_formats.int8``.
        backend: ``auto`` or a backend's name, see ``fdk_formats.select``.
        fuse: whether layers that vLLM merges get one k-means codebook when they are quantised
            while loading, so that they are one product.
    """

    format: Format | None
    overrides: tuple[tuple[re.Pattern[str], Format | None], ...] = ()
    skip: tuple[re.Pattern[str], ...] = (re.compile(DEFAULT_SKIP),)
    include: frozenset[str] = frozenset()
    activations: str = "float"
    backend: str = "auto"
    fuse: bool = True

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Self:
        """Reads ``quantization_config``.

        Args:
            config: the object, with the arguments of ``fdk_formats.quantise_model`` as keys.

        Raises:
            ValueError: for a key that is unknown or of the wrong type, and for a format,
                pattern or kind of layer that is not understood. The message names the key.
        """
        if unknown := sorted(set(config) - {*KEYS, *IGNORED_KEYS}):
            raise ValueError(
                f"quantization_config: unknown key {unknown[0]!r}; there are {', '.join(KEYS)}"
            )
        overrides = _typed(config, "overrides", dict, {})
        skips = [] if config.get("skip") is None else _strings(config, "skip")
        exact = config.get("modules_to_not_convert") or []
        if not isinstance(exact, list) or not all(isinstance(name, str) for name in exact):
            raise _wrong("modules_to_not_convert", "a list of names", exact)
        skips += [rf"(^|\.){re.escape(name)}($|\.)" for name in exact]
        skips_head = _typed(config, "default_skip", bool, True)
        if "skip" in config and config["skip"] is None:  # as in quantise_model: skip nothing
            skips_head = False
        include, format = _strings(config, "include"), config.get("format")
        activations = _typed(config, "activations", str, "float")
        try:
            check_include(include)
            check_activations(activations)
        except ValueError as error:
            raise ValueError(f"quantization_config: {error}") from None
        return cls(
            format=None if format is None else _format("format", format),
            overrides=tuple(
                (
                    _pattern("overrides", pattern),
                    None if wanted is None else _format(f"overrides[{pattern!r}]", wanted),
                )
                for pattern, wanted in overrides.items()
            ),
            skip=tuple(_pattern("skip", text) for text in [*skips, *([DEFAULT_SKIP] * skips_head)]),
            include=frozenset(include),
            activations=activations,
            backend=_typed(config, "backend", str, "auto"),
            fuse=_typed(config, "fuse", bool, True),
        )

    def format_of(self, name: str, kind: str = "linear") -> Format | None:
        """Returns the format of a layer, or None to leave it in 16 bits.

        Args:
            name: dotted name of the layer.
            kind: ``linear`` or ``embedding``.

        Raises:
            ValueError: if nothing names its format.
        """
        if kind != "linear" and kind not in self.include:
            return None
        for pattern, wanted in self.overrides:
            if pattern.search(name):
                return wanted
        if any(pattern.search(name) for pattern in self.skip):
            return None
        if self.format is None:
            raise ValueError(
                f"quantization_config: {name} is stored in 16 bits: needs a format, as in {EXAMPLE}"
            )
        return self.format

    def warn_of_unmatched(self, names: Collection[str]) -> None:
        """Logs a warning of each pattern that matches none of the names in a checkpoint."""
        given = [("overrides", pattern) for pattern, _ in self.overrides]
        given += [("skip", each) for each in self.skip if each.pattern != DEFAULT_SKIP]
        for key, pattern in given:
            if not any(map(pattern.search, names)):
                logger.warning(
                    "quantization_config: %s: %r matches no name in the checkpoint's files",
                    key,
                    pattern.pattern,
                )


def format_from_environment() -> dict[str, Any]:
    """Returns a ``quantization_config`` with the format that ``FDK_VLLM_FORMAT`` names.

    Raises:
        ValueError: if it is not set, or names no format.
    """
    if not (named := os.environ.get(FORMAT_VARIABLE)):
        raise ValueError(
            "--quantization fdk: the model has no quantization_config, so fdk needs a format: set "
            f"{FORMAT_VARIABLE}=kmeans4-g64, or pass --hf-overrides '{EXAMPLE}'"
        )
    try:
        Format.parse(named)
    except ValueError as error:
        raise ValueError(f"{FORMAT_VARIABLE}={named}: {error}") from None
    return {"quant_method": "fdk", "format": named}


def _wrong(key: str, wanted: str, got: object) -> ValueError:
    return ValueError(f"quantization_config: {key} must be {wanted}, got {got!r}")


def _typed(config: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, kind):
        raise _wrong(key, f"of type {kind.__name__}", value)
    return value


def _strings(config: Mapping[str, Any], key: str) -> list[str]:
    value = config.get(key) or []
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise _wrong(key, "a list of strings", value)
    return list(value)


def _format(key: str, text: object) -> Format:
    try:
        return Format.parse(text)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        message = str(error).removeprefix("format: ")
        raise ValueError(f"quantization_config: {key}: {message}") from None


def _pattern(key: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"quantization_config: {key}: {text!r} is no pattern: {error}") from None
