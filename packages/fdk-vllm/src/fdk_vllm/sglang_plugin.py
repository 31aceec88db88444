"""The same methods for SGLang, which calls ``register`` by the entry point ``sglang.srt.plugins``.

    python -m sglang.launch_server --model-path FOLDER        # quant_method fdk in config.json

Written after reading SGLang 0.5.23, whose layers have the interface that vLLM's once had. It was
not run there: SGLang needs a GPU and a torch of its own (2.14.1). The test checks this module
against stand-ins of the classes that it uses. Linear layers only; heads and embeddings stay in
16 bits, because SGLang registers theirs elsewhere. What SGLang does that vLLM does not:

- ``QUANTIZATION_METHODS`` is a dict to add to, and the choices of ``--quantization`` another list.
- ``from_config`` gets ``packed_modules_mapping`` and ``hf_config`` among the settings; the folder
  of the checkpoint is ``hf_config.name_or_path``.
- Layers without tensor parallelism have no ``tp_size``.
"""

import types
from typing import Any

from torch import nn

from fdk_vllm.engine_config import EngineConfig
from fdk_vllm.methods import LinearMethod
from fdk_vllm.planner import Planner

FROM_SGLANG = ("packed_modules_mapping", "hf_config")


def ranks_of(layer: Any) -> tuple[int, int]:
    """Returns a layer's index among the processes of tensor parallelism, and their number."""
    return int(getattr(layer, "tp_rank", 0)), int(getattr(layer, "tp_size", 1))


def is_dummy_load() -> bool:
    """Returns False: weights are never made up here."""
    return False


def register() -> None:
    """Registers the quantisation method ``fdk`` with SGLang; repeated calls change nothing."""
    from sglang.srt.arg_groups.choices import add_quantization_method_choices
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    if "fdk" in QUANTIZATION_METHODS:
        return
    engine = types.SimpleNamespace(ranks_of=ranks_of, is_dummy_load=is_dummy_load)
    method = type("FdkLinearMethod", (LinearMethod, LinearMethodBase), {"engine": engine})

    class FdkConfig(EngineConfig, QuantizationConfig):
        """SGLang's configuration of the method ``fdk``."""

        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__()
            self.packed_modules_mapping = dict(config.get("packed_modules_mapping") or {})
            own = {key: value for key, value in config.items() if key not in FROM_SGLANG}
            self.planner = Planner(own)
            hf_config = config.get("hf_config")
            if folder := getattr(hf_config, "name_or_path", ""):
                self.planner.read_checkpoint(folder)
            if stack := next(iter(self.planner.stacks()), None):
                raise ValueError(
                    f"fdk: {stack} holds packed experts, which fdk does not compute in SGLang: "
                    'quantise the model with skip=["experts"], or serve it with vLLM'
                )

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> "FdkConfig":
            """Reads ``quantization_config``."""
            return cls(config)

        def get_scaled_act_names(self) -> list[str]:
            """Returns no activation: none is scaled."""
            return []

        def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
            """Returns the method of a linear layer; None for others."""
            if not isinstance(layer, LinearBase):
                return None
            plan = self.planner.plan(prefix, self.packed_modules_mapping)
            return UnquantizedLinearMethod() if plan is None else method(plan, prefix)

    QUANTIZATION_METHODS["fdk"] = FdkConfig
    add_quantization_method_choices(["fdk"])
