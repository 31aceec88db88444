"""Checkpoints of other projects, whose weights fdk's kernels compute on request."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fdk_formats.readers import awq, bitsandbytes, gptq, hqq
from fdk_formats.readers.checkpoint import Reader


@dataclass(frozen=True)
class Importer:
    """A reader of another project's weights.

    Attributes:
        marker: the tensor below a layer that says that it is quantised.
        reader: makes the reader from ``quantization_config``.
    """

    marker: str
    reader: Callable[[Mapping[str, Any]], Reader]


# By quant_method in config.json.
IMPORTERS = {
    "gptq": Importer("qweight", gptq.weight_reader),
    "awq": Importer("qweight", awq.weight_reader),
    "bitsandbytes": Importer("weight.quant_map", lambda config: bitsandbytes.read_entries),
    "hqq": Importer("W_q", lambda config: hqq.weight_reader()),
}

# bitsandbytes stores both a tensor ``weight`` and tensors below it, such as ``weight.absmax``; no
# module has both. These regular expressions rename the latter, in the checkpoint too.
RENAMES: dict[str, str] = {
    r"\.weight\.quant_state\.(\w+)$": r".weight_quant_state_\1",
    r"\.weight\.((?:nested_)?(?:absmax|quant_map))$": r".weight_\1",
}


def parameter_name(tensor_name: str) -> str:
    """Returns the name of the parameter for a tensor of a layer, both below the layer."""
    for pattern, new in RENAMES.items():
        tensor_name = re.sub(pattern, new, f".{tensor_name}").removeprefix(".")
    return tensor_name
