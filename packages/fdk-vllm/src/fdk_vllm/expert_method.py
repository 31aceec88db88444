"""The method of vLLM's experts (``RoutedExperts``), which are computed after vLLM's routing."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from fdk_formats.tensor_parallel import check_cut
from fdk_vllm import vllm_versions
from fdk_vllm.checkpoint import EXPERTS_PREFIX
from fdk_vllm.cut import ExpertPart
from fdk_vllm.expert_weights import ExpertPlan, ExpertWeights
from fdk_vllm.gates import gate_of

REMEDY = "serve with fewer GPUs (--tensor-parallel-size) or with --enable-expert-parallel"


class FdkExpertMethod(FusedMoEMethodBase):
    """Loads and computes the experts of one layer.

    vLLM routes tokens, and adds the results of all processes.

    Args:
        plan: how to make the weights.
        name: name of the layer, for messages.
        moe: vLLM's configuration of the layer.
    """

    def __init__(self, plan: ExpertPlan, name: str, moe: Any) -> None:
        super().__init__(moe)
        self.plan, self.name = plan, name
        self.weights: ExpertWeights
        self._is_dummy = False
        self._routes_tokens = vllm_versions.methods_route_tokens()

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """See ``FusedMoEMethodBase`` of vLLM.

        Raises:
            ValueError: if the format does not fit the experts, or their part of one process.
        """
        inner, ranks = intermediate_size_per_partition, self.moe.tp_size
        try:
            gate = gate_of(
                layer.activation.value, layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta
            )
            self._check(layer, hidden_size, inner * ranks, gate.order)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        part = ExpertPart(self._experts(layer), self.moe.tp_rank, ranks, gate.order)
        device = torch.empty(0).device  # vLLM builds models under its device
        self._is_dummy = vllm_versions.is_dummy_load()
        sizes = hidden_size, inner, params_dtype, device
        self.weights = ExpertWeights(self.name, self.plan, part, gate, *sizes)
        self.weights.add_parameters(layer)
        if self.moe.has_bias:
            rows = inner if gate.order == "none" else 2 * inner
            for name, n in (("w13_bias", rows), ("w2_bias", hidden_size)):
                zeros = torch.zeros(num_experts, n, dtype=params_dtype)
                bias = nn.Parameter(zeros, requires_grad=False)
                bias.weight_loader = extra_weight_attrs["weight_loader"]  # type: ignore[attr-defined]
                layer.register_parameter(name, bias)
        _load_stacks_by_name(layer)

    def _check(self, layer: Any, hidden: int, inner: int, order: str) -> None:
        for projection, k in (("w13", hidden), ("w2", inner)):
            for source in self.plan.of(projection).values():
                source.format.group_size_for(k)
                if projection == "w2":
                    check_cut(source.format, k, self.moe.tp_size, REMEDY)
        if self.plan.is_quantised_here and order == "interleaved":
            raise ValueError(
                "experts with interleaved gates are not quantised while loading: quantise the "
                "model with fdk-transformers first"
            )
        if vllm_versions.adapters_reach_experts():
            raise ValueError(
                "adapters of quantised experts are not supported: name the layers that adapters "
                "may change, --lora-target-modules q_proj k_proj v_proj o_proj"
            )
        if layer.apply_router_weight_on_input and layer.top_k != 1:
            raise ValueError(
                f"routing weights are applied to inputs of one expert for each token, "
                f"got {layer.top_k}"
            )

    def _experts(self, layer: Any) -> tuple[int, ...]:
        """Returns the experts of this process in its own order."""
        expert_map = layer.expert_map
        if expert_map is None:
            return tuple(range(layer.global_num_experts))
        own = (expert_map >= 0).nonzero().flatten().tolist()
        return tuple(sorted(own, key=expert_map.tolist().__getitem__))

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Returns None: vLLM's kernels do not compute these experts."""
        return

    def process_weights_after_loading(self, layer: Any) -> None:
        """See ``QuantizeMethodBase`` of vLLM.

        Raises:
            ValueError: if the checkpoint lacks a tensor of the experts.
        """
        self.weights.finish(self._is_dummy)
        if self.moe.has_bias and self.moe.tp_rank > 0:
            layer.w2_bias.data.zero_()  # the first process adds it

    @property
    def is_monolithic(self) -> bool:
        """True where vLLM leaves it to methods to call its routing."""
        return self._routes_tokens

    def apply_monolithic(
        self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None
    ) -> Tensor:
        """See ``FusedMoEMethodBase`` of vLLM."""
        return self.apply(layer, x, *vllm_versions.route_on_cpu(layer, x, router_logits))

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """See ``FusedMoEMethodBase`` of vLLM, whose runner computes shared experts."""
        assert self.weights.product is not None
        if layer.expert_map is not None:
            topk_ids = layer.expert_map[topk_ids]  # -1 for those of other processes
        if layer.apply_router_weight_on_input:
            x = x * topk_weights.to(x.dtype)
            topk_weights = torch.ones_like(topk_weights)
        biases = (layer.w13_bias, layer.w2_bias) if self.moe.has_bias else ()
        return self.weights.product(x, topk_ids, topk_weights, *biases)


def _load_stacks_by_name(layer: Any) -> None:
    """Lets a layer load stacks that are named as its parameters, such as ``w13_packed``.

    vLLM's loader knows the names of single experts and of 16-bit stacks only.
    """
    stacks = set(layer._parameters) - {"w13_bias", "w2_bias"}

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        loaded = []

        def others() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                own = name.removeprefix(EXPERTS_PREFIX)
                if own in stacks:
                    parameter = layer._parameters[own]
                    parameter.weight_loader(parameter, tensor)
                    loaded.append(own)
                else:
                    yield name, tensor

        yield from type(layer).load_weights(layer, others())
        yield from loaded

    layer.load_weights = load_weights
