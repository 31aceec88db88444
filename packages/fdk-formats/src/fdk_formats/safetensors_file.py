"""Safetensors files: opened and read with every damage reported as a ValueError."""

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fdk_formats.untrusted import check_shape, file_kind


@contextlib.contextmanager
def open_safetensors(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Opens a safetensors file; yields what ``safetensors.safe_open`` does.

    Raises:
        ValueError: if it is truncated or damaged, or no regular file.
        IsADirectoryError: if it is a folder.
        OSError: if it is missing or cannot be read.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{path}: wanted a file, got a folder")
    if not stat.S_ISREG(mode):  # safe_open would wait for a FIFO
        raise ValueError(f"{path}: wanted a regular file, got {file_kind(mode)}")
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path}: truncated or no safetensors file: {error}") from error


class Shards:
    """The tensors of several open safetensors files, read as from one.

    Args:
        files: the open files by path. Their metadata are the same.

    Raises:
        ValueError: if two files have a tensor of one name, or other metadata.
    """

    def __init__(self, files: dict[Path, Any]) -> None:
        self.path = next(iter(files))
        self._metadata = next(iter(files.values())).metadata()
        self._owners: dict[str, Any] = {}
        for path, file in files.items():
            if file.metadata() != self._metadata:
                raise ValueError(f"{path}: other metadata than {self.path}, of the same model")
            for name in file.keys():  # noqa: SIM118 (no mapping)
                if name in self._owners:
                    raise ValueError(f"{path}: {name} is in another file of the model too")
                self._owners[name] = file

    def metadata(self) -> Any:
        """Returns the metadata of each file."""
        return self._metadata

    def keys(self) -> list[str]:
        """Returns the names of all tensors."""
        return list(self._owners)

    def get_slice(self, name: str) -> Any:
        """Returns what describes a tensor."""
        return self._owners[name].get_slice(name)

    def get_tensor(self, name: str) -> Tensor:
        """Reads a tensor."""
        tensor: Tensor = self._owners[name].get_tensor(name)
        return tensor


@contextlib.contextmanager
def open_shards(paths: Sequence[str | os.PathLike[str]]) -> Iterator[Shards]:
    """Opens the files of one model.

    Raises:
        ValueError: see ``open_safetensors`` and ``Shards``.
    """
    with contextlib.ExitStack() as stack:
        files = {Path(path): stack.enter_context(open_safetensors(path)) for path in paths}
        yield Shards(files)


def read_tensor(path: str | os.PathLike[str], file: Any, name: str, *, mmap: bool) -> Tensor:
    """Reads a tensor of a file that ``open_safetensors`` opened.

    Args:
        path: the file, for messages.
        file: the open file.
        name: a name of ``file.keys()``.
        mmap: True maps the file: the tensor is read from disk when it is used, and changes when
            the file is written into. False copies.

    Raises:
        ValueError: if torch has no such dtype or cannot hold the shape, or a bool is no 0 or 1.
    """
    where = f"{path}: {name}"
    entry = file.get_slice(name)
    shape = entry.get_shape()
    # A size of 0 lets the others be any: torch multiplies them for the strides.
    check_shape(f"{where}: shape", shape, ndim=len(shape), low=0)
    try:
        tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, AttributeError, KeyError, RuntimeError, TypeError) as error:
        # AttributeError: a dtype that this version of torch does not have.
        raise ValueError(f"{where}: cannot be read as {entry.get_dtype()}: {error}") from error
    check_bools(where, tensor)
    return tensor if mmap else tensor.clone()


def check_bools(where: str, tensor: Tensor) -> None:
    """Raises ValueError if a tensor has bools that are neither true nor false.

    torch keeps other bytes than 0 and 1, and each op may read them in its own way.
    """
    if tensor.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
        raise ValueError(f"{where}: a bool must be a byte of 0 or 1, got others")
