"""Random weights on an integer grid, as the kernels of other projects take them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fdk_bench.cases import KernelCase


@dataclass(frozen=True, eq=False)
class IntegerWeight:
    """``W_hat = (codes - 2^(bits-1)) * scale``.

    codes :: [n, k, uint8]
    scale :: [n, k/G, dtype]
    """

    codes: Tensor
    scale: Tensor
    bits: int

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """``W_hat :: [n, k, dtype]``."""
        centred = self.codes.to(dtype).view(*self.scale.shape, -1) - (1 << self.bits - 1)
        return (centred * self.scale.to(dtype)[..., None]).view(self.codes.shape)


def random_integers(case: KernelCase) -> IntegerWeight:
    """A weight of the case's shape, bits and group size, with scales in its dtype."""
    shape, groups = (case.n, case.k), case.k // case.group_size
    generator = torch.Generator(case.device).manual_seed(0)
    codes = torch.randint(
        1 << case.bits, shape, dtype=torch.uint8, device=case.device, generator=generator
    )
    scale = 0.5 + torch.rand(case.n, groups, device=case.device, generator=generator)
    scale /= case.k**0.5 * (1 << case.bits)
    return IntegerWeight(codes, scale.to(case.torch_dtype), case.bits)


def needs(
    case: KernelCase, *, device: str, bits: tuple[int, ...], dtypes: tuple[str, ...]
) -> str | None:
    """The reason that a device, a width or a dtype is against a case; None where none is."""
    if torch.device(case.device).type != device:
        return f"needs {device}, got {case.device}"
    if case.quantised is None or case.bits not in bits:
        return f"needs {' or '.join(map(str, bits))} bits, got {case.format}"
    if case.dtype not in dtypes:
        return f"needs {' or '.join(dtypes)} activations, got {case.dtype}"
    return None
