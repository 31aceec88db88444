"""A folder of safetensors files, read lazily: tensors by name and the weights among them."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fdk_formats.safetensors_file import open_safetensors, read_tensor
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.untrusted import parse_json_object, read_file

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"

Reader = Callable[[Mapping[str, Tensor]], Mapping[str, QuantisedTensor | Tensor]]


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a folder, read from disk on access.

    A folder with an index (``model.safetensors.index.json``) holds what the index names, and other
    safetensors files in it are left alone, such as an adapter or the same weights in one file.
    transformers reads such folders likewise, but takes a tensor that a listed file holds and the
    index does not name; here it is an error, because index and files are then of two checkpoints.
    Without an index the folder is its ``model.safetensors``, else all of its safetensors files.

    Args:
        folder: the folder.
        mmap: see ``fdk_formats.load``: False copies the tensors.

    Raises:
        FileNotFoundError: if the folder, its safetensors files or a file in its index is missing.
        ValueError: if a file or the index is damaged or no regular file; if the index names no
            tensor, a tensor that its file does not hold, or a file outside the folder; if a file
            holds a tensor that the index does not place there; or if two files have the same
            tensor.
    """

    def __init__(self, folder: str | os.PathLike[str], *, mmap: bool = True) -> None:
        self.folder, self.mmap = Path(folder), mmap
        if (self.folder / INDEX).exists():
            self._paths = self._indexed()
            return
        paths = sorted(self.folder.glob("*.safetensors"))
        whole = self.folder / WHOLE
        if whole in paths:
            paths = [whole]
        if not paths:
            raise FileNotFoundError(f"{self.folder}: no *.safetensors in this folder")
        self._paths = {}
        for path in paths:
            for name in self._names(path):
                if name in self._paths:
                    raise ValueError(f"{name} is both in {self._paths[name]} and in {path}")
                self._paths[name] = path

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors."""
        return sorted(set(self._paths.values()))

    def _indexed(self) -> dict[str, Path]:
        """Returns the file of each tensor that the index names, after looking into the files."""
        index = self.folder / INDEX
        weight_map = self.config(INDEX, "weight_map")
        if not weight_map:
            raise ValueError(f"{index}: weight_map must name a tensor, names none")
        for file in weight_map.values():
            if not isinstance(file, str):
                got = type(file).__name__
                raise ValueError(f"{index}: weight_map must hold names of files, got {got}")
            if file != os.path.basename(file) or file in ("", ".", ".."):
                raise ValueError(f"{index}: weight_map must name files in its folder, got {file!r}")
        files = sorted(set(weight_map.values()))
        if missing := [file for file in files if not os.path.exists(self.folder / file)]:
            raise FileNotFoundError(f"{self.folder}: no {', '.join(missing)} in this folder")
        held = {file: set(self._names(self.folder / file)) for file in files}
        if absent := [name for name, file in weight_map.items() if name not in held[file]]:
            name = absent[0]
            raise ValueError(
                f"{index}: weight_map places {name} in {weight_map[name]}, which does not hold it "
                f"({len(absent)} such tensors)"
            )
        for file in files:
            if extra := sorted(name for name in held[file] if weight_map.get(name) != file):
                raise ValueError(
                    f"{self.folder / file}: holds {extra[0]}, which the index {INDEX} does not "
                    f"place there ({len(extra)} such tensors); add it to weight_map, or remove the "
                    "index to read every file"
                )
        return {name: self.folder / file for name, file in weight_map.items()}

    def _names(self, path: Path) -> list[str]:
        with self._opened(path) as file:
            return list(file.keys())

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[Any]:
        try:
            with open_safetensors(path) as file:
                yield file
        except IsADirectoryError as error:
            raise ValueError(str(error)) from None

    def __getitem__(self, name: str) -> Tensor:
        path = self._paths[name]
        with self._opened(path) as file:
            return read_tensor(path, file, name, mmap=self.mmap)

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def config(self, name: str, key: str | None = None) -> dict[str, Any]:
        """Reads a JSON file of the folder, or its entry ``key``; empty if there is none.

        Numbers may be NaN or infinite, as in configurations of transformers.

        Raises:
            ValueError: if it is not a JSON object, see ``parse_json_object``.
        """
        path = self.folder / name
        try:
            value = parse_json_object(read_file(path), str(path), allow_infinity=True)
        except FileNotFoundError:
            return {}
        if key is None:
            return value
        entry = value.get(key, {})
        if not isinstance(entry, dict):
            raise ValueError(f"{path}: {key} must be a JSON object, got {type(entry).__name__}")
        return entry

    def read_weights(self, marker: str, read: Reader) -> dict[str, QuantisedTensor | Tensor]:
        """Reads every quantised weight; returns them with the other tensors.

        A tensor named ``x`` + ``marker`` marks the weight ``x.weight``. The tensors that ``read``
        accesses are replaced by those it returns; others below ``x.``, such as a bias, are kept.

        Args:
            marker: end of the name, such as ``.qweight``.
            read: converts the tensors below ``x.``, both by the rest of their names.

        Raises:
            ValueError: if there is no such weight, or ``read`` raises, naming the weight.
        """
        prefixes = [name.removesuffix(marker) for name in self if name.endswith(marker)]
        if not prefixes:
            raise ValueError(f"{self.folder}: no tensor is called <name>{marker}")
        weights: dict[str, QuantisedTensor | Tensor] = {}
        used: set[str] = set()
        for prefix in prefixes:
            below = _TensorsBelow(self, f"{prefix}.")
            try:
                weights |= {f"{prefix}.{name}": value for name, value in read(below).items()}
            except KeyError as error:
                raise ValueError(
                    f"{self.folder}: {prefix} needs the tensor {prefix}.{error.args[0]}: missing"
                ) from error
            except (TypeError, ValueError) as error:
                raise ValueError(f"{self.folder}: {prefix}: {error}") from error
            used |= below.used
        if twice := [name for name in self if name in weights and name not in used]:
            raise ValueError(
                f"{self.folder}: {twice[0]} is stored twice: quantised (by its {marker}) and plain"
            )
        return weights | {name: self[name] for name in self if name not in used}


class _TensorsBelow(Mapping[str, Tensor]):
    """The tensors of a checkpoint below a prefix, and which of them were accessed."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.checkpoint, self.prefix = checkpoint, prefix
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        full_name = self.prefix + name
        if full_name not in self.checkpoint._paths:
            raise KeyError(name)
        self.used.add(full_name)
        return self.checkpoint[full_name]

    def __iter__(self) -> Iterator[str]:
        names = (name for name in self.checkpoint if name.startswith(self.prefix))
        return (name.removeprefix(self.prefix) for name in names)

    def __len__(self) -> int:
        return sum(1 for _ in self)
