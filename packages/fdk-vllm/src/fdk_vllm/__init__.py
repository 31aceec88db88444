"""vLLM plug-in: linear layers, heads and embeddings whose weights are stored in 1 to 8 bits.

vLLM calls ``register`` in each of its processes, by the entry point ``vllm.general_plugins``.
Importing this package imports neither vLLM nor torch.
"""

__version__ = "0.1.0"
__all__ = ["register"]


def register() -> None:
    """Registers the quantisation method ``fdk`` with vLLM; repeated calls change nothing."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from fdk_vllm.batch_invariance import follow_vllm
    from fdk_vllm.config import FdkConfig

    register_quantization_config("fdk")(FdkConfig)
    follow_vllm()
