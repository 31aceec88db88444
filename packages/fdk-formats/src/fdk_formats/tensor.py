"""QuantisedTensor and QuantisedStack: codes, scales and codebooks, in canonical form."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from fdk_formats.format import Format
from fdk_formats.packing import packed_width, rows_per_chunk, unpack
from fdk_formats.rotation import rotate
from fdk_formats.scales import decode, decode_scale

# The largest finite float16, to which dequantise and kernels round a codebook.
MAX_CODEBOOK = 65504.0
# Integers are exact in float32 up to here.
MAX_ZERO_POINT = float(1 << 24)


@dataclass(frozen=True, eq=False)
class CanonicalWeight:
    """The checked tensors of a weight: the base of ``QuantisedTensor`` and ``QuantisedStack``.

    Raises:
        ValueError: if a tensor has the wrong shape or device, or is present where the format has
            none.
        TypeError: if an argument has the wrong type or dtype.
    """

    SIZES: ClassVar[str]

    format: Format
    shape: tuple[int, ...]
    packed: Tensor
    scale: Tensor
    codebook: Tensor | None = None
    zero_point: Tensor | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.format, Format):
            raise TypeError(f"{name}: format must be a Format, got {self.format!r}")
        letters = self.SIZES.strip("()").split(", ")
        given = self.shape
        if not isinstance(given, tuple) or [type(size) for size in given] != [int] * len(letters):
            count = {2: "two", 3: "three"}[len(letters)]
            raise ValueError(
                f"{self.format}: shape must be {count} integers {self.SIZES}, got {given}"
            )
        *rows, k = self.shape
        groups = k // self.format.group_size_for(k)
        self._check("packed", torch.uint8, (*rows, packed_width(self.format.bits, k)))
        self._check("scale", self.format.stored_scale_dtype, (*rows, groups))
        if self.format.is_affine:
            self._check("zero_point", self.format.stored_zero_point_dtype, (*rows, groups))
            self._check_absent("codebook")
        else:
            self._check("codebook", torch.float32, *self._codebook_shapes())
            self._check_absent("zero_point")

    def _codebook_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes that a codebook may have."""
        raise NotImplementedError

    def _check(self, name: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> None:
        tensor = getattr(self, name)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{self.format}: {name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype != dtype:
            raise TypeError(f"{self.format}: {name} must be {dtype}, got {tensor.dtype}")
        if tensor.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(
                f"{self.format}: {name} of a {list(self.shape)} weight must be {wanted}, "
                f"got {list(tensor.shape)}"
            )
        if tensor.device != self.packed.device:
            raise ValueError(
                f"{self.format}: {name} must be on {self.packed.device}, got {tensor.device}"
            )

    def _check_absent(self, name: str) -> None:
        if getattr(self, name) is not None:
            raise ValueError(f"{self.format}: takes no {name}, got one")

    @property
    def group_size(self) -> int:
        """Weights that share a scale; k for whole rows."""
        return self.format.group_size_for(self.shape[-1])

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def bits_per_weight(self) -> float:
        """Bits of a code plus its share of scale and zero point, without the codebook."""
        return self.format.bits_per_weight(self.shape[-1])

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that are present by name, in the order of the class."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in values if isinstance(value, Tensor)}

    def to(self, device: torch.device | str | int) -> Self:
        """Returns the same weight on another device."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)  # type: ignore[arg-type]

    def codes(self) -> Tensor:
        """Unpacks the codes, of the shape of the weight, uint8."""
        return unpack(self.packed, self.format.bits, self.shape[-1])

    def matrices(self) -> "Iterator[QuantisedTensor]":
        """Yields the weight's matrices ``[n, k]``: itself, or every expert of a stack."""
        raise NotImplementedError

    def check_values(self, where: str) -> None:
        """Checks what backends rely on: the order of the codebook and the range of all values.

        Kernels sum over a group before they scale, in float32; ``dequantise`` scales first. A
        product of both is finite only if the sums are: they are below ``G * T * |x|`` with T the
        largest codebook entry or ``2^bits + |zero_point|``. The valid range keeps T at 2^16 or
        2^24, so that no group of less than 2^16 weights overflows for ``|x|`` up to 2^87, which is
        1.5e26. A codebook of 1e30 with scales of 1e-30 dequantises to 1.0, and yet a group of 64
        overflows at ``|x|`` of 5e6.

        - codebook: finite, ascending, within +-65504, which is finite in float16 too. Quantisers
          of fdk make tables within +-1, or integers up to 128.
        - zero_point: finite and within +-2^24: beyond it ``code - zero_point`` drops codes. Those
          of ``quantise`` reach 2^16.
        - scale: finite, and so is its product in float32 with each codebook entry, or with the
          largest code and the zero point.

        On the meta device there are no values, so nothing is checked.

        Args:
            where: the start of the error message, such as a file and a name.

        Raises:
            ValueError: if a value is outside the range.
        """
        if self.device.type == "meta":
            return
        scale = decode_scale(self.scale)
        _check_finite(where, "scale", scale)
        if self.codebook is not None:
            codebook = self.codebook.detach()
            if not bool(codebook.isfinite().all()) or bool((codebook.diff() < 0).any()):
                raise ValueError(
                    f"{where}: codebook must be finite and ascend, got {codebook.tolist()}"
                )
            largest = codebook.abs().amax(-1)[..., None, None]
            if (largest > MAX_CODEBOOK).any():
                raise ValueError(
                    f"{where}: codebook must be within +-{MAX_CODEBOOK:g}, got "
                    f"{float(largest.max()):g}; divide it by a power of two and multiply the "
                    f"scales by it"
                )
        else:
            assert self.zero_point is not None
            zero = self.zero_point.to(torch.float32)
            _check_finite(where, "zero_point", zero)
            largest = zero.abs()
            if bad := int((largest > MAX_ZERO_POINT).sum()):
                raise ValueError(
                    f"{where}: zero_point must be within +-2^24, got {bad} that are not"
                )
            largest = largest.clamp(min=float((1 << self.format.bits) - 1))
        if bad := int((~(scale * largest).isfinite()).sum()):
            raise ValueError(
                f"{where}: scale must have finite float32 products with the codebook, or with "
                f"codes and zero point, got {bad} that have not"
            )


@dataclass(frozen=True, eq=False)
class QuantisedTensor(CanonicalWeight):
    """A weight ``[n, k]`` in canonical form: what files hold and what backends pack from.

    Attributes:
        format: explains the tensors.
        shape: ``(n, k)``.
        packed: codes, ``[n, ceil(k * bits / 8), uint8]``; see ``packing``.
        scale: ``[n, k/G]`` in the format's scale dtype, uint8 for e8m0; see ``decode_scale``.
        codebook: ``[2^bits, float32]``, ascending (an entry may repeat); None for affine formats.
        zero_point: ``[n, k/G]``, uint8 or floating; affine formats only.

    Raises:
        ValueError: if a tensor has the wrong shape or device, or is present where the format has
            none.
        TypeError: if an argument has the wrong type or dtype.
    """

    SIZES = "(n, k)"

    shape: tuple[int, int]

    def _codebook_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((1 << self.format.bits,),)

    def matrices(self) -> "Iterator[QuantisedTensor]":
        """Yields the weight itself."""
        yield self

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Computes the weight that the codes stand for.

        The codebook is rounded to ``dtype`` first. The rest is one float32 product (for affine
        formats also one float32 difference before it), rounded to ``dtype``. Kernels that scale
        before or after their accumulation get the same bits: a product of bf16 or fp16 values is
        exact in float32.

        With a rotation, that is what kernels multiply rotated x with. ``W_hat`` is those values
        rotated back in float32, and rounded to ``dtype`` again.

        Args:
            dtype: a floating dtype.

        Returns:
            ``W_hat :: [n, k, dtype]``.

        Raises:
            TypeError: if ``dtype`` is not floating.
        """
        _check_floating("dequantise", dtype)
        n, k = self.shape
        out = torch.empty((n, k), dtype=dtype, device=self.device)
        step = rows_per_chunk(self.device, k)
        for start in range(0, n, step):
            out[start : start + step] = self.rows(start, start + step, dtype)
        return out

    def rows(self, start: int, stop: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Computes rows ``start`` to ``stop`` of ``dequantise(dtype)``."""
        _check_floating("rows", dtype)
        rows = slice(start, stop)
        codes = unpack(self.packed[rows], self.format.bits, self.shape[1])
        codes = codes.view(len(codes), -1, self.group_size)  # [rows, k/G, G]
        zero = None if self.zero_point is None else self.zero_point[rows]
        decoded = decode(codes, self.scale[rows], self.codebook, zero, dtype)
        return decoded if self.format.rotation is None else rotate(decoded, inverse=True)

    @property
    def unrotated(self) -> "QuantisedTensor":
        """The same tensors in the format without rotation: what multiplies rotated x."""
        return replace(self, format=self.format.unrotated)


@dataclass(frozen=True, eq=False)
class QuantisedStack(CanonicalWeight):
    """Weights ``[experts, n, k]`` of a mixture of experts in canonical form.

    ``stack[e]`` is the weight of expert e, and ``stack.experts(a, b)`` a stack of some of them, as
    for expert parallelism; their tensors are views.

    Attributes:
        format: explains the tensors.
        shape: ``(experts, n, k)``.
        packed: codes, ``[experts, n, ceil(k * bits / 8), uint8]``; see ``packing``.
        scale: ``[experts, n, k/G]`` in the format's scale dtype, uint8 for e8m0.
        codebook: ``[experts, 2^bits, float32]``, or ``[1, 2^bits]`` where all experts have the same
            one; ascending. None for affine formats.
        zero_point: ``[experts, n, k/G]``, uint8 or floating; affine formats only.

    Raises:
        ValueError: if a tensor has the wrong shape or device, or is present where the format has
            none.
        TypeError: if an argument has the wrong type or dtype.

    Example:
        >>> stack = quantise_stack(torch.randn(8, 16, 128), "kmeans4-g64")
        >>> stack[3].dequantise().shape
        torch.Size([16, 128])
    """

    SIZES = "(experts, n, k)"

    shape: tuple[int, int, int]

    @classmethod
    def of(cls, experts: Sequence[QuantisedTensor]) -> "QuantisedStack":
        """Stacks weights of one format and shape; equal codebooks are kept once.

        Raises:
            ValueError: if there are none, or their formats, shapes or devices differ.
        """
        kinds = {(q.format, q.shape, q.device) for q in experts}
        if len(kinds) != 1:
            got = ", ".join(sorted(f"{f} {list(shape)} on {device}" for f, shape, device in kinds))
            raise ValueError(
                f"QuantisedStack: experts must have one format, shape and device, "
                f"got {got or 'none'}"
            )
        tensors = {
            name: torch.stack([q.tensors()[name] for q in experts]) for name in experts[0].tensors()
        }
        codebook = tensors.get("codebook")
        if (
            codebook is not None
            and codebook.device.type != "meta"
            and torch.equal(codebook, codebook[:1].expand_as(codebook))
        ):
            tensors["codebook"] = codebook[:1].clone()
        return cls(experts[0].format, (len(experts), *experts[0].shape), **tensors)

    def _codebook_shapes(self) -> tuple[tuple[int, ...], ...]:
        entries = 1 << self.format.bits
        return (1, entries), (self.shape[0], entries)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, expert: int) -> QuantisedTensor:
        """Returns the weight of an expert, as views.

        Raises:
            IndexError: if there is no such expert.
        """
        experts, n, k = self.shape
        if not -experts <= expert < experts:
            raise IndexError(f"QuantisedStack: wanted an expert of {experts}, got {expert}")
        tensors = {
            name: tensor[0 if len(tensor) == 1 else expert]
            for name, tensor in self.tensors().items()
        }
        return QuantisedTensor(self.format, (n, k), **tensors)

    def experts(self, start: int, stop: int) -> "QuantisedStack":
        """Returns the stack of experts ``start`` to ``stop``, as views.

        Raises:
            IndexError: if there are none.
        """
        if not 0 <= start < stop <= len(self):
            raise IndexError(
                f"QuantisedStack: wanted experts of {len(self)}, got {start} to {stop}"
            )
        tensors = {
            name: tensor if name == "codebook" and len(tensor) == 1 else tensor[start:stop]
            for name, tensor in self.tensors().items()
        }
        return QuantisedStack(self.format, (stop - start, *self.shape[1:]), **tensors)

    def matrices(self) -> "Iterator[QuantisedTensor]":
        """Yields the weight of every expert, as views."""
        yield from (self[expert] for expert in range(len(self)))

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Computes ``W_hat :: [experts, n, k, dtype]``; see ``QuantisedTensor.dequantise``."""
        _check_floating("dequantise", dtype)
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        for expert, q in enumerate(self.matrices()):
            out[expert] = q.dequantise(dtype)
        return out


def _check_finite(where: str, name: str, values: Tensor) -> None:
    if bad := int((~values.isfinite()).sum()):
        raise ValueError(f"{where}: {name} must be finite, got {bad} that are not")


def _check_floating(caller: str, dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"{caller}: dtype must be a floating torch.dtype, got {dtype!r}")


@torch.no_grad()
def relative_error(weight: Tensor, q: CanonicalWeight) -> float:
    """Computes the relative RMS error ``||W - W_hat|| / ||W||``; 0 if both are equal.

    ``W_hat`` is dequantised to float32. Differences and squares are float64, in chunks of rows.

    Args:
        weight: what ``q`` was quantised from, ``[n, k]`` or ``[experts, n, k]``.
        q: the quantised weight, or a stack.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if an argument has another type.
    """
    if not isinstance(weight, Tensor):
        raise TypeError(f"relative_error: weight must be a tensor, got {type(weight).__name__}")
    if not isinstance(q, CanonicalWeight):
        raise TypeError(
            f"relative_error: q must be a QuantisedTensor or a QuantisedStack, "
            f"got {type(q).__name__}"
        )
    if weight.shape != q.shape:
        raise ValueError(f"relative_error: weight must be {q.shape}, got {list(weight.shape)}")
    step = rows_per_chunk(weight.device, q.shape[-1])
    error = torch.zeros((), dtype=torch.float64, device=weight.device)
    total = error.clone()
    for source, own in zip(weight.reshape(-1, *q.shape[-2:]), q.matrices(), strict=True):
        for start in range(0, own.shape[0], step):
            rows = source[start : start + step].to(torch.float64)
            error += (rows - own.rows(start, start + step).to(torch.float64)).square().sum()
            total += rows.square().sum()
    return float((error / total).sqrt()) if total > 0 else 0.0 if error == 0 else float("inf")
