"""A folder of safetensors files, read lazily: tensors by name and the weights among them."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fdk_formats.tensor import QuantisedTensor

INDEX = "model.safetensors.index.json"

Reader = Callable[[Mapping[str, Tensor]], Mapping[str, QuantisedTensor | Tensor]]


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of every ``*.safetensors`` in a folder, read from disk on access.

    Raises:
        FileNotFoundError: if the folder, its safetensors files or a file in its index is missing.
        ValueError: if a file or the index is damaged, or two files have the same tensor.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        paths = sorted(self.folder.glob("*.safetensors"))
        listed = self.config(INDEX, "weight_map").values()
        for name in listed:
            if not isinstance(name, str):
                got = type(name).__name__
                raise ValueError(
                    f"{self.folder / INDEX}: weight_map must hold names of files, got {got}"
                )
        missing = set(listed) - {path.name for path in paths}
        if missing or not paths:
            what = ", ".join(sorted(missing)) or "*.safetensors"
            raise FileNotFoundError(f"{self.folder}: no {what} in this folder")
        self._paths: dict[str, Path] = {}
        for path in paths:
            for name in self._names(path):
                if name in self._paths:
                    raise ValueError(f"{name} is both in {self._paths[name]} and in {path}")
                self._paths[name] = path

    def _names(self, path: Path) -> list[str]:
        try:
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        except SafetensorError as error:
            raise ValueError(f"{path}: truncated or no safetensors file: {error}") from error

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._paths[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def config(self, name: str, key: str | None = None) -> dict[str, Any]:
        """Reads a JSON file of the folder, or its entry ``key``; empty if there is none.

        Raises:
            ValueError: if it is not a JSON object.
        """
        path = self.folder / name
        if not path.exists():
            return {}
        try:
            value = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: no JSON: {error}") from error
        where = str(path)
        if isinstance(value, dict) and key is not None:
            where, value = f"{path}: {key}", value.get(key, {})
        if not isinstance(value, dict):
            raise ValueError(f"{where}: wanted a JSON object, got {type(value).__name__}")
        return value

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
