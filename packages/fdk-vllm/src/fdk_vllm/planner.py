"""Planner: which layers of a model are made from which tensors of a checkpoint."""

import os
import re
from collections.abc import Mapping
from typing import Any

import torch

from fdk_vllm.checkpoint import StoredLayer, fetch_headers, read_headers, stored_layers
from fdk_vllm.importers import IMPORTERS, Importer
from fdk_vllm.settings import Settings, format_from_environment
from fdk_vllm.weights import Plan, Source, imported_source, packed_source, unquantised_source

EMBEDDING = "model.embed_tokens"


class Planner:
    """Plans of a model's layers.

    The checkpoint's files say which layers are stored packed and how. The settings in config.json
    say how to quantise those stored in 16 bits, and stand in for files where there are none. A
    checkpoint of ``IMPORTERS`` is read as its project stored it.

    Args:
        config: ``quantization_config``; None reads ``FDK_VLLM_FORMAT``.

    Attributes:
        layers: layers of the checkpoint by name, or None without files.
        stoppers: names of tensors that hold nothing. fdk-transformers writes one beside a packed
            weight, so that transformers without it refuses the checkpoint.
        is_tied: whether head and embedding are one weight.

    Raises:
        ValueError: see ``Settings.parse``.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config = dict(format_from_environment() if config is None else config)
        # Engines pickle their configuration: readers, which cannot be, are made where needed.
        if self.importer is not None:
            self.importer.reader(self.config)
        self.settings = None if self.importer is not None else Settings.parse(self.config)
        self.layers: dict[str, StoredLayer] | None = None
        self.stoppers: tuple[str, ...] = ()
        self.is_packed = self.is_tied = False

    @property
    def importer(self) -> Importer | None:
        """The reader of another project's weights that the configuration names, or None."""
        return IMPORTERS.get(str(self.config.get("quant_method")))

    def read_checkpoint(self, model: str, revision: str | None = None) -> None:
        """Reads the headers of a checkpoint's files.

        Args:
            model: a folder, or the name of a model on the Hugging Face hub.
            revision: see ``huggingface_hub``.

        Raises:
            ValueError: if a header is damaged, or the checkpoint is not what config.json says.
        """
        is_folder = os.path.isdir(model)
        headers = read_headers(model) if is_folder else fetch_headers(model, revision)
        layers = stored_layers(headers)
        if not layers:
            return
        self.layers = layers
        packed = {name: each for name, each in layers.items() if each.format is not None}
        self.is_packed = bool(packed)
        self.stoppers = tuple(
            f"{name}.weight" for name in packed if "weight" in packed[name].tensors
        )
        if self.is_packed and self.importer is not None:
            raise ValueError(
                f"{model}: config.json says {self.config['quant_method']}, and its files hold "
                "weights of fdk"
            )
        if self.importer is not None and not any(map(self._is_imported, layers.values())):
            raise ValueError(
                f"{model}: config.json says {self.config['quant_method']}, and its files hold "
                f"no tensor called <layer>.{self.importer.marker}"
            )

    def rename(self, mapper: Any) -> None:
        """Renames layers of the checkpoint by a ``WeightsMapper`` of the engine."""
        if self.layers is None:
            return
        renamed = {}
        for name, layer in self.layers.items():
            found = mapper.apply_list([f"{name}.weight"])
            if found:
                renamed[found[0].removesuffix(".weight")] = layer
        self.layers = renamed

    def plan(self, prefix: str, merged: Mapping[str, list[str]]) -> Plan | None:
        """Returns the plan of a linear layer, or None for 16 bits.

        Args:
            prefix: name of the layer in the engine's model.
            merged: names of the layers that the engine merges, by the last part of its own name.

        Raises:
            ValueError: if the engine merges layers of which some are quantised.
        """
        return self._plan(prefix, "linear", merged)

    def embedding_plan(self, prefix: str, is_head: bool) -> Plan | None:
        """Returns the plan of an embedding or a head, or None for 16 bits."""
        if not is_head:
            return self._plan(prefix or self._embedding_name(), "embedding", {})
        if self.is_tied:
            tied = self._plan(self._embedding_name(), "embedding", {})
            if tied is not None or self.is_packed or self.importer is not None:
                return tied
        return self._plan(prefix, "linear", {})

    def _embedding_name(self) -> str:
        """Returns the name of the embedding, to which some models give no prefix."""
        names = [name for name in self.layers or () if re.search(r"(^|\.)embed_tokens$", name)]
        return names[0] if len(names) == 1 else EMBEDDING

    def _plan(self, prefix: str, kind: str, merged: Mapping[str, list[str]]) -> Plan | None:
        sources = [self._source(name, kind) for name in self._stored_names(prefix, merged)]
        found = [source for source in sources if source is not None]
        if not found:
            return None
        if len(found) < len(sources):
            names = ", ".join(source.name for source in found)
            raise ValueError(
                f"{prefix}: the engine computes {len(sources)} layers as one, and only {names} "
                "would be quantised: quantise all of them or none (overrides, skip)"
            )
        settings = self.settings
        if settings is None:
            return Plan(tuple(found))
        return Plan(tuple(found), settings.activations, settings.backend, settings.fuse)

    def _stored_names(self, prefix: str, merged: Mapping[str, list[str]]) -> list[str]:
        """Returns the names in the checkpoint of a layer that the engine may have merged."""
        if self.layers is not None and prefix in self.layers:
            return [prefix]
        parent, dot, last = prefix.rpartition(".")
        return [f"{parent}{dot}{name}" for name in merged.get(last, [last])]

    def _source(self, name: str, kind: str) -> Source | None:
        stored = None if self.layers is None else self.layers.get(name)
        if stored is not None and stored.format is not None and stored.shape is not None:
            return packed_source(name, stored.tensors, stored.format, stored.shape)
        if self.importer is not None:
            if stored is None or not self._is_imported(stored):
                return None
            return imported_source(name, stored.tensors, self.importer.reader(self.config))
        assert self.settings is not None
        wanted = None if self.is_packed else self.settings.format_of(name, kind)
        if wanted is None:
            return None
        dtype = torch.bfloat16 if stored is None else stored.tensors.get("weight", torch.bfloat16)
        return unquantised_source(name, dtype, wanted)

    def _is_imported(self, layer: StoredLayer) -> bool:
        return self.importer is not None and self.importer.marker in layer.tensors
