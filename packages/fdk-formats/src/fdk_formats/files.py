"""Our file: quantised weights and plain tensors in one safetensors file. See docs/files.md.

A weight ``x`` is the tensors ``x.packed``, ``x.scale`` and ``x.codebook`` or ``x.zero_point``; what
explains them (format string, shape) is JSON in the metadata, whose values are strings.
"""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fdk_formats.format import Format
from fdk_formats.scales import decode_scale
from fdk_formats.tensor import QuantisedTensor

VERSION = "1"
VERSION_KEY = "fdk.version"
WEIGHTS_KEY = "fdk.weights"
ALIASES_KEY = "fdk.aliases"
RESERVED_PREFIX = "fdk."

# Names of the dtypes that every version of safetensors we take holds; others are refused.
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
HEADER_ALIGNMENT = 8


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, QuantisedTensor | Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes quantised weights and plain tensors to one file, whole or not at all.

    The file is written beside ``path`` and renamed over it, so that a reader sees the old file or
    the new one. The same tensors give the same bytes. Two names of one tensor (tied weights) are
    stored once and come back as one object. ``metadata`` holds the caller's own strings.

    Raises:
        TypeError: for tensors that are no mapping, a value that is no tensor, a dtype or layout
            that safetensors does not hold, or metadata that is not strings.
        ValueError: for a name that is taken by a part of a weight, a metadata key of ours, or a
            weight whose codebook is not ascending or whose scales are not finite.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"save: wanted a mapping of names to tensors, got {type(tensors).__name__}")
    target = Path(os.path.realpath(path))
    stored, aliases = _split_aliases(tensors)
    entries = _flatten(stored)
    for name in aliases:
        _check_free(name, entries)
    weights = {
        name: {"format": str(value.format), "shape": list(value.shape)}
        for name, value in stored.items()
        if isinstance(value, QuantisedTensor)
    }
    ours = {
        VERSION_KEY: VERSION,
        WEIGHTS_KEY: json.dumps(weights),
        ALIASES_KEY: json.dumps(aliases),
    }
    with _written_beside(target) as file:
        _write(file, entries, _check_metadata(metadata or {}) | ours)


def load(
    path: str | os.PathLike[str], *, device: torch.device | str | int = "cpu"
) -> dict[str, QuantisedTensor | Tensor]:
    """Reads a file that ``save`` wrote: every weight and tensor by name, bit for bit.

    Nothing in the file is executed, and no size in it is trusted: each tensor is checked against
    its format and shape.

    Raises:
        ValueError: for a file that is truncated, damaged, not ours, of an unknown version, or
            whose tensors are missing, of a wrong size or dtype, or of impossible values; the
            message names the file, the tensor, what was wanted and what came.
        FileNotFoundError: where there is no file.
        IsADirectoryError: where there is a folder.
    """
    with _opened(path) as file:
        metadata = _our_metadata(path, file)
        weights = _read_json(path, metadata, WEIGHTS_KEY)
        aliases = _read_json(path, metadata, ALIASES_KEY)
        names = set(file.keys())
        tensors: dict[str, QuantisedTensor | Tensor] = {}
        for name, entry in weights.items():
            weight, used = _load_weight(path, file, name, entry, names)
            tensors[name] = weight.to(device)
            names -= used
        for name in sorted(names):
            if name in tensors:
                raise ValueError(f"{path}: {name} is both a weight and a plain tensor")
            tensors[name] = file.get_tensor(name).to(device)
    return tensors | _resolve_aliases(path, aliases, tensors)


def load_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The caller's own strings that ``save`` was given.

    Raises:
        ValueError: as ``load`` does for a file that is not ours.
    """
    with _opened(path) as file:
        metadata = _our_metadata(path, file)
    return {key: v for key, v in metadata.items() if not key.startswith(RESERVED_PREFIX)}


# Saving


def _split_aliases(
    tensors: Mapping[str, QuantisedTensor | Tensor],
) -> tuple[dict[str, QuantisedTensor | Tensor], dict[str, str]]:
    """The values to store, and for each further name of the same memory the name stored."""
    stored: dict[str, QuantisedTensor | Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[object, str] = {}
    for name, value in tensors.items():
        if not isinstance(name, str) or name in ("", "__metadata__"):
            raise ValueError(f"save: a name must be a string that is not empty, got {name!r}")
        key = _memory_key(name, value)
        if key is not None and key in seen:
            aliases[name] = seen[key]
            continue
        if key is not None:
            seen[key] = name
        stored[name] = value
    return stored, aliases


def _memory_key(name: str, value: QuantisedTensor | Tensor) -> object:
    """Equal for two values that are the same memory read in the same way; None for no memory."""
    if isinstance(value, QuantisedTensor):
        parts = [_memory_key(f"{name}.{part}", t) for part, t in value.tensors().items()]
        return (value.format, value.shape, *parts)
    if not isinstance(value, Tensor):
        raise TypeError(
            f"save: {name} must be a QuantisedTensor or a tensor, got {type(value).__name__}"
        )
    if value.dtype not in SAFETENSORS_DTYPES:
        wanted = ", ".join(str(dtype) for dtype in SAFETENSORS_DTYPES)
        raise TypeError(f"save: {name} must be one of {wanted}, got {value.dtype}")
    if value.layout != torch.strided or value.device.type == "meta":
        raise TypeError(
            f"save: {name} must be a dense tensor with data, got {value.layout} on {value.device}"
        )
    if value.numel() == 0:
        return None
    read_as = value.dtype, value.is_neg(), value.shape, value.stride()
    return (value.device, value.data_ptr(), *read_as)


def _flatten(stored: Mapping[str, QuantisedTensor | Tensor]) -> dict[str, Tensor]:
    entries: dict[str, Tensor] = {}
    for name, value in stored.items():
        if isinstance(value, Tensor):
            parts = {name: value}
        else:
            check_values(f"save: {name}", value)
            parts = {f"{name}.{part}": tensor for part, tensor in value.tensors().items()}
        for part, tensor in parts.items():
            _check_free(part, entries)
            entries[part] = tensor
    return entries


def _check_free(name: str, entries: Mapping[str, Tensor]) -> None:
    if name in entries:
        raise ValueError(
            f"save: {name} is taken twice: a weight x is stored as x.packed, x.scale, x.codebook "
            "and x.zero_point, and no tensor beside it may have such a name"
        )


def _check_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"save: metadata must be strings, got {key!r}: {value!r}")
        if key.startswith(RESERVED_PREFIX):
            raise ValueError(f"save: metadata keys with {RESERVED_PREFIX!r} are ours, got {key!r}")
    return dict(metadata)


def _write(file: IO[bytes], entries: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    # Written here rather than by safetensors.torch.save_file: that one shuffles the metadata from
    # run to run and refuses tensors that share memory. Wide dtypes first keeps every one aligned.
    order = sorted(entries, key=lambda name: (-entries[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in order:
        tensor, start = entries[name], end
        end += tensor.nbytes
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        data = entries[name].detach().cpu().resolve_neg().contiguous()
        # By hand: one element is contiguous whatever its stride, and a view keeps that.
        data = data.as_strided((data.numel(),), (1,))
        file.write(data.view(torch.uint8).numpy().data)


@contextlib.contextmanager
def _written_beside(target: Path) -> Iterator[IO[bytes]]:
    """A file that becomes ``target`` where the block ends well, and is removed where it fails."""
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(beside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, beside)
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


# Loading


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path}: wanted a file, got a folder")
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path}: truncated or no safetensors file: {error}") from error


def _our_metadata(path: str | os.PathLike[str], file: Any) -> dict[str, str]:
    metadata: dict[str, str] = file.metadata() or {}
    version = metadata.get(VERSION_KEY)
    if version is None:
        raise ValueError(
            f"{path}: not a file of fdk: no {VERSION_KEY} in its metadata "
            "(fdk_formats.readers reads the layouts of other projects)"
        )
    if version != VERSION:
        raise ValueError(f"{path}: {VERSION_KEY} must be {VERSION}, got {version}")
    return metadata


def _read_json(
    path: str | os.PathLike[str], metadata: Mapping[str, str], key: str
) -> dict[str, Any]:
    try:
        value = json.loads(metadata[key])
    except KeyError:
        raise ValueError(f"{path}: damaged metadata: {key} is missing") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged metadata: {key} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: damaged metadata: {key} must be an object, got {value!r}")
    return value


def _load_weight(
    path: str | os.PathLike[str], file: Any, name: str, entry: Any, names: set[str]
) -> tuple[QuantisedTensor, set[str]]:
    """The weight, and the names of the file's tensors that it is made of."""
    format, shape = _parse_entry(path, name, entry)
    parts = {part: f"{name}.{part}" for part in format.tensor_names}
    for full_name in parts.values():
        if full_name not in names:
            raise ValueError(f"{path}: {name} ({format}) needs the tensor {full_name}: missing")
    tensors = {part: file.get_tensor(full_name) for part, full_name in parts.items()}
    try:
        weight = QuantisedTensor(format=format, shape=shape, **tensors)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {name}: {error}") from error
    check_values(f"{path}: {name}", weight)
    return weight, set(parts.values())


def _parse_entry(
    path: str | os.PathLike[str], name: str, entry: Any
) -> tuple[Format, tuple[int, int]]:
    if not isinstance(entry, dict) or not {"format", "shape"} <= entry.keys():
        raise ValueError(
            f"{path}: damaged metadata: {name} must have a format and a shape, got {entry!r}"
        )
    try:
        format = Format.parse(entry["format"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {name}: {error}") from error
    shape = entry["shape"]
    whole = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not whole or len(shape) != 2 or shape[1] == 0:
        raise ValueError(
            f"{path}: damaged metadata: the shape of {name} must be two integers, n of 0 or more "
            f"and k of 1 or more, got {shape!r}"
        )
    return format, (shape[0], shape[1])


def _resolve_aliases(
    path: str | os.PathLike[str],
    aliases: Mapping[str, Any],
    tensors: Mapping[str, QuantisedTensor | Tensor],
) -> dict[str, QuantisedTensor | Tensor]:
    tied: dict[str, QuantisedTensor | Tensor] = {}
    for name, target in aliases.items():
        if not isinstance(target, str) or target not in tensors or name in tensors:
            raise ValueError(
                f"{path}: damaged metadata: {name} must be a further name of a tensor in the "
                f"file, got {target!r}"
            )
        tied[name] = tensors[target]
    return tied


# Both


def check_values(where: str, weight: QuantisedTensor) -> None:
    """What a backend may rely on without looking: an ascending codebook and finite scales.

    Raises:
        ValueError: where that is not so; the message begins with ``where``.
    """
    for part in ("scale", "zero_point"):
        stored = getattr(weight, part)
        if stored is None or (part == "zero_point" and weight.format.zero_point == "int"):
            continue
        bad = int((~decode_scale(stored).isfinite()).sum())
        if bad:
            raise ValueError(f"{where}: {part} must be finite, got {bad} that are not")
    codebook = weight.codebook
    if codebook is None:
        return
    if not bool(codebook.isfinite().all()) or bool((codebook[1:] < codebook[:-1]).any()):
        raise ValueError(f"{where}: codebook must be finite and ascend, got {codebook.tolist()}")
