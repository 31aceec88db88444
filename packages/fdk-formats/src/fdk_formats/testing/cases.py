"""Conformance cases: products of awkward shapes, with weights that use every code."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fdk_formats.backends import Problem
from fdk_formats.format import Format
from fdk_formats.packing import pack
from fdk_formats.tensor import QuantisedTensor

ALL_BITS = tuple(range(1, 9))
ALL_GROUP_SIZES = (16, 32, 64, 128, None)
DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


@dataclass(frozen=True)
class Case:
    """One conformance case: ``y = x @ W_hat.T`` with ``x :: [m, k]``, ``W_hat :: [n, k]``."""

    format: Format
    m: int
    n: int
    k: int
    dtype: torch.dtype
    device: str = "cpu"
    seed: int = 0

    def __str__(self) -> str:
        shape = f"m{self.m}-n{self.n}-k{self.k}"
        return f"{shape}-{self.format}-{DTYPE_NAMES[self.dtype]}"

    @property
    def problem(self) -> Problem:
        """The problem that the backend must support."""
        return Problem(self.format, self.n, self.k, self.dtype, torch.device(self.device))

    def quantised(self) -> QuantisedTensor:
        """Returns the weight of the case, on its device."""
        return random_quantised(self.format, self.n, self.k, seed=self.seed).to(self.device)

    def random(self, *shape: int) -> Tensor:
        """Returns standard normal values in the case's dtype, on its device."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(*shape, generator=generator).to(self.device, self.dtype)


def cases(
    *,
    bits: Iterable[int] = ALL_BITS,
    codebooks: Iterable[str] = ("custom", "affine"),
    group_sizes: Iterable[int | None] = ALL_GROUP_SIZES,
    dtypes: Iterable[torch.dtype] = (torch.bfloat16, torch.float16, torch.float32),
    ms: Iterable[int] = (1, 3),
    device: str = "cpu",
) -> Iterator[Case]:
    """Yields every combination of the arguments, with awkward n and k.

    n is odd and k an odd number of groups. Scale dtypes and kinds of zero point alternate, so that
    each width and group size meets some of them.
    """
    scale_dtypes = ("bf16", "fp16", "bf16", "fp32", "bf16", "e8m0")
    turn = 0
    for codebook in codebooks:
        for width in bits:
            for group_size in group_sizes:
                for dtype in dtypes:
                    for m in ms:
                        zero = ("float", "int")[turn // 2 % 2] if codebook == "affine" else None
                        scale = scale_dtypes[turn % len(scale_dtypes)]
                        plain = Format(codebook, width, group_size)
                        format = replace(plain, scale_dtype=scale, zero_point=zero)
                        k = 3 * group_size if group_size else 88
                        yield Case(format, m=m, n=37, k=k, dtype=dtype, device=device, seed=turn)
                        turn += 1


def random_quantised(format: Format, n: int, k: int, *, seed: int = 0) -> QuantisedTensor:
    """Returns a weight of random codes, scales, zero points and codebook.

    Every code occurs, if there are enough weights. Scales are around 1 / sqrt(k), half of them
    negative with ``signmax``, and one is zero.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = k // format.group_size_for(k)
    levels = 1 << format.bits
    codes = (torch.randperm(n * k, generator=generator) % levels).view(n, k)
    if format.has_power_of_two_scale:
        exponent = 127 - int(math.log2(k) / 2)
        scale = torch.randint(exponent - 2, exponent + 2, (n, groups), generator=generator)
    else:
        scale = (0.5 + torch.rand(n, groups, generator=generator)) / math.sqrt(k)
        if format.has_signed_scale:
            scale *= torch.randint(2, scale.shape, generator=generator) * 2 - 1
    scale[n // 2, groups // 2] = 0
    codebook = zero_point = None
    if format.is_affine:
        zero_point = torch.rand(n, groups, generator=generator) * (levels - 1)
        if format.has_integer_zero_point:
            zero_point = zero_point.round()
        zero_point = zero_point.to(format.stored_zero_point_dtype)
    else:
        codebook = torch.randn(levels, generator=generator).sort().values
    return QuantisedTensor(
        format=format,
        shape=(n, k),
        packed=pack(codes, format.bits),
        scale=scale.to(format.stored_scale_dtype),
        codebook=codebook,
        zero_point=zero_point,
    )
