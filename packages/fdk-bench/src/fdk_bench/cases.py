"""Cases of the kernel benchmarks: y = x @ W_hat.T for a shape, a format and who computes it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fdk_formats import Format

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Of the linear layers of one block, fused where a server fuses them: (n, k).
MODEL_SHAPES = {
    "llama-1b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    "llama-3b": ((5120, 3072), (3072, 3072), (16384, 3072), (3072, 8192)),
    "llama-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "qwen3-4b": ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)),
    "qwen3-32b": ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),
    "mistral-7b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
}
# The codes and the table are arbitrary: what a k-means format is to a kernel, without fitting one.
DEFAULT_CODEBOOK = "custom"


@dataclass(frozen=True)
class KernelCase:
    """``y = x @ W_hat.T`` with ``x :: [m, k]`` and ``W_hat :: [n, k]``.

    Attributes:
        format: a format's short form, or the name of ``dtype`` for a weight that is not quantised.
        dtype: of x and y, a name of ``DTYPES``.
        device: ``cpu``, ``cuda``.
        backend: ``auto``, a backend's name, or a peer's.
        activations: ``float``, or ``int8`` for x rounded to 8 bits, see ``fdk_formats.int8``.
    """

    m: int
    n: int
    k: int
    format: str
    dtype: str
    device: str
    backend: str
    activations: str = "float"

    def __str__(self) -> str:
        shape = f"m{self.m}-n{self.n}-k{self.k}"
        rounded = "" if self.activations == "float" else f"-{self.activations}"
        return f"{shape}-{self.format}-{self.dtype}{rounded}-{self.device}-{self.backend}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch has it."""
        return DTYPES[self.dtype]

    @property
    def quantised(self) -> Format | None:
        """The format; None for a weight that is not quantised."""
        return None if self.format in DTYPES else Format.parse(self.format)

    @property
    def bits(self) -> int:
        """Bits of a code, or of an element of a weight that is not quantised."""
        format = self.quantised
        return self.torch_dtype.itemsize * 8 if format is None else format.bits

    @property
    def weight_bytes(self) -> int:
        """What the weight takes as a file holds it: codes, scales, zero points, codebook."""
        format = self.quantised
        if format is None:
            return self.n * self.k * self.torch_dtype.itemsize
        row_of_codes = (self.k * format.bits + 7) // 8
        per_group = round((format.bits_per_weight(self.k) - format.bits) * self.group_size)
        groups = self.k // self.group_size
        codebook = 0 if format.is_affine else 4 << format.bits
        return self.n * (row_of_codes + groups * per_group // 8) + codebook

    @property
    def group_size(self) -> int:
        """Weights to a scale; k for whole rows and for a weight that is not quantised."""
        format = self.quantised
        return self.k if format is None else format.group_size_for(self.k)

    @property
    def activation_bytes(self) -> int:
        """x read once and y written once."""
        return self.m * (self.k + self.n) * self.torch_dtype.itemsize

    @property
    def operations(self) -> int:
        """Multiplications and additions of the product; decoding is not counted."""
        return 2 * self.m * self.n * self.k


def formats_of(
    bits: Sequence[int], formats: Sequence[str], group_size: str, dtype: str
) -> list[str]:
    """The formats of a run, each once, widest first; ``dtype`` stands for 16 bits.

    ``formats`` holds codebooks (``int``, ``affine``), which take every width of ``bits``, and
    whole short forms (``nf4-g32``), which stand for themselves.

    Raises:
        ValueError: for text that is no format, a dtype that is not ``dtype``, and widths that
            there are not.
    """
    if wrong := [b for b in bits if b > 8 and b != 16]:
        raise ValueError(f"--bits: wanted 1 to 8, or 16 for no quantisation; got {wrong[0]}")
    suffix = "row" if group_size == "row" else f"g{group_size}"
    found = []
    for text in formats or (DEFAULT_CODEBOOK,):
        if text in DTYPES and text != dtype:
            raise ValueError(f"format {text}: wanted {dtype}, the dtype of x, or a format of codes")
        if text == dtype:
            found.append(text)
        elif re.search(r"\d", text):
            grouped = any(re.fullmatch(r"row|g\d+", part) for part in text.split("-"))
            found.append(_canonical(text if grouped else f"{text}-{suffix}"))
        else:
            found += [_canonical(f"{text}{b}-{suffix}") for b in bits if b != 16]
    if 16 in bits:
        found.append(dtype)
    unique = dict.fromkeys(found)
    width = {name: 16 if name in DTYPES else Format.parse(name).bits for name in unique}
    return sorted(unique, key=lambda name: -width[name])


def _canonical(text: str) -> str:
    try:
        return str(Format.parse(text))
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None


def shapes_of(
    named: Sequence[str], ns: Sequence[int], ks: Sequence[int], default: tuple[int, int]
) -> list[tuple[int, int]]:
    """Shapes (n, k), each once.

    ``named`` holds ``NxK``, names of ``MODEL_SHAPES`` or files of one ``NxK`` a line. Without it,
    every n with every k; without ``ns``, squares of ``ks``.

    Raises:
        ValueError: for text that is none of these.
    """
    found: list[tuple[int, int]] = []
    for text in named:
        found += _shapes_named(text)
    if not named:
        if ns:
            found = [(n, k) for k in ks or (default[1],) for n in ns]
        else:
            found = [(k, k) for k in ks] or [default]
    return list(dict.fromkeys(found))


def _shapes_named(text: str) -> Sequence[tuple[int, int]]:
    """Of a number, of a model, or of each line of a file."""
    models = ", ".join(MODEL_SHAPES)
    if shapes := _shapes_of_word(text):
        return shapes
    if not Path(text).is_file():
        raise ValueError(f"--shapes: wanted NxK, a file of them, or one of {models}; got {text!r}")
    found: list[tuple[int, int]] = []
    for number, line in enumerate(Path(text).read_text(encoding="utf-8").splitlines(), start=1):
        word = line.partition("#")[0].strip()
        if word and not (shapes := _shapes_of_word(word)):
            raise ValueError(
                f"--shapes: {text}:{number}: wanted NxK or one of {models}; got {word[:40]!r}"
            )
        found += shapes if word else ()
    if not found:
        raise ValueError(f"--shapes: {text} has none")
    return found


def _shapes_of_word(word: str) -> Sequence[tuple[int, int]]:
    """Empty for what is neither NxK nor a model."""
    if match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", word):
        return [(int(match[1]), int(match[2]))]
    return MODEL_SHAPES.get(word.lower(), ())
