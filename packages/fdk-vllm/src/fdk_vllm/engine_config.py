"""The part of a configuration that is the same for vLLM and SGLang."""

from typing import Any

import torch


class EngineConfig:
    """Answers to an engine's questions about the quantisation method."""

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
