"""FdkConfig: vLLM's configuration of the quantisation method ``fdk``."""

import logging
import os
import re
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from fdk_vllm.checkpoint import StoredLayer, fetch_headers, read_headers, stored_layers
from fdk_vllm.importers import IMPORTERS, RENAMES
from fdk_vllm.linear import FdkEmbeddingMethod, FdkLinearMethod
from fdk_vllm.settings import Settings, format_from_environment
from fdk_vllm.vllm_versions import empty_mapper, renaming_mapper
from fdk_vllm.weights import Plan, Source, imported_source, packed_source, unquantised_source

EMBEDDING = "model.embed_tokens"
# Buffers of transformers that ``save_model`` writes, as no model on meta can make them again.
# vLLM drops ``rotary_emb.inv_freq`` itself.
BUFFERS = (".original_inv_freq", ".embed_scale", "._extra_state")

logger = logging.getLogger(__name__)


class FdkConfig(QuantizationConfig):
    """Chooses the method of each layer of a model.

    The checkpoint's files say which layers are stored packed and how. The settings in config.json
    say how to quantise those stored in 16 bits, and stand in for files where there are none. With
    ``--quantization fdk``, a checkpoint of ``IMPORTERS`` is read by fdk.

    Args:
        config: ``quantization_config``; None reads ``FDK_VLLM_FORMAT``.

    Raises:
        ValueError: see ``Settings.parse``.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.config = dict(format_from_environment() if config is None else config)
        self.importer = IMPORTERS.get(str(self.config.get("quant_method")))
        self.read = None if self.importer is None else self.importer.reader(self.config)
        self.settings = None if self.importer is not None else Settings.parse(self.config)
        self.layers: dict[str, StoredLayer] | None = None
        self.is_packed = self.is_tied = False

    # The interface of vLLM

    def get_name(self) -> Any:
        """Returns ``fdk``."""
        return "fdk"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Returns the dtypes of activations that backends have kernels for."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Returns the oldest GPU that the kernels run on: Ampere."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Returns no file: settings are in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Reads ``quantization_config``."""
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Takes the checkpoints of ``IMPORTERS`` if the user asks for fdk."""
        method = (hf_quant_cfg or {}).get("quant_method")
        return "fdk" if user_quant == "fdk" and method in IMPORTERS else None

    @staticmethod
    def get_cache_scale_mapper() -> Any:
        """Renames tensors that no module could hold (see ``RENAMES``), and drops ``BUFFERS``."""
        return QuantizationConfig.get_cache_scale_mapper() | renaming_mapper(RENAMES, BUFFERS)

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """Keeps ``g_idx`` of GPTQ, which vLLM would drop."""
        return empty_mapper()

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Reads the headers of the checkpoint's files.

        Raises:
            ValueError: if a header is damaged, or the checkpoint is not what config.json says.
        """
        if hf_config is not None:
            text_config = hf_config.get_text_config()
            self.is_tied = bool(getattr(text_config, "tie_word_embeddings", False))
            # vLLM keys compiled graphs by the configuration of the model.
            hf_config.quantization_config = self.config
        is_folder = os.path.isdir(model_name)
        headers = read_headers(model_name) if is_folder else fetch_headers(model_name, revision)
        layers = stored_layers(headers)
        if not layers:
            return
        self.layers = layers
        self.is_packed = any(layer.format is not None for layer in layers.values())
        if self.is_packed and self.importer is not None:
            raise ValueError(
                f"{model_name}: config.json says {self.config['quant_method']}, and its files hold "
                "weights of fdk"
            )
        if self.importer is not None and not any(map(self._is_imported, layers.values())):
            raise ValueError(
                f"{model_name}: config.json says {self.config['quant_method']}, and its files hold "
                f"no tensor called <layer>.{self.importer.marker}"
            )

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Renames layers of the checkpoint as vLLM's model does."""
        if self.layers is None:
            return
        renamed = {}
        for name, layer in self.layers.items():
            found = hf_to_vllm_mapper.apply_list([f"{name}.weight"])
            if found:
                renamed[found[0].removesuffix(".weight")] = layer
        self.layers = renamed

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns the method of a layer; None for what fdk has none for.

        Raises:
            ValueError: if vLLM merges layers of which some are quantised.
        """
        if isinstance(layer, LinearBase):
            plan = self._plan(prefix, "linear")
            return UnquantizedLinearMethod() if plan is None else FdkLinearMethod(plan, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            is_head = isinstance(layer, ParallelLMHead)
            plan = self._embedding_plan(prefix, is_head)
            name = prefix or EMBEDDING
            return None if plan is None else FdkEmbeddingMethod(plan, name, is_head)
        if type(layer).__name__ in ("FusedMoE", "RoutedExperts"):
            logger.warning("fdk: %s: experts are left in 16 bits: vLLM computes them", prefix)
        return None

    # Plans

    def _embedding_plan(self, prefix: str, is_head: bool) -> Plan | None:
        if not is_head:
            return self._plan(prefix or self._embedding_name(), "embedding")
        if self.is_tied:
            tied = self._plan(self._embedding_name(), "embedding")
            if tied is not None or self.is_packed or self.importer is not None:
                return tied
        return self._plan(prefix, "linear")

    def _embedding_name(self) -> str:
        """Returns the name of the embedding, to which some models of vLLM give no prefix."""
        names = [name for name in self.layers or () if re.search(r"(^|\.)embed_tokens$", name)]
        return names[0] if len(names) == 1 else EMBEDDING

    def _plan(self, prefix: str, kind: str) -> Plan | None:
        sources = [self._source(name, kind) for name in self._stored_names(prefix)]
        found = [source for source in sources if source is not None]
        if not found:
            return None
        if len(found) < len(sources):
            names = ", ".join(source.name for source in found)
            raise ValueError(
                f"{prefix}: vLLM computes {len(sources)} layers as one, and only {names} would be "
                f"quantised: quantise all of them or none (overrides, skip)"
            )
        settings = self.settings
        if settings is None:
            return Plan(tuple(found))
        return Plan(tuple(found), settings.activations, settings.backend, settings.fuse)

    def _stored_names(self, prefix: str) -> list[str]:
        """Returns the names in the checkpoint of a layer that vLLM may have merged."""
        if self.layers is not None and prefix in self.layers:
            return [prefix]
        parent, dot, last = prefix.rpartition(".")
        return [f"{parent}{dot}{name}" for name in self.packed_modules_mapping.get(last, [last])]

    def _source(self, name: str, kind: str) -> Source | None:
        stored = None if self.layers is None else self.layers.get(name)
        if stored is not None and stored.format is not None and stored.shape is not None:
            return packed_source(name, stored.tensors, stored.format, stored.shape)
        if self.read is not None:
            if stored is None or not self._is_imported(stored):
                return None
            return imported_source(name, stored.tensors, self.read)
        assert self.settings is not None
        wanted = None if self.is_packed else self.settings.format_of(name, kind)
        if wanted is None:
            return None
        dtype = torch.bfloat16 if stored is None else stored.tensors.get("weight", torch.bfloat16)
        return unquantised_source(name, dtype, wanted)

    def _is_imported(self, layer: StoredLayer) -> bool:
        return self.importer is not None and self.importer.marker in layer.tensors
