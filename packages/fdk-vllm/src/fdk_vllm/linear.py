"""Methods of vLLM's layers."""

from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from fdk_vllm import vllm_versions
from fdk_vllm.methods import EmbeddingMethod, LinearMethod


class FdkLinearMethod(LinearMethod, LinearMethodBase):
    """The method of a linear layer."""

    engine = vllm_versions


class FdkEmbeddingMethod(EmbeddingMethod, QuantizeMethodBase):
    """The method of an embedding or a head."""

    engine = vllm_versions
