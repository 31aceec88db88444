"""FdkConfig: vLLM's configuration of the quantisation method ``fdk``."""

import re
from collections.abc import Mapping
from typing import Any, Self

from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from fdk_vllm.engine_config import EngineConfig
from fdk_vllm.expert_method import FdkExpertMethod
from fdk_vllm.importers import IMPORTERS, RENAMES
from fdk_vllm.linear import FdkEmbeddingMethod, FdkLinearMethod
from fdk_vllm.planner import EMBEDDING, Planner
from fdk_vllm.vllm_versions import empty_mapper, renaming_mapper, start_products_early

# Buffers of transformers that ``save_model`` writes, as no model on meta can make them again.
# vLLM drops ``rotary_emb.inv_freq`` itself.
BUFFERS = (".original_inv_freq", ".embed_scale", "._extra_state")


class FdkConfig(EngineConfig, QuantizationConfig):
    """Chooses the method of each layer of a model, see ``Planner``.

    With ``--quantization fdk``, it takes checkpoints of ``IMPORTERS`` too.

    Args:
        config: ``quantization_config``; None reads ``FDK_VLLM_FORMAT``.

    Raises:
        ValueError: see ``Settings.parse``.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.planner = Planner(config)

    # The interface of vLLM

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

    def get_cache_scale_mapper(self) -> Any:
        """Renames tensors that no module could hold (see ``RENAMES``), and drops ``BUFFERS``."""
        ends = [rf"{re.escape(name)}$" for name in BUFFERS]
        names = [rf"^{re.escape(name)}$" for name in self.planner.stoppers]
        renames = RENAMES | self.planner.renames | dict.fromkeys([*ends, *names])
        return QuantizationConfig.get_cache_scale_mapper() | renaming_mapper(renames)

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
            self.planner.is_tied = bool(getattr(text_config, "tie_word_embeddings", False))
            self.planner.model_type = str(getattr(text_config, "model_type", ""))
            if (blocks := getattr(text_config, "num_hidden_layers", None)) is not None:
                self.planner.blocks = int(blocks)
            # vLLM keys compiled graphs by the configuration of the model.
            hf_config.quantization_config = self.planner.config
        self.planner.read_checkpoint(model_name, revision)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Renames layers of the checkpoint as vLLM's model does."""
        self.planner.rename(hf_to_vllm_mapper)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns the method of a layer; None for what fdk has none for.

        Raises:
            ValueError: see ``Planner.plan``.
        """
        start_products_early()
        if isinstance(layer, LinearBase):
            plan = self.planner.plan(prefix, self.packed_modules_mapping)
            return UnquantizedLinearMethod() if plan is None else FdkLinearMethod(plan, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            is_head = isinstance(layer, ParallelLMHead)
            plan = self.planner.embedding_plan(prefix, is_head)
            name = prefix or EMBEDDING
            return None if plan is None else FdkEmbeddingMethod(plan, name, is_head)
        if isinstance(layer, RoutedExperts):
            names = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
            experts = self.planner.expert_plan(prefix, names)
            return None if experts is None else FdkExpertMethod(experts, prefix, layer.moe_config)
        return None
