"""A random weight in the Marlin layout, with enough copies that each call reads from memory."""

from dataclasses import dataclass

import torch
from _timing import Run, copies
from torch import Tensor

from fdk_cuda.marlin import MARLIN, MARLIN_LUT, MarlinLayout
from fdk_cuda.marlin.ops import dequantise, marlin_grad_x, marlin_linear
from fdk_formats.format import Format
from fdk_formats.tensor import QuantisedTensor

KINDS = ("codebook", "affine", "signs")  # signs: a 1-bit codebook of -c and c
GROUP_SIZE = 64


def random_weight(bits: int, n: int, k: int, kind: str = "codebook") -> QuantisedTensor:
    """Make random codes and scales on the GPU, with a codebook or integer zero points."""
    generator = torch.Generator("cuda").manual_seed(bits)
    groups = n, k // GROUP_SIZE
    codebook = zero_point = None
    format = Format("custom", bits, GROUP_SIZE)
    if kind == "affine":
        format = Format("affine", bits, GROUP_SIZE, zero_point="int")
        zero_point = torch.randint(1 << bits, groups, device="cuda", generator=generator)
        zero_point = zero_point.to(torch.uint8)
    else:
        codebook = torch.randn(1 << bits, device="cuda", generator=generator).sort().values
    if kind == "signs" and codebook is not None:
        codebook = torch.cat([-codebook[1:], codebook[1:]])
    width = n, k * bits // 8
    packed = torch.randint(256, width, dtype=torch.uint8, device="cuda", generator=generator)
    scale = (0.5 + torch.rand(groups, device="cuda", generator=generator)).bfloat16()
    return QuantisedTensor(format, (n, k), packed, scale, codebook, zero_point)


def marlin_layout(q: QuantisedTensor) -> MarlinLayout:
    """Pack a weight for activations in bf16."""
    layout = (MARLIN if q.format.is_affine else MARLIN_LUT).pack(q, dtype=torch.bfloat16)
    assert isinstance(layout, MarlinLayout)
    return layout


@dataclass(frozen=True)
class MarlinWeight:
    """A packed weight to time.

    Attributes:
        layout: the Marlin layout.
        packed: copies of the layout's bytes.
        nbytes: size of codes, scales and zero points, as stored in a file.
        W_hat: the dequantised weight, bf16.
        dense: copies of it, for cuBLAS.
    """

    layout: MarlinLayout
    packed: list[Tensor]
    nbytes: int
    W_hat: Tensor
    dense: list[Tensor]

    @classmethod
    def random(cls, bits: int, n: int, k: int, kind: str = "codebook") -> "MarlinWeight":
        """Make a random weight of a kind in ``KINDS``."""
        q = random_weight(bits, n, k, kind)
        layout = marlin_layout(q)
        stored = [t for t in (q.packed, q.scale, q.zero_point) if t is not None]
        W_hat = q.dequantise(torch.bfloat16)
        nbytes = sum(t.nbytes for t in stored)
        return cls(layout, copies(layout.packed), nbytes, W_hat, copies(W_hat))

    def linear(self, x: Tensor) -> dict[str, Run]:
        """Return ``x @ W_hat.T`` by Marlin, by cuBLAS in bf16, and by dequantising first."""
        weight = self.layout.codebook, str(self.layout.format)
        n, k = self.layout.shape
        return {
            "us": lambda i: marlin_linear(x, self._packed(i), *weight, False, None, n, k),
            "cublas": lambda i: torch.mm(x, self._dense(i).T),
            "dequantise": lambda i: torch.mm(x, dequantise(self._packed(i), *weight, n, k).T),
        }

    def grad_x(self, dy: Tensor) -> dict[str, Run]:
        """Return ``dy @ W_hat`` in the same three ways."""
        weight = self.layout.codebook, str(self.layout.format)
        n, k = self.layout.shape
        return {
            "us": lambda i: marlin_grad_x(dy, self._packed(i), *weight, False, n, k),
            "cublas": lambda i: torch.mm(dy, self._dense(i)),
            "dequantise": lambda i: torch.mm(dy, dequantise(self._packed(i), *weight, n, k)),
        }

    def oracle(self, x: Tensor, *, dy: bool = False) -> Tensor:
        """Compute the product in float64."""
        W_hat = self.W_hat.double()
        return x.double() @ (W_hat if dy else W_hat.T)

    def _packed(self, i: int) -> Tensor:
        return self.packed[i % len(self.packed)]

    def _dense(self, i: int) -> Tensor:
        return self.dense[i % len(self.dense)]
