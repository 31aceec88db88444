"""Operations on the tensors of a checkpoint while transformers reads it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightRenaming

from fdk_formats.quantised_module import PREFIX


class QuantiseOnLoad(ConversionOps):
    """Quantises the weights that transformers has read, one layer at a time.

    Args:
        quantiser: the quantiser, which has their formats.
    """

    def __init__(self, quantiser: Any) -> None:
        self.quantiser = quantiser

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str] | None = None,
        target_patterns: list[str] | None = None,
        model: Any = None,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Returns the tensors of the quantised weights, and others as they are."""
        result: dict[str, Any] = {}
        missing = set() if missing_keys is None else missing_keys
        for name, value in input_dict.items():
            tensor: Tensor = value[0] if isinstance(value, list) else value
            if name.rpartition(".")[0] in self.quantiser.mixtures:
                result |= self.quantiser.quantise_experts(model, name, tensor, missing)
            elif self.quantiser.formats.get(name.removesuffix(".weight")) is None:
                result[name] = value
            else:
                result |= self.quantiser.quantise_parameter(model, name, tensor, missing)
        return result


def renamings_of_files(fields: Sequence[str]) -> list[Any]:
    """Returns the renamings from tensors of a file to parameters: `weight.scale`, `weight_scale`.

    Args:
        fields: names of the tensors of a weight.
    """
    return [WeightRenaming(rf"\.weight\.{field}", f".{PREFIX}{field}") for field in fields]
