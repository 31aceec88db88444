"""Format: how a weight is stored, and its short string form."""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

BITS = range(1, 9)
MIN_GROUP_SIZE = 16

# Codebook names and the widths they exist in. `affine` has no codebook: a code stands for
# (code - zero_point) * scale. `kmeans` is fitted to each tensor, `custom` is the caller's table.
CODEBOOK_BITS: dict[str, Collection[int]] = {
    "int": BITS,
    "uniform": BITS,
    "nf": BITS,
    "sf": BITS,
    "fp": (4,),
    "crd_normal": BITS,
    "crd_laplace": BITS,
    "crd_student": BITS,
    "ternary": (2,),
    "binary": (1,),
    "kmeans": BITS,
    "custom": BITS,
    "affine": BITS,
}
CODEBOOK_SCALE_RULES = ("absmax", "absmean", "rms", "signmax", "search")
AFFINE_SCALE_RULES = ("minmax", "search")
# Stored dtypes by name. e8m0 is a power of two in one byte.
SCALE_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e8m0": torch.uint8,
}
ZERO_POINT_TOKENS = {"zint": "int", "zfloat": "float"}
ROTATIONS = ("hadamard",)
# Blocks of a rotation: the largest power of two that divides k, within these bounds. Files depend
# on the upper one. Below the lower one an outlier has too few neighbours to spread over.
MAX_ROTATION_BLOCK = 256
MIN_ROTATION_BLOCK = 16
GRAMMAR = (
    "<codebook><bits>-<g16, g32, ... or row>[-<scale rule>][-<scale dtype>][-zint][-hadamard], "
    "for example kmeans4-g64, int1-g64-absmean, nf4-row-fp16, affine4-g128-zint, "
    "kmeans2-g64-hadamard"
)


@dataclass(frozen=True)
class Format:
    """A way to store a weight ``W`` of shape ``[n, k]`` in 1 to 8 bits.

    With groups of G weights along k, the weight that a code stands for is

        codebook formats  W_hat[i, j] = codebook[code[i, j]] * scale[i, j // G]
        affine formats    W_hat[i, j] = (code[i, j] - zero_point[i, j // G]) * scale[i, j // G]

    With a rotation that is ``decode(codes)``, and ``W_hat = decode(codes) @ R``: a layer rotates
    its inputs by R, see ``fdk_formats.rotation``.

    ``str(format)`` is the short form that ``Format.parse`` reads; ``GRAMMAR`` describes it.

    Attributes:
        codebook: a name of ``CODEBOOK_BITS``.
        bits: width of a code, 1 to 8.
        group_size: G, at least 16; None for the whole row.
        scale_rule: how a scale is chosen: ``absmax``, ``absmean``, ``rms``, ``signmax`` or
            ``search``; ``minmax`` or ``search`` for affine formats. None is the default:
            ``absmean`` up to 2 bits, ``absmax`` above, ``minmax`` for affine.
        scale_dtype: ``bf16``, ``fp16``, ``fp32``, or ``e8m0`` (a power of two in one byte).
        zero_point: ``float`` (stored like a scale) or ``int`` (one byte) for affine formats.
        rotation: ``hadamard`` to rotate the inputs in blocks, or None.

    Raises:
        ValueError: if the fields do not go together, naming the field and its choices.

    Example:
        >>> Format.parse("nf4-g64").bits_per_weight(k=4096)
        4.25
    """

    codebook: str
    bits: int
    group_size: int | None = 64
    scale_rule: str | None = None
    scale_dtype: str = "bf16"
    zero_point: str | None = None
    rotation: str | None = None

    def __post_init__(self) -> None:
        if self.codebook not in CODEBOOK_BITS:
            raise ValueError(f"format: codebook must be one of {_names()}, got {self.codebook!r}")
        widths = CODEBOOK_BITS[self.codebook]
        if type(self.bits) is not int or self.bits not in widths:
            wanted = _widths(widths)
            raise ValueError(f"format: {self.codebook} takes {wanted}, got {self.bits!r}")
        size = self.group_size
        if size is not None and (type(size) is not int or size < MIN_GROUP_SIZE):
            raise ValueError(
                f"format: group_size must be at least {MIN_GROUP_SIZE}, or None for whole rows, "
                f"got {size!r}"
            )
        if self.scale_rule is None:
            rule = "minmax" if self.is_affine else "absmean" if self.bits <= 2 else "absmax"
            object.__setattr__(self, "scale_rule", rule)
        rules = AFFINE_SCALE_RULES if self.is_affine else CODEBOOK_SCALE_RULES
        if self.scale_rule not in rules:
            raise ValueError(
                f"format: {self.codebook} takes a scale rule of {', '.join(rules)}, "
                f"got {self.scale_rule!r}"
            )
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(
                f"format: scale_dtype must be one of {', '.join(SCALE_DTYPES)}, "
                f"got {self.scale_dtype!r}"
            )
        if self.has_signed_scale and self.has_power_of_two_scale:
            raise ValueError("format: signmax needs a signed scale, and e8m0 holds no sign")
        if self.is_affine and self.zero_point is None:
            object.__setattr__(self, "zero_point", "float")
        if self.zero_point not in (("float", "int") if self.is_affine else (None,)):
            wanted = "float or int" if self.is_affine else "None"
            raise ValueError(
                f"format: zero_point of {self.codebook} must be {wanted}, got {self.zero_point!r}"
            )
        if self.rotation not in (None, *ROTATIONS):
            wanted = " or ".join(ROTATIONS)
            raise ValueError(f"format: rotation must be {wanted} or None, got {self.rotation!r}")

    @property
    def is_affine(self) -> bool:
        """True for ``(code - zero_point) * scale``, False for a codebook."""
        return self.codebook == "affine"

    @property
    def is_grid(self) -> bool:
        """True where the named codebook holds integers at equal steps (``int``)."""
        return self.codebook == "int"

    @property
    def is_binary(self) -> bool:
        """True where a code is a sign: the codebook is -c and c (``binary``)."""
        return self.codebook == "binary"

    @property
    def is_fitted(self) -> bool:
        """True where the codebook is fitted to each tensor (``kmeans``)."""
        return self.codebook == "kmeans"

    @property
    def needs_codebook(self) -> bool:
        """True where the caller must supply the codebook (``custom``)."""
        return self.codebook == "custom"

    @property
    def accepts_codebook(self) -> bool:
        """True where the caller may supply the codebook (``custom`` and ``kmeans``)."""
        return self.needs_codebook or self.is_fitted

    @property
    def grid_zero_point(self) -> int | None:
        """The integer to subtract from a code of an ``int`` codebook to get its value, or None.

        Without ``signmax`` the grid is symmetric: the highest code repeats the value of the code
        below it, see ``has_repeated_top``. None at 1 bit, whose two values are 2 apart.
        """
        if not self.is_grid or self.bits == 1:
            return None
        half = 1 << (self.bits - 1)
        return half if self.has_signed_scale else half - 1

    @property
    def has_repeated_top(self) -> bool:
        """True where the two highest codes of an ``int`` codebook share one value."""
        return self.grid_zero_point is not None and not self.has_signed_scale

    @property
    def has_signed_scale(self) -> bool:
        """True where scales may be negative (``signmax``)."""
        return self.scale_rule == "signmax"

    @property
    def has_power_of_two_scale(self) -> bool:
        """True where a scale is one exponent byte (``e8m0``)."""
        return self.scale_dtype == "e8m0"

    @property
    def has_integer_zero_point(self) -> bool:
        """True where zero points are integers of one byte rather than floats."""
        return self.zero_point == "int"

    @property
    def unrotated(self) -> "Format":
        """The format of ``decode(codes)``: the same one without its rotation."""
        return self if self.rotation is None else replace(self, rotation=None)

    @property
    def stored_scale_dtype(self) -> torch.dtype:
        """The torch dtype in which scales are stored; uint8 for ``e8m0``."""
        return SCALE_DTYPES[self.scale_dtype]

    @property
    def stored_zero_point_dtype(self) -> torch.dtype:
        """The torch dtype in which zero points of an affine format are stored.

        Float zero points have the dtype of the scales, or bf16 if scales are ``e8m0``.
        """
        if self.has_integer_zero_point:
            return torch.uint8
        return torch.bfloat16 if self.has_power_of_two_scale else self.stored_scale_dtype

    @property
    def tensor_names(self) -> tuple[str, str, str]:
        """The fields of ``QuantisedTensor`` that hold tensors in this format, in their order."""
        return ("packed", "scale", "zero_point" if self.is_affine else "codebook")

    @classmethod
    def parse(cls, text: "str | Format") -> "Format":
        """Parses the short form, for example ``"kmeans4-g64"``; returns a ``Format`` unchanged.

        Raises:
            ValueError: if the text is not a format, naming the part that was not understood.
            TypeError: if it is neither a string nor a ``Format``.
        """
        if isinstance(text, Format):
            return text
        if not isinstance(text, str):
            raise TypeError(f"format: wanted a string or a Format, got {type(text).__name__}")
        head, *parts = text.split("-")
        match = re.fullmatch(r"([a-z_]+)([0-9]+)", head)
        if widths := CODEBOOK_BITS.get(head):
            named = "-".join([f"{head}{4 if 4 in widths else min(widths)}", *parts])
            raise ValueError(
                f"format: {text!r} does not say how many bits: "
                f"{head} takes {_widths(widths)}, as in {named}"
            )
        if not match:
            raise ValueError(f"format: {text!r} does not start with <codebook><bits>: {GRAMMAR}")
        fields: dict[str, int | str | None] = {}
        for part in parts:
            name, value = _parse_part(text, part)
            if name in fields:
                raise ValueError(f"format: {text!r} names its {name} twice")
            fields[name] = value
        if "group_size" not in fields:
            raise ValueError(f"format: {text!r} names no group size: {GRAMMAR}")
        return cls(codebook=match[1], bits=int(match[2]), **fields)  # type: ignore[arg-type]

    def __str__(self) -> str:
        parts = [f"{self.codebook}{self.bits}"]
        parts.append("row" if self.group_size is None else f"g{self.group_size}")
        default = Format(codebook=self.codebook, bits=self.bits)
        if self.scale_rule != default.scale_rule:
            parts.append(str(self.scale_rule))
        if self.scale_dtype != default.scale_dtype:
            parts.append(self.scale_dtype)
        if self.has_integer_zero_point:
            parts.append("zint")
        if self.rotation is not None:
            parts.append(self.rotation)
        return "-".join(parts)

    def group_size_for(self, k: int) -> int:
        """Returns the group size for rows of ``k`` weights.

        Raises:
            ValueError: if ``k`` is not a positive multiple of the group size, or below 1; or if its
                inputs cannot be rotated, see ``rotation_block``.
        """
        size = k if self.group_size is None else self.group_size
        if k < 1 or k % size:
            whole = self.group_size is None
            wanted = "at least 1" if whole else f"a positive multiple of {size}"
            raise ValueError(f"{self}: k must be {wanted}, got k={k}{self._fitting(k)}")
        self.rotation_block(k)
        return size

    def rotation_block(self, k: int) -> int | None:
        """Returns the inputs in a block of the rotation of ``k`` inputs; None without rotation.

        It is the largest power of two that divides ``k``, 256 at most.

        Raises:
            ValueError: if it is less than 16.
        """
        if self.rotation is None:
            return None
        block = power_of_two_in(k)
        if block < MIN_ROTATION_BLOCK:
            raise ValueError(
                f"{self}: k must be a multiple of {MIN_ROTATION_BLOCK} to be rotated, got k={k}; "
                f"{self.unrotated} fits"
            )
        return block

    def _fitting(self, k: int) -> str:
        """Names the format with the largest usual groups that fit k, or whole rows."""
        if k < 1 or self.group_size is None:
            return ""
        usual = [
            size for size in (256, 128, 64, 32, 16) if size < self.group_size and k % size == 0
        ]
        format = self if k % MIN_ROTATION_BLOCK == 0 else self.unrotated
        return f"; {replace(format, group_size=usual[0] if usual else None)} fits"

    def bits_per_weight(self, k: int) -> float:
        """Returns the bits of a code plus its share of scale and zero point, for rows of ``k``."""
        group_bytes = self.stored_scale_dtype.itemsize
        if self.is_affine:
            group_bytes += self.stored_zero_point_dtype.itemsize
        return self.bits + 8 * group_bytes / self.group_size_for(k)


def power_of_two_in(k: int) -> int:
    """Returns the largest power of two that divides ``k``, ``MAX_ROTATION_BLOCK`` at most."""
    return min(k & -k, MAX_ROTATION_BLOCK)


def _parse_part(text: str, part: str) -> tuple[str, int | str | None]:
    if part == "row":
        return "group_size", None
    if match := re.fullmatch(r"g([0-9]+)", part):
        return "group_size", int(match[1])
    if part in CODEBOOK_SCALE_RULES + AFFINE_SCALE_RULES:
        return "scale_rule", part
    if part in SCALE_DTYPES:
        return "scale_dtype", part
    if part in ZERO_POINT_TOKENS:
        return "zero_point", ZERO_POINT_TOKENS[part]
    if part in ROTATIONS:
        return "rotation", part
    raise ValueError(f"format: {part!r} in {text!r} is not understood: {GRAMMAR}")


def _names() -> str:
    return ", ".join(CODEBOOK_BITS)


def _widths(of: Collection[int]) -> str:
    return "1 to 8 bits" if of is BITS else f"{' or '.join(map(str, of))} bits"
