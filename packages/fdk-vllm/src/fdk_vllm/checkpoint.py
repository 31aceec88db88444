"""The layers that the safetensors files of a checkpoint hold, from their headers."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fdk_formats.files import ALIASES_KEY, SAFETENSORS_DTYPES, WEIGHTS_KEY, parse_weights
from fdk_formats.format import Format
from fdk_formats.readers.checkpoint import INDEX
from fdk_formats.safetensors_file import open_safetensors
from fdk_formats.untrusted import parse_json_object

DTYPES = {text: dtype for dtype, text in SAFETENSORS_DTYPES.items()}

# Names that transformers gives experts, and those that vLLM gives them, as regular expressions.
# The module of vLLM that holds them is below ``experts``, and calls its parameters w13 and w2.
EXPERTS_PREFIX = "routed_experts."
FIELDS = "(packed|scale|zero_point|codebook)"
EXPERT_RENAMES = {
    rf"\.experts\.(?:gate_up_proj|up_proj)\.weight\.{FIELDS}$": rf".experts.{EXPERTS_PREFIX}w13_\1",
    rf"\.experts\.down_proj\.weight\.{FIELDS}$": rf".experts.{EXPERTS_PREFIX}w2_\1",
    rf"\.experts\.(\d+)\.(\w+)\.weight\.{FIELDS}$": r".experts.\1.\2.\3",
}
# By model type, where vLLM has names of before transformers 5.
MODEL_RENAMES = {
    "mixtral": {
        r"\.mlp\.(experts|gate)\.": r".block_sparse_moe.\1.",
        r"\.experts\.gate_up_proj$": ".experts.w13",
        r"\.experts\.down_proj$": ".experts.w2",
    }
}


@dataclass(frozen=True)
class StoredLayer:
    """The tensors of a layer in a checkpoint.

    Attributes:
        tensors: dtypes by name below the layer: ``weight``, or ``weight.packed`` and so on.
        format: format of a packed weight; None for other tensors.
        shape: ``(n, k)`` of a packed weight, ``(experts, n, k)`` of a stack.
    """

    tensors: Mapping[str, torch.dtype]
    format: Format | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Header:
    """Metadata and dtypes in the header of a safetensors file.

    Attributes:
        where: the file, for messages.
        metadata: its strings.
        tensors: dtypes by name, as in the header: ``BF16``.
    """

    where: str
    metadata: Mapping[str, str]
    tensors: Mapping[str, str] = field(default_factory=dict)


def read_headers(folder: str | os.PathLike[str]) -> list[Header]:
    """Reads the headers of the safetensors files that vLLM would load from a folder.

    Raises:
        ValueError: if a file or the index is damaged, or a file that the index names is missing.
    """
    path = Path(folder)
    paths: Iterable[Path] = sorted(path.glob("*.safetensors"))
    if (path / INDEX).exists():
        index = parse_json_object((path / INDEX).read_text(), str(path / INDEX))
        listed = {str(file) for file in dict(index.get("weight_map", {})).values()}
        if missing := sorted(file for file in listed if not os.path.exists(path / file)):
            raise ValueError(f"{path / INDEX} names {', '.join(missing)}, not in this folder")
        paths = [file for file in paths if file.name in listed]
    headers = []
    for each in paths:
        with open_safetensors(each) as file:
            tensors = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
            headers.append(Header(str(each), file.metadata() or {}, tensors))
    return headers


def fetch_headers(model: str, revision: str | None) -> list[Header]:
    """Reads the headers of a model's safetensors files on the Hugging Face hub.

    Returns:
        Nothing where the model has no safetensors files.
    """
    import huggingface_hub

    try:
        repository = huggingface_hub.get_safetensors_metadata(model, revision=revision)
    except huggingface_hub.errors.NotASafetensorsRepoError:
        return []
    return [
        Header(
            f"{model}/{name}",
            file.metadata,
            {tensor: info.dtype for tensor, info in file.tensors.items()},
        )
        for name, file in repository.files_metadata.items()
    ]


def stored_layers(headers: Iterable[Header]) -> dict[str, StoredLayer]:
    """Returns the layers of a checkpoint by name.

    A layer is every prefix of a tensor's name up to ``.weight``, or up to the last dot where the
    name has none. Biases are left out.

    Raises:
        ValueError: if the metadata of a file are damaged.
    """
    tensors: dict[str, dict[str, torch.dtype]] = {}
    packed: dict[str, tuple[Format, tuple[int, ...]]] = {}
    aliases: dict[str, str] = {}
    for header in headers:
        if WEIGHTS_KEY in header.metadata:
            packed |= parse_weights(header.where, header.metadata)
        text = header.metadata.get(ALIASES_KEY, "{}")
        aliases |= parse_json_object(text, f"{header.where}: damaged metadata: {ALIASES_KEY}")
        for name, dtype in header.tensors.items():
            layer, below = split_name(name)
            if below != "bias" and dtype in DTYPES:
                tensors.setdefault(layer, {})[below] = DTYPES[dtype]
    layers = {
        name: StoredLayer(below, *packed.get(f"{name}.weight", (None, None)))
        for name, below in tensors.items()
    }
    for alias, target in aliases.items():
        if (owner := split_name(str(target))[0]) in layers:
            layers.setdefault(split_name(alias)[0], layers[owner])
    return layers


def renamed_layer(name: str, renames: Mapping[str, str]) -> str:
    """Returns the name of a layer whose tensors are renamed, see ``EXPERT_RENAMES``."""
    tensor = f"{name}.weight.packed"
    for pattern, new in renames.items():
        tensor = re.sub(pattern, new, tensor)
    return re.sub(r"(\.weight)?[._]packed$", "", tensor)


def split_name(name: str) -> tuple[str, str]:
    """Splits the name of a tensor into its layer and the rest: ``a.b`` and ``weight.scale``."""
    if name.endswith(".weight"):
        return name.removesuffix(".weight"), "weight"
    layer, found, rest = name.rpartition(".weight.")
    if found:
        return layer, f"weight.{rest}"
    layer, _, below = name.rpartition(".")
    return layer, below
