"""Batch-invariant kernels where vLLM is asked for them (``VLLM_BATCH_INVARIANT=1``)."""

import importlib
import importlib.util

from fdk_formats.backends import KNOWN_PACKAGES


def follow_vllm() -> None:
    """Registers fdk's backends as batch-invariant ones if vLLM is to be batch-invariant."""
    import vllm.envs

    if vllm.envs.VLLM_BATCH_INVARIANT:
        for name in KNOWN_PACKAGES:
            if importlib.util.find_spec(name) is not None:
                importlib.import_module(name).register_backends(batch_invariant=True)
