"""The container of a GGUF file: its metadata and where its tensors are, all sizes checked.

The layout is described in ggml's docs/gguf.md. The package gguf reads trusted files: its reader
takes counts and lengths from the file unchecked (a count of 2^60 loops, a cut file is an
IndexError) and keeps four arrays per token of a vocabulary.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from fdk_formats.untrusted import check_int

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"

# Types of metadata values by number: the code of `struct` and of numpy for numbers.
NUMBERS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f"))) | {10: "Q", 11: "q", 12: "d"}
BOOL, TEXT, ARRAY = 7, 8, 9

# Types of tensors by number: name, weights in a block, bytes of a block.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file, not read yet.

    Attributes:
        name: its name in the file.
        type: the name of its type, such as ``Q4_K``.
        shape: sizes, outermost first as in torch; rows are whole blocks.
        start: its first byte in the file.
        nbytes: its bytes.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def read(self, file: BinaryIO) -> Tensor:
        """Reads its bytes, ``[nbytes, uint8]``.

        Raises:
            ValueError: if the file has been cut since its header was read.
        """
        file.seek(self.start)
        data = bytearray(self.nbytes)
        count = file.readinto(data)  # type: ignore[attr-defined]
        if count != self.nbytes:
            raise ValueError(f"{self.name}: wanted {self.nbytes} bytes, the file has {count}")
        return torch.frombuffer(data, dtype=torch.uint8)


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says before its data.

    Attributes:
        metadata: numbers and strings by key, arrays of numbers as numpy arrays; None for arrays of
            strings (the vocabulary), which are checked and skipped.
        tensors: the tensors in the order of the file.
    """

    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_header(file: BinaryIO) -> GgufHeader:
    """Reads the header of a GGUF file of version 2 or 3, little-endian.

    No count or length is used before the file is known to be that long, and no two tensors share
    bytes, so that what is read is never more than the file.

    Args:
        file: the file, seekable.

    Raises:
        ValueError: if it is not such a file, truncated or malformed.
    """
    size = file.seek(0, 2)
    file.seek(0)
    cursor = _Cursor(file, size)
    if size < len(MAGIC) or cursor.take(len(MAGIC), "the magic") != MAGIC:
        raise ValueError("no GGUF file: it does not begin with GGUF")
    version = cursor.number("I", "version")
    if version not in VERSIONS:
        big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        hint = " (big-endian: convert it first)" if big_endian else ""
        raise ValueError(f"GGUF version must be 2 or 3, got {version}{hint}")
    tensor_count = cursor.number("Q", "tensor_count")
    metadata_count = cursor.number("Q", "metadata_kv_count")
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise ValueError(f"metadata key {key!r} occurs twice")
        metadata[key] = _value(cursor, key, cursor.number("I", key), 0)
    alignment = check_int(ALIGNMENT_KEY, metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT), low=1)
    if alignment % 8:
        raise ValueError(f"{ALIGNMENT_KEY} must be a multiple of 8, got {alignment!r}")
    places: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for _ in range(tensor_count):
        name = cursor.text("the name of a tensor")
        if not name or name in places:
            what = "occurs twice" if name else "is empty"
            raise ValueError(f"the tensor name {name!r} {what}")
        places[name] = _place(cursor, name, alignment)
    base = -(-cursor.at // alignment) * alignment
    tensors = tuple(
        GgufTensor(name, type, shape, base + offset, nbytes)
        for name, (type, shape, offset, nbytes) in places.items()
    )
    _check_places(tensors, size)
    return GgufHeader(metadata, tensors)


class _Cursor:
    """A position in a file; nothing beyond the file's size is asked for."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size, self.at = file, size, 0

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.at:
            raise ValueError(
                f"truncated or damaged: {what} is {count} bytes at {self.at}, "
                f"the file has {self.size}"
            )
        data = self.file.read(count)
        if len(data) != count:
            raise ValueError(f"truncated: {what} is {count} bytes, the file has {len(data)} more")
        self.at += count
        return data

    def number(self, code: str, what: str) -> Any:
        """Reads a number of the struct code."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def text(self, what: str) -> str:
        data = self.take(self.number("Q", what), what)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} is no UTF-8: {error}") from error


def _value(cursor: _Cursor, key: str, kind: int, depth: int) -> Any:
    if kind in NUMBERS:
        return cursor.number(NUMBERS[kind], key)
    if kind == BOOL:
        return bool(cursor.number("B", key))
    if kind == TEXT:
        return cursor.text(key)
    if kind != ARRAY or depth == MAX_ARRAY_DEPTH:
        deep = f", arrays {depth} deep" if kind == ARRAY else ""
        raise ValueError(f"metadata {key!r} has the unknown type {kind}{deep}")
    item, count = cursor.number("I", key), cursor.number("Q", key)
    code = "?" if item == BOOL else NUMBERS.get(item)
    if code is not None:
        data = cursor.take(count * struct.calcsize(f"<{code}"), key)
        return np.frombuffer(data, dtype=np.dtype(code).newbyteorder("<"))
    # Each element takes 8 bytes or more, so that a false count ends at the end of the file.
    for _ in range(count):
        if item == TEXT:
            cursor.take(cursor.number("Q", key), key)
        else:
            _value(cursor, key, item, depth + 1)
    return None


def _place(cursor: _Cursor, name: str, alignment: int) -> tuple[str, tuple[int, ...], int, int]:
    """Reads a tensor's type, shape, offset in the data and size in bytes."""
    dimensions = cursor.number("I", name)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"{name} must have 1 to {MAX_DIMENSIONS} dimensions, got {dimensions}")
    sizes = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions, name))
    number, offset = cursor.number("I", name), cursor.number("Q", name)
    if number not in TENSOR_TYPES:
        raise ValueError(f"{name} has the unknown tensor type {number}")
    type, block, nbytes = TENSOR_TYPES[number]
    shape = tuple(reversed(sizes))
    if min(shape) < 1 or shape[-1] % block:
        raise ValueError(
            f"{name} ({type}) must have sizes of 1 or more and rows of a multiple of {block}, "
            f"got {list(shape)}"
        )
    if offset % alignment:
        raise ValueError(f"{name}: offset must be a multiple of {alignment}, got {offset}")
    return type, shape, offset, math.prod(shape) // block * nbytes


def _check_places(tensors: tuple[GgufTensor, ...], size: int) -> None:
    """Checks that each tensor is in the file and that none overlap."""
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        if tensor.start < end:
            raise ValueError(f"{before} and {tensor.name} overlap at byte {tensor.start}")
        end, before = tensor.start + tensor.nbytes, tensor.name
        if end > size:
            raise ValueError(
                f"truncated or damaged: {tensor.name} ({tensor.type} {list(tensor.shape)}) ends at "
                f"byte {end}, the file has {size}"
            )
