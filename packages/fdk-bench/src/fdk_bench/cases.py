"""Cases of the kernel benchmarks: shape, format and contender; and random weights for them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fdk_formats import Format, QuantisedTensor, quantise

BITSANDBYTES = "bitsandbytes-nf4"  # in the place of a format: its layers of NF4, 4 bits
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# (n, k) of the linear layers of a block, fused as servers fuse them.
MODEL_SHAPES = {
    "llama-1b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    "llama-3b": ((5120, 3072), (3072, 3072), (16384, 3072), (3072, 8192)),
    "llama-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "qwen3-4b": ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)),
    "qwen3-32b": ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),
    "mistral-7b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
}
# An arbitrary codebook costs a kernel as much as a k-means format, and needs no fitting.
DEFAULT_CODEBOOK = "custom"
SAMPLE_ROWS = 4  # rows of a normal weight that a named codebook is fitted to


@dataclass(frozen=True)
class KernelCase:
    """``y = x @ W_hat.T`` with ``x :: [m, k]`` and ``W_hat :: [n, k]``.

    Attributes:
        m, n, k: the shape.
        format: a format's short form, or the name of ``dtype`` for a weight that is not quantised.
        dtype: dtype of x and y, a name of ``DTYPES``.
        device: ``cpu`` or ``cuda``.
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
        """``dtype`` as a torch dtype."""
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
        """Bytes of the weight in a file: codes, scales, zero points and codebook."""
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
        """Weights per scale; k for whole rows and for a weight that is not quantised."""
        format = self.quantised
        return self.k if format is None else format.group_size_for(self.k)

    @property
    def activation_bytes(self) -> int:
        """Bytes of x and y."""
        return self.m * (self.k + self.n) * self.torch_dtype.itemsize

    @property
    def operations(self) -> int:
        """Multiplications and additions of the product; decoding is not counted."""
        return 2 * self.m * self.n * self.k


def parse_case(text: str) -> KernelCase:
    """Return the case of a text such as ``m1-n4096-k4096-custom4-g64-bf16-cuda-auto``.

    Raises:
        ValueError: for any other text, and for a case that cannot exist.
    """
    from fdk_bench.peers import PEERS
    from fdk_formats import all_backends

    pattern = (
        rf"m(\d+)-n(\d+)-k(\d+)-(.+)-({'|'.join(DTYPES)})(?:-(int8))?-(cpu|cuda)(?:-([\w.-]+))?"
    )
    match = re.fullmatch(pattern, text)
    if match is None:
        raise ValueError(
            f"wanted a case such as m1-n4096-k4096-custom4-g64-bf16-cuda-auto, got {text!r}"
        )
    m, n, k, format, dtype, activations, device, backend = match.groups()
    if format not in DTYPES:
        format = str(Format.parse(format))
    default = "torch" if format in DTYPES else "auto"
    shape = (int(m), int(n), int(k))
    if min(shape) < 1:
        raise ValueError(f"wanted m, n and k of at least 1, got m={m}, n={n}, k={k}")
    # The backend may belong to a package that is not installed here.
    known = [default, "auto", "reference", "cpu", "triton", "marlin", "marlin-lut"]
    known += [*all_backends(), *(peer.name for peer in PEERS)]
    if backend and backend not in known:
        wanted = ", ".join(dict.fromkeys(known))
        raise ValueError(f"wanted a backend or peer of {wanted}; got {backend!r}")
    case = KernelCase(*shape, format, dtype, device, backend or default, activations or "float")
    if case.quantised is not None:
        case.quantised.group_size_for(case.k)  # raises where no group divides k
    return case


def formats_of(
    bits: Sequence[int], formats: Sequence[str], group_size: str, dtype: str
) -> list[str]:
    """Return the formats of a run, each once, widest first.

    Args:
        bits: 1 to 8, and 16 for ``dtype``, the weight that is not quantised.
        formats: codebooks (``int``, ``affine``), which are combined with ``bits``, and whole
            formats (``nf4-g32``). Empty for the default codebook.
        group_size: a number or ``row``, for formats that name none.
        dtype: dtype of x.

    Raises:
        ValueError: for text that is not a format, another dtype, and widths that do not exist.
    """
    if wrong := [b for b in bits if b > 8 and b != 16]:
        raise ValueError(f"--bits: wanted 1 to 8, or 16 for no quantisation; got {wrong[0]}")
    found = []
    for text in formats or (DEFAULT_CODEBOOK,):
        if text in DTYPES and text != dtype:
            raise ValueError(f"format {text}: wanted {dtype}, the dtype of x, or a format of codes")
        if text == dtype:
            found.append(text)
        elif re.search(r"\d", text):
            found.append(canonical(text, group_size))
        else:
            found += [canonical(f"{text}{b}", group_size) for b in bits if b != 16]
    if 16 in bits:
        found.append(dtype)
    unique = dict.fromkeys(found)
    width = {name: 16 if name in DTYPES else Format.parse(name).bits for name in unique}
    return sorted(unique, key=lambda name: -width[name])


def canonical(text: str, group_size: str) -> str:
    """Return the short form of a format, with ``group_size`` (a number or ``row``) if it has none.

    Raises:
        ValueError: for text that is not a format.
    """
    grouped = any(re.fullmatch(r"row|g\d+", part) for part in text.split("-"))
    suffix = "row" if group_size == "row" else f"g{group_size}"
    try:
        return str(Format.parse(text if grouped else f"{text}-{suffix}"))
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None


def shapes_of(
    named: Sequence[str], ns: Sequence[int], ks: Sequence[int], default: tuple[int, int]
) -> list[tuple[int, int]]:
    """Return shapes (n, k), each once.

    Args:
        named: ``NxK``, names of ``MODEL_SHAPES``, or files with one of these a line.
        ns, ks: without ``named``, every n with every k; without ``ns``, squares of ``ks``.
        default: without any.

    Raises:
        ValueError: for any other text.
    """
    found = [shape for text in named for shape in _shapes_named(text)]
    if not named:
        if ns:
            found = [(n, k) for k in ks or (default[1],) for n in ns]
        else:
            found = [(k, k) for k in ks] or [default]
    return list(dict.fromkeys(found))


def _shapes_named(text: str) -> Sequence[tuple[int, int]]:
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
    if match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", word):
        return [(int(match[1]), int(match[2]))]
    return MODEL_SHAPES.get(word.lower(), ())


def random_weight(
    format: Format, n: int, k: int, device: torch.device | str, *, seed: int = 0
) -> QuantisedTensor:
    """Make a weight ``[n, k]`` of random codes, scales and zero points, on the device.

    Kernel time does not depend on their values, so nothing is searched: [28672, 8192] takes
    milliseconds on a GPU. Products are about as large as x.
    """
    generator = torch.Generator(device).manual_seed(seed)
    width = (k * format.bits + 7) // 8
    groups, levels = k // format.group_size_for(k), 1 << format.bits
    packed = torch.randint(256, (n, width), dtype=torch.uint8, device=device, generator=generator)
    if spare := width * 8 - k * format.bits:  # the last byte of a row ends in zeros
        packed[:, -1] &= 0xFF << spare & 0xFF
    codebook = zero_point = None
    if format.is_affine:
        zero = torch.rand(n, groups, device=device, generator=generator) * (levels - 1)
        zero_point = zero.round().to(format.stored_zero_point_dtype)
        largest = levels / 2
    else:
        codebook = _codebook(format, k, seed).to(device)
        largest = float(codebook.abs().max())
    scale = 0.5 + torch.rand(n, groups, device=device, generator=generator)
    scale /= largest * k**0.5
    if format.scale_dtype == "e8m0":
        scale = 127 + scale.log2().round()
    scale = scale.to(format.stored_scale_dtype)
    return QuantisedTensor(format, (n, k), packed, scale, codebook, zero_point)


def _codebook(format: Format, k: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if format.codebook == "custom":
        return torch.randn(1 << format.bits, generator=generator).sort().values
    codebook = quantise(torch.randn(SAMPLE_ROWS, k, generator=generator), format).codebook
    assert codebook is not None
    return codebook
