"""Planner: which layers of a model are made from which tensors of a checkpoint."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fdk_vllm.checkpoint import (
    EXPERT_RENAMES,
    EXPERTS_PREFIX,
    MODEL_RENAMES,
    StoredLayer,
    fetch_headers,
    read_headers,
    renamed_layer,
    stored_layers,
)
from fdk_vllm.expert_weights import ExpertPlan, ExpertSource
from fdk_vllm.importers import IMPORTERS, Importer
from fdk_vllm.settings import Settings, format_from_environment
from fdk_vllm.weights import Plan, Source, imported_source, packed_source, unquantised_source

EMBEDDING = "model.embed_tokens"
# Routers, which choose the experts of a token, stay in 16 bits, as in ``quantise_model``.
ROUTER = re.compile(r"\.(gate|router)$")
# Layers that engines merge. vLLM names those of a Qwen3-MoE with dense layers too late.
MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


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
        model_type: that of config.json.
        blocks: number of the model's blocks; those after them predict further tokens.

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
        self.model_type, self.blocks = "", sys.maxsize

    @property
    def importer(self) -> Importer | None:
        """The reader of another project's weights that the configuration names, or None."""
        return IMPORTERS.get(str(self.config.get("quant_method")))

    @property
    def renames(self) -> dict[str, str]:
        """Regular expressions of names of tensors, and what replaces them."""
        return MODEL_RENAMES.get(self.model_type, {}) | EXPERT_RENAMES

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
        renames = self.renames
        self.layers = {renamed_layer(name, renames): layer for name, layer in layers.items()}
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
        if self.settings is not None and not self.is_packed:
            self.settings.warn_of_unmatched(_names_of(self.layers))
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
            ValueError: if the engine merges layers of which some are quantised; or if the
                checkpoint's files lack the layer, and have it in other blocks.
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

    def stacks(self) -> list[str]:
        """Returns the names of packed stacks of experts."""
        layers = (self.layers or {}).items()
        return [name for name, layer in layers if layer.shape is not None and len(layer.shape) == 3]

    def expert_plan(self, prefix: str, names: tuple[str, str | None, str]) -> ExpertPlan | None:
        """Returns the plan of the experts of a layer, or None for 16 bits.

        Args:
            prefix: name of their module in the engine's model.
            names: what the checkpoint calls the gate, up and down of one expert; up is None where
                experts have no gate.

        Raises:
            ValueError: if only some of their weights would be quantised, or packed ones differ in
                format or shape; for experts of another project; or if the files lack them, and
                have those of other blocks.
        """
        shards = {
            shard: name for shard, name in zip(("w1", "w3", "w2"), names, strict=True) if name
        }
        if self.importer is not None:
            if any(self._is_imported(each) for each in self._experts_of(prefix, names[0])):
                raise ValueError(
                    f"{prefix}: fdk does not compute experts of {self.config['quant_method']} "
                    "checkpoints: serve it without --quantization fdk"
                )
            return None
        assert self.settings is not None
        found: dict[str, ExpertSource | None] = {}
        for stack in ("w13", "w2"):
            stored = (self.layers or {}).get(f"{prefix}.{EXPERTS_PREFIX}{stack}")
            found[stack] = None if stored is None else _packed_experts(prefix, stack, [stored])
        if not any(found.values()):
            stored_by_shard = {
                shard: self._experts_of(prefix, name) for shard, name in shards.items()
            }
            found = {
                shard: _packed_experts(prefix, shards[shard], stored)
                for shard, stored in stored_by_shard.items()
            }
            if not any(found.values()) and not self.is_packed:
                dtypes = {
                    layer.tensors.get("weight", torch.bfloat16)
                    for stored in stored_by_shard.values()
                    for layer in stored
                }
                tensors = {"weight": dtypes.pop() if len(dtypes) == 1 else torch.bfloat16}
                first = "gate_up_proj" if names[1] else "up_proj"
                for shard in shards:
                    own = "down_proj" if shard == "w2" else first
                    wanted = self.settings.format_of(f"{prefix}.{own}")
                    found[shard] = None if wanted is None else ExpertSource(wanted, tensors)
        sources = {shard: source for shard, source in found.items() if source is not None}
        if not sources:
            self._check_present(prefix, [prefix])
        if sources and len(sources) < len(found):
            raise ValueError(
                f"{prefix}: the engine computes the projections of experts as one, and only "
                f"{', '.join(sources)} of {', '.join(found)} would be quantised: quantise all of "
                "them or none (overrides, skip)"
            )
        return ExpertPlan(sources, self.settings.backend) if sources else None

    def _experts_of(self, prefix: str, name: str) -> list[StoredLayer]:
        """Returns what is stored of a projection of experts that are stored one by one."""
        pattern = re.compile(rf"{re.escape(prefix)}\.\d+\.{re.escape(name)}")
        return [layer for key, layer in (self.layers or {}).items() if pattern.fullmatch(key)]

    def _embedding_name(self) -> str:
        """Returns the name of the embedding, to which some models give no prefix."""
        names = [name for name in self.layers or () if re.search(r"(^|\.)embed_tokens$", name)]
        return names[0] if len(names) == 1 else EMBEDDING

    def _plan(self, prefix: str, kind: str, merged: Mapping[str, list[str]]) -> Plan | None:
        names = self._stored_names(prefix, merged)
        sources = [self._source(name, kind) for name in names]
        found = [source for source in sources if source is not None]
        if not found:
            self._check_present(prefix, names)
            return None
        if len(found) < len(sources):
            only = ", ".join(source.name for source in found)
            raise ValueError(
                f"{prefix}: the engine computes {len(sources)} layers as one, and only {only} "
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
        return [f"{parent}{dot}{name}" for name in merged.get(last, MERGED.get(last, [last]))]

    def _source(self, name: str, kind: str) -> Source | None:
        stored = None if self.layers is None else self.layers.get(name)
        if stored is not None and stored.format is not None and stored.shape is not None:
            n, k = stored.shape
            return packed_source(name, stored.tensors, stored.format, (n, k))
        if self.importer is not None:
            if stored is None or not self._is_imported(stored):
                return None
            return imported_source(name, stored.tensors, self.importer.reader(self.config))
        assert self.settings is not None
        is_left = self.is_packed or ROUTER.search(name) is not None
        wanted = None if is_left else self.settings.format_of(name, kind)
        if wanted is None:
            return None
        dtype = torch.bfloat16 if stored is None else stored.tensors.get("weight", torch.bfloat16)
        return unquantised_source(name, dtype, wanted)

    def _check_present(self, prefix: str, names: Sequence[str]) -> None:
        """Raises ValueError if the files hold nothing of a layer, or experts, of other blocks.

        It would be a 16-bit layer, and vLLM checks for missing weights in 16-bit models only.

        Args:
            prefix: name in the engine's model.
            names: names in the checkpoint.
        """
        known, block = self.layers or {}, re.search(r"\.(\d+)\.", prefix)
        is_draft = block is not None and int(block[1]) >= self.blocks  # names of its own
        if is_draft or any(f"{key}.".startswith(f"{each}.") for key in known for each in names):
            return
        for name in (prefix, *names):
            parts = (r"\d+" if part.isdecimal() else re.escape(part) for part in name.split("."))
            of_any_block = re.compile(r"\.".join(parts) + r"(\.|$)")
            if like := [key for key in known if of_any_block.match(key)]:
                raise ValueError(
                    f"{name}: the checkpoint's files hold no tensor of it, but some of {like[0]}: "
                    "a file may be missing"
                )

    def _is_imported(self, layer: StoredLayer) -> bool:
        return self.importer is not None and self.importer.marker in layer.tensors


def _names_of(layers: Mapping[str, StoredLayer]) -> set[str]:
    """Returns names that patterns may match: of layers, and of projections of experts."""
    names = {f"{name}.{below}" for name, layer in layers.items() for below in layer.tensors}
    for name in layers:
        if found := re.match(r"(.*\.experts)\.\d+\.", name):
            names |= {f"{found[1]}.{each}" for each in ("gate_up_proj", "up_proj", "down_proj")}
    return names | layers.keys()


def _packed_experts(prefix: str, name: str, stored: list[StoredLayer]) -> ExpertSource | None:
    """Returns the source of a stack, or of experts that are packed one by one; None in 16 bits."""
    kinds = {(layer.format, layer.shape) for layer in stored}
    if len(kinds) > 1:
        formats = sorted(f"{format or '16 bits'} {list(shape or ())}" for format, shape in kinds)
        raise ValueError(
            f"{prefix}: {name} of all experts must have one format and shape, "
            f"got {', '.join(formats)}"
        )
    format, shape = kinds.pop() if kinds else (None, None)
    if format is None or shape is None:
        return None
    found = stored[0].tensors
    if missing := [each for each in format.tensor_names if f"weight.{each}" not in found]:
        raise ValueError(f"{prefix}: the checkpoint has no {', '.join(missing)} of {name}")
    return ExpertSource(
        format, {each: found[f"weight.{each}"] for each in format.tensor_names}, shape
    )
