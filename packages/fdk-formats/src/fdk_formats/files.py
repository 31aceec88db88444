"""fdk's file format: quantised weights, plain tensors and whole models in safetensors files.

A weight ``x`` is stored as the tensors ``x.packed``, ``x.scale`` and ``x.codebook`` or
``x.zero_point``. Its format string and shape are JSON in the metadata. docs/guide/files.md has the
layout.
"""

import contextlib
import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fdk_formats.atomic_write import atomic_write
from fdk_formats.experts import ExpertLinear, experts_like, layers_and_projections
from fdk_formats.format import Format
from fdk_formats.fuse import checked_groups, fuse_layers
from fdk_formats.instance_attributes import carry_over, check_patches
from fdk_formats.layer_kinds import check_source, kind_of, matrix_of, quantised_like
from fdk_formats.linear import QuantisedLinear
from fdk_formats.quantised_module import QuantisedModule, call_model_hooks
from fdk_formats.readers.checkpoint import Checkpoint
from fdk_formats.safetensors_file import check_bools, open_safetensors, open_shards, read_tensor
from fdk_formats.stored_weight import weight_of
from fdk_formats.tensor import CanonicalWeight
from fdk_formats.untrusted import check_shape, parse_json_object

VERSION = "1"
VERSION_KEY = "fdk.version"
WEIGHTS_KEY = "fdk.weights"
ALIASES_KEY = "fdk.aliases"
RESERVED_PREFIX = "fdk."

# The dtypes that every supported version of safetensors holds; others are refused.
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


# Tensors


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, CanonicalWeight | Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes quantised weights and plain tensors to one file, atomically.

    The data goes to a temporary file in the same folder, whose header is read back, which is
    flushed to disk and then renamed: a reader sees the old file or the new one, and a save that
    fails leaves the old one. The same tensors give the same bytes. Two names of one tensor (tied
    weights) are stored once and load as one object. docs/guide/files.md has what happens to links,
    owners and modes.

    Args:
        path: the file to write or replace.
        tensors: weights and tensors by name.
        metadata: strings of the caller, see ``load_metadata``.

    Raises:
        TypeError: if a value is not a tensor or QuantisedTensor, its dtype or layout is one that
            safetensors does not hold, or metadata are not strings.
        ValueError: if a name collides with a tensor of a weight, a metadata key begins with
            ``fdk.``, the values of a weight are outside the valid range (see
            ``QuantisedTensor.check_values``), a bool has another byte than 0 or 1, the header could
            not be read back (a name or a string with a lone surrogate, more than 100 MB) or
            ``path`` is a FIFO, device or socket.
        IsADirectoryError: if ``path`` is a folder.
        OSError: if the file cannot be written.

    Example:
        >>> save("layer.safetensors", {"weight": quantise(torch.randn(8, 64), "int4-g64")})
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"save: wanted a mapping of names to tensors, got {type(tensors).__name__}")
    _save(path, tensors, metadata, {})


def _save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, CanonicalWeight | Tensor],
    metadata: Mapping[str, str] | None,
    more: Mapping[str, Tensor],
) -> None:
    target = Path(os.path.realpath(path))
    stored, aliases = _split_aliases(tensors)
    entries = _flatten(stored) | dict(more)
    for name in aliases:
        _check_free(name, entries)
    weights = {
        name: (value.format, value.shape)
        for name, value in stored.items()
        if isinstance(value, CanonicalWeight)
    }
    all_metadata = _check_metadata(metadata or {}) | weights_metadata(weights, aliases)
    with atomic_write(target) as file:
        _write(file, path, entries, all_metadata)


def weights_metadata(
    weights: Mapping[str, tuple[Format, tuple[int, ...]]], aliases: Mapping[str, str]
) -> dict[str, str]:
    """Makes the metadata that explain a file's tensors, for writers of their own.

    Args:
        weights: format and shape of each quantised weight by name. Shards of one model have the
            same metadata: all weights.
        aliases: for each further name of a weight or a tensor, the name under which it is stored.
    """
    entries = {
        name: {"format": str(format), "shape": list(shape)}
        for name, (format, shape) in weights.items()
    }
    return {
        VERSION_KEY: VERSION,
        WEIGHTS_KEY: json.dumps(entries),
        ALIASES_KEY: json.dumps(dict(aliases)),
    }


def stored_weights(
    paths: Sequence[str | os.PathLike[str]],
) -> tuple[dict[str, tuple[Format, tuple[int, ...]]], dict[str, str], set[str]]:
    """Reads which weights the shards of a model hold, without their tensors.

    Args:
        paths: the files of one model.

    Returns:
        Format and shape of each weight by name, the aliases, and the names of all tensors.

    Raises:
        ValueError: see ``load``.
    """
    with open_shards(paths) as file:
        metadata = _our_metadata(file.path, file)
        weights = parse_weights(file.path, metadata)
        aliases = _read_json(file.path, metadata, ALIASES_KEY)
        names = set(file.keys())
        for name, (format, _) in weights.items():
            for field in format.tensor_names:
                if f"{name}.{field}" not in names:
                    raise ValueError(
                        f"{file.path}: {name} ({format}) needs the tensor {name}.{field}: missing"
                    )
    for name, target in aliases.items():
        if not isinstance(target, str) or (target not in weights and target not in names):
            raise ValueError(
                f"{paths[0]}: damaged metadata: {name} must be a further name of a tensor in the "
                f"file, got {target!r}"
            )
    return weights, aliases, names


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | int = "cpu",
    mmap: bool = True,
) -> dict[str, CanonicalWeight | Tensor]:
    """Reads a file that ``save`` or ``save_model`` wrote, bit for bit.

    Nothing in the file is executed. Every tensor is checked against its format and shape.

    Args:
        path: the file; or the folder of a model that transformers saved with fdk-transformers, or
            ``python -m fdk_formats``, in one file or in shards with an index.
        device: where to put the tensors.
        mmap: True maps the file, as safetensors does: tensors on the CPU are read from it when
            they are used. If it is written into meanwhile they change; if it is truncated the
            process dies of SIGBUS. ``save`` does neither: it replaces the file, and tensors keep
            the old one. False copies the tensors, which then do not depend on the file.

    Returns:
        Weights and tensors by name.

    Raises:
        ValueError: if the file is truncated, damaged, of another project or of an unknown version,
            or no regular file; or if a tensor is missing or has the wrong size, dtype or impossible
            values. The message names the file, the tensor, what was expected and what was found.
        FileNotFoundError: if the file does not exist.
        IsADirectoryError: if the path is a folder without a model.
    """
    with open_shards(_files_of(path)) as file:
        metadata = _our_metadata(path, file)
        weights = parse_weights(path, metadata)
        aliases = _read_json(path, metadata, ALIASES_KEY)
        names = set(file.keys())
        tensors: dict[str, CanonicalWeight | Tensor] = {}
        for name, (format, shape) in weights.items():
            weight, used = _load_weight(path, file, name, format, shape, names, mmap)
            tensors[name] = weight.to(device)
            names -= used
        for name in sorted(names):
            tensor = read_tensor(path, file, name, mmap=mmap)
            if name in tensors:
                if tensor.numel() == 0:  # see ``stopper``
                    continue
                raise ValueError(f"{path}: {name} is both a weight and a plain tensor")
            if tensor.dtype not in SAFETENSORS_DTYPES:
                raise ValueError(f"{path}: {name}: {tensor.dtype} is not a dtype that save writes")
            tensors[name] = tensor.to(device)
    return tensors | _resolve_aliases(path, aliases, tensors)


def _files_of(path: str | os.PathLike[str]) -> Sequence[str | os.PathLike[str]]:
    """Returns the files of a model: one, or those of a folder."""
    folder = Path(path)
    is_model = folder.is_dir() and any(folder.glob("*.safetensors"))
    return Checkpoint(folder).files if is_model else [path]


def load_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Reads the strings that ``save`` was given as ``metadata``.

    Raises:
        ValueError: see ``load``.
    """
    with open_safetensors(path) as file:
        metadata = _our_metadata(path, file)
    return {key: v for key, v in metadata.items() if not key.startswith(RESERVED_PREFIX)}


def _split_aliases(
    tensors: Mapping[str, CanonicalWeight | Tensor],
) -> tuple[dict[str, CanonicalWeight | Tensor], dict[str, str]]:
    """Returns the values to store, and the stored name for each further name of the same memory."""
    stored: dict[str, CanonicalWeight | Tensor] = {}
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


def _memory_key(name: str, value: CanonicalWeight | Tensor) -> object:
    """Returns a key, equal for values that read the same memory the same way; None if empty."""
    if isinstance(value, CanonicalWeight):
        keys = [_memory_key(f"{name}.{field}", t) for field, t in value.tensors().items()]
        return (value.format, value.shape, *keys)
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


def _flatten(stored: Mapping[str, CanonicalWeight | Tensor]) -> dict[str, Tensor]:
    entries: dict[str, Tensor] = {}
    for name, value in stored.items():
        if isinstance(value, Tensor):
            check_bools(f"save: {name}", value)
            tensors = {name: value}
        else:
            value.check_values(f"save: {name}")
            tensors = {f"{name}.{field}": tensor for field, tensor in value.tensors().items()}
        for full_name, tensor in tensors.items():
            _check_free(full_name, entries)
            entries[full_name] = tensor
    return entries


def _check_free(name: str, entries: Mapping[str, Tensor]) -> None:
    if name in entries:
        raise ValueError(
            f"save: {name} is used twice: a weight x is stored as x.packed, x.scale, x.codebook "
            "and x.zero_point, and no other tensor may have such a name"
        )


def _check_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"save: metadata must be strings, got {key!r}: {value!r}")
        if key.startswith(RESERVED_PREFIX):
            raise ValueError(
                f"save: metadata keys with {RESERVED_PREFIX!r} are reserved, got {key!r}"
            )
    return dict(metadata)


def _write(
    file: IO[bytes],
    path: str | os.PathLike[str],
    entries: Mapping[str, Tensor],
    metadata: Mapping[str, str],
) -> None:
    # safetensors.torch.save_file changes the order of the metadata from run to run and refuses
    # tensors that share memory. Wide dtypes come first, so that every tensor is aligned.
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
    file.flush()
    # Gigabytes of data follow: the header is read back before them, from a file of holes.
    file.truncate(file.tell() + end)
    _read_back(file.name, path, header)
    for name in order:
        data = entries[name].detach().cpu().resolve_neg().contiguous()
        # A tensor of one element counts as contiguous with any stride, which a view would keep.
        data = data.as_strided((data.numel(),), (1,))
        file.write(data.view(torch.uint8).numpy().data)


def _read_back(
    written: str, path: str | os.PathLike[str], header: Mapping[str, Mapping[str, Any]]
) -> None:
    """Reads a header as ``load`` does; raises ValueError unless it is the header given."""
    where = f"save: {path}: the header cannot be read back, nothing was replaced"
    try:
        with open_safetensors(written) as file:
            metadata = _our_metadata(where, file)
            parse_weights(where, metadata)
            _read_json(where, metadata, ALIASES_KEY)
            found: dict[str, dict[str, Any]] = {"__metadata__": metadata}
            for name in file.keys():  # noqa: SIM118 (no mapping)
                entry = file.get_slice(name)
                found[name] = {"dtype": entry.get_dtype(), "shape": list(entry.get_shape())}
    except ValueError as error:
        reason = str(error).removeprefix(f"{written}: ").removeprefix(f"{where}: ")
        raise ValueError(f"{where}: {reason}") from error
    wanted = {
        name: {key: value for key, value in entry.items() if key != "data_offsets"}
        for name, entry in header.items()
    }
    if found != wanted:
        raise ValueError(f"{where}: it reads as other names, dtypes, shapes or metadata")


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
    if key not in metadata:
        raise ValueError(f"{path}: damaged metadata: {key} is missing")
    return parse_json_object(metadata[key], f"{path}: damaged metadata: {key}")


def _load_weight(
    path: str | os.PathLike[str],
    file: Any,
    name: str,
    format: Format,
    shape: tuple[int, ...],
    names: set[str],
    mmap: bool,
) -> tuple[CanonicalWeight, set[str]]:
    """Reads a weight; returns it and the names of its tensors in the file."""
    full_names = {field: f"{name}.{field}" for field in format.tensor_names}
    for full_name in full_names.values():
        if full_name not in names:
            raise ValueError(f"{path}: {name} ({format}) needs the tensor {full_name}: missing")
    tensors = {
        field: read_tensor(path, file, full_name, mmap=mmap)
        for field, full_name in full_names.items()
    }
    try:
        weight = weight_of(format, shape, tensors)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {name}: {error}") from error
    weight.check_values(f"{path}: {name}")
    return weight, set(full_names.values())


def parse_weights(
    path: str | os.PathLike[str], metadata: Mapping[str, str]
) -> dict[str, tuple[Format, tuple[int, ...]]]:
    """Returns format and shape of each weight by name, from the metadata of a file.

    Args:
        path: the file, for messages.
        metadata: strings by key.

    Raises:
        ValueError: if the entry is missing or damaged.
    """
    entries = _read_json(path, metadata, WEIGHTS_KEY)
    return {name: _parse_entry(path, name, entry) for name, entry in entries.items()}


def _parse_entry(
    path: str | os.PathLike[str], name: str, entry: Any
) -> tuple[Format, tuple[int, ...]]:
    if not isinstance(entry, dict) or not {"format", "shape"} <= entry.keys():
        raise ValueError(
            f"{path}: damaged metadata: {name} must have a format and a shape, got {entry!r}"
        )
    try:
        format = Format.parse(entry["format"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged metadata: {name}: {error}") from error
    where = f"{path}: damaged metadata: the shape of {name}"
    given = entry["shape"]
    # Two sizes of a weight, or three of a stack of experts.
    ndim = 3 if isinstance(given, list) and len(given) == 3 else 2
    shape = check_shape(where, given, ndim=ndim, low=0)
    for what, size in (("k", shape[-1]), *([("experts", shape[0])] if ndim == 3 else [])):
        if size == 0:
            raise ValueError(f"{where} must have {what} of 1 or more, got {list(shape)}")
    return format, shape


def _resolve_aliases(
    path: str | os.PathLike[str],
    aliases: Mapping[str, Any],
    tensors: Mapping[str, CanonicalWeight | Tensor],
) -> dict[str, CanonicalWeight | Tensor]:
    tied: dict[str, CanonicalWeight | Tensor] = {}
    for name, target in aliases.items():
        if not isinstance(target, str) or target not in tensors or name in tensors:
            raise ValueError(
                f"{path}: damaged metadata: {name} must be a further name of a tensor in the "
                f"file, got {target!r}"
            )
        tied[name] = tensors[target]
    return tied


def _check_dtypes(where: str, model: nn.Module, plain: Mapping[str, Tensor]) -> None:
    """Raises ValueError where a tensor is not of the kind of the model's.

    Floating tensors are cast to each other's dtypes. Integers and bools are not made floats, nor
    floats integers: ``True`` would become a weight of 1.0. Integers keep their width.
    """
    own = dict(_named_tensors(model))
    for name, tensor in plain.items():
        if name not in own or tensor.dtype == own[name].dtype:
            continue
        if not (tensor.is_floating_point() and own[name].is_floating_point()):
            raise ValueError(
                f"{where}: {name} must be {own[name].dtype} as in the model, got {tensor.dtype}; "
                "only floating tensors are cast"
            )


# Models


def save_model(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    metadata: Mapping[str, str] | None = None,
    for_folder: bool = False,
) -> None:
    """Writes a model: quantised weights, other parameters, all buffers and extra state.

    A quantised layer ``x`` is stored as the weight ``x.weight`` and the tensor ``x.bias``,
    whatever its backend. Tied weights are stored once.

    Args:
        path: the file to write or replace.
        model: result of ``quantise_model`` or ``load_model``.
        metadata: strings of the caller.
        for_folder: True for a file of a Hugging Face folder, see ``stopper``.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: see ``save``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"save_model: model must be a module, got {type(model).__name__}")
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = {name: m for name, m in modules.items() if isinstance(m, QuantisedModule)}
    stored = {layer.stored for layer in layers.values()}
    quantised = {weight: weight.quantised() for weight in stored}
    tensors: dict[str, CanonicalWeight | Tensor] = {
        f"{name}.weight".removeprefix("."): quantised[layer.stored]
        for name, layer in layers.items()
    }
    own = {
        f"{name}.{parameter}".removeprefix(".")
        for name, layer in layers.items()
        for parameter in layer.weight_names
    }
    # state_dict would unpack every weight again, and omits non-persistent buffers (rotary
    # frequencies), which a model on meta cannot restore otherwise.
    tensors |= {name: value.detach() for name, value in _named_tensors(model) if name not in own}
    for name, module in modules.items():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            tensors[f"{name}._extra_state".removeprefix(".")] = module.get_extra_state()
    weights = [name for name, value in tensors.items() if isinstance(value, CanonicalWeight)]
    _save(path, tensors, metadata, stopper(weights) if for_folder else {})


def stopper(weights: Sequence[str]) -> dict[str, Tensor]:
    """Returns the tensor that stops loaders which do not know the format.

    transformers without fdk-transformers would warn that weights are missing, and make them up. It
    refuses a file in which a weight has another size than in the model: this one is empty.

    Args:
        weights: names of the quantised weights of a file.
    """
    return {name: torch.empty(0, dtype=torch.uint8) for name in weights[:1]}


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Builds models with their parameters on the meta device and real buffers.

    For ``load_model`` with a model too large to build in full. ``torch.device("meta")`` would put
    the buffers on meta too, and those that no file holds (rotary frequencies) would be lost.
    Parameters are allocated one at a time before they go to meta; those of ``nn.Linear`` and
    ``nn.Embedding`` are never written. Modules that other threads build meanwhile are affected too.

    Example:
        >>> with parameters_on_meta():
        ...     skeleton = AutoModelForCausalLM.from_config(config)
        >>> model = load_model("model.safetensors", skeleton)
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        # A parameter on meta may be tied and is kept; subclasses handle their own storage.
        if type(parameter) is not nn.Parameter or parameter.device.type == "meta":
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    # torch's annotation omits that such a hook may return a replacement.
    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def load_model(
    source: str | os.PathLike[str] | Mapping[str, CanonicalWeight | Tensor],
    model: nn.Module,
    backend: str = "auto",
    *,
    device: torch.device | str | int | None = None,
    activations: str = "float",
    fuse: bool | Sequence[Sequence[str]] = False,
    mmap: bool = True,
) -> nn.Module:
    """Returns a copy of a model with the quantised layers and tensors of a file or a mapping.

    Args:
        source: the path of a file of ``save_model`` or ``save``; or tensors by name, as
            ``fdk_formats.readers`` return them: a QuantisedTensor ``x.weight`` for each quantised
            layer ``x``, tensors for the rest. Tied parameters may have one name or each their own.
        model: the same architecture, not quantised, in the dtype of the result. It may be on the
            meta device, which costs no memory; for buffers that the source does not hold see
            ``parameters_on_meta``. It is left untouched.
        backend: see ``select``.
        device: where to put the result. None is the device of the model, or the CPU for meta.
        activations: ``int8`` rounds the input of every quantised layer to 8 bits, see
            ``fdk_formats.int8``. Files do not record it.
        fuse: compute layers of one input as one product, see ``fuse_layers``. True is q_proj,
            k_proj and v_proj, and gate_proj and up_proj. Files do not record it.
        mmap: see ``load``: False copies what it reads from a file. It has no effect on a mapping.

    Raises:
        ValueError: if the file is damaged (see ``load``) or does not fit the model, naming the
            tensors that are missing, unexpected, of another shape or of another kind of dtype; if a
            layer's ``forward`` is patched or it holds more than its weight and bias; if a patched
            ``forward`` would go on to call modules of ``model``; or if ``fuse`` is malformed.
        TypeError: if ``model`` is not a module, or a value of a mapping not a tensor.
        NoBackendError: if no backend supports a layer.

    Example:
        >>> model = load_model("model.safetensors", build_model())
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"load_model: model must be a module, got {type(model).__name__}")
    groups = checked_groups(fuse)
    if device is None:
        first = next(model.parameters(), None)
        device = "cpu" if first is None or first.device.type == "meta" else first.device
    if isinstance(source, Mapping):
        where, tensors = "load_model", _copied(source, device)
    else:
        where, tensors = os.fspath(source), load(source, device=device, mmap=mmap)
    plain = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    settings = {"backend": backend, "activations": activations}
    owners: dict[int, QuantisedModule] = {}
    memo: dict[int, Any] = {}
    replaced: list[tuple[Any, QuantisedModule]] = []
    check_patches("load_model", model, None, remedy="patch the result")
    sources = dict(layers_and_projections(model, remove_duplicate=False))
    experts: dict[int, dict[str, Any]] = {}  # projections made, by id of their module
    for name, q in tensors.items():
        if isinstance(q, Tensor):
            continue
        linear: Any = _layer_for(where, sources, name, q)
        check_source(where, name.removesuffix(".weight"), linear)
        try:
            layer = quantised_like(linear, q, None, linear.weight.dtype, settings)
        except ValueError as error:
            raise ValueError(f"{where}: {name}: {error}") from None
        permutation = plain.pop(f"{name.removesuffix('weight')}input_permutation", None)
        if permutation is not None and isinstance(layer, QuantisedLinear):
            try:
                layer.permute_inputs(permutation)
            except ValueError as error:
                raise ValueError(f"{where}: {name}: {error}") from None
        bias = getattr(linear, "bias", None)
        if bias is not None:  # a placeholder, which load_state_dict fills; keep shared ones shared
            layer.bias = memo.setdefault(id(bias), copy.deepcopy(bias))
        owner = owners.setdefault(id(q), layer)
        if owner is not layer and type(owner) is type(layer):
            layer.tie_weight(owner)
        memo[id(linear)] = layer.train(linear.training)
        if isinstance(linear, ExpertLinear):
            experts.setdefault(id(linear.owner[0]), {})[linear.name] = layer
        else:
            replaced.append((linear, layer))
    mixtures = list({id(m): m for m in sources.values() if id(m) in experts}.values())
    memo |= {id(module): experts_like(module, experts[id(module)]) for module in mixtures}
    for module in mixtures:
        memo[id(module)].take_over(module, memo)
        replaced.append((module, memo[id(module)]))
    for linear, layer in replaced:
        carry_over(linear, layer, memo)
    result: nn.Module = copy.deepcopy(model, memo)
    ties = _ties(result)
    plain = _fill_ties(ties, plain)
    _check_dtypes(where, result, plain)
    plain = _cast_like(result, _unshare(result, plain))
    quantised = {
        f"{name}_{field}"
        for name, q in tensors.items()
        if isinstance(q, CanonicalWeight)
        for field in q.format.tensor_names
    }
    quantised |= {name for name in tensors if name.endswith("input_permutation")} - plain.keys()
    _load_buffers(result, plain, plain.keys() - model.state_dict().keys())
    _load_plain(where, result, plain, quantised)
    for first_name, *names in ties:
        parameter = result.get_parameter(first_name)
        for name in names:
            parent, _, attribute = name.rpartition(".")
            setattr(result.get_submodule(parent), attribute, parameter)
    result = result.to(device)
    fuse_layers(result, groups)
    call_model_hooks(result)
    return result


def _copied(
    given: Mapping[str, CanonicalWeight | Tensor], device: torch.device | str | int
) -> dict[str, CanonicalWeight | Tensor]:
    """Moves tensors to a device; copies plain ones, which the model may go on to train."""
    copies: dict[int, CanonicalWeight | Tensor] = {}  # two names of one tensor stay one tensor
    for name, value in given.items():
        if not isinstance(value, CanonicalWeight | Tensor):
            raise TypeError(
                f"load_model: {name} must be a QuantisedTensor or a tensor, "
                f"got {type(value).__name__}"
            )
        if id(value) not in copies:
            if isinstance(value, Tensor):
                copies[id(value)] = value.detach().to(device, copy=True)
            else:
                copies[id(value)] = value.to(device)
    return {name: copies[id(value)] for name, value in given.items()}


def _layer_for(
    where: str, sources: Mapping[str, nn.Module], name: str, q: CanonicalWeight
) -> nn.Module:
    """Returns the layer of a model that a quantised weight replaces."""
    parent = name.removesuffix(".weight") if name != "weight" else ""
    if parent not in sources:
        raise ValueError(f"{where}: {name}: the model has no layer {parent!r}")
    module = sources[parent]
    shape = None if kind_of(module) is None else tuple(matrix_of(module).shape)
    if shape != q.shape:
        raise ValueError(
            f"{where}: {name} needs a Linear, Embedding, Conv1D or experts of weight "
            f"{list(q.shape)}, the model has {type(module).__name__} "
            f"{'' if shape is None else list(shape)}"
        )
    return module


def _fill_ties(ties: Sequence[Sequence[str]], plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adds missing names of tied parameters: other projects store only one of them."""
    filled = dict(plain)
    for names in ties:
        if found := [plain[name] for name in names if name in plain]:
            filled |= {name: found[0] for name in names if name not in plain}
    return filled


def _unshare(model: nn.Module, plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies a tensor of the file for each further parameter of the model that uses it."""
    own = {name: id(tensor) for name, tensor in _named_tensors(model)}
    owners: dict[int, int | str] = {}
    unshared = {}
    for name, tensor in plain.items():
        owner = own.get(name, name)
        is_first = owners.setdefault(id(tensor), owner) == owner
        unshared[name] = tensor if is_first else tensor.clone()
    return unshared


def _cast_like(model: nn.Module, plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Casts floating tensors to the dtypes of the model's."""
    own = _named_tensors(model)
    dtypes = {name: tensor.dtype for name, tensor in own if tensor.is_floating_point()}
    return {
        name: tensor.to(dtypes[name]) if name in dtypes and tensor.is_floating_point() else tensor
        for name, tensor in plain.items()
    }


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters and buffers under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _load_buffers(model: nn.Module, plain: dict[str, Tensor], beyond_state_dict: set[str]) -> None:
    """Moves buffers that ``load_state_dict`` does not handle from ``plain`` to the model."""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for name in buffers & beyond_state_dict:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, plain.pop(name))


def _load_plain(
    where: str, model: nn.Module, plain: dict[str, Tensor], quantised: set[str]
) -> None:
    try:
        # A model on meta has no memory to copy into.
        keys = model.load_state_dict(plain, strict=False, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{where}: does not fit the model: {error}") from None
    missing = [key for key in keys.missing_keys if key not in quantised]
    if missing or keys.unexpected_keys:
        raise ValueError(
            f"{where}: does not fit the model: missing {', '.join(missing) or 'nothing'}; "
            f"unexpected {', '.join(keys.unexpected_keys) or 'nothing'}"
        )
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if left := [name for name, tensor in tensors if tensor.device.type == "meta"]:
        raise ValueError(
            f"{where}: holds no {', '.join(left)}, which the model has on the meta device only; "
            f"build the model under fdk_formats.parameters_on_meta(), whose buffers are real"
        )


def _ties(model: nn.Module) -> list[list[str]]:
    """Returns the names of each tied parameter, which assigning tensors would untie."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]
