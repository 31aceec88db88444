"""The backends ``marlin`` (affine and integer grids) and ``marlin-lut`` (any codebook)."""

from dataclasses import replace

import torch
from torch import Tensor

from fdk_cuda.gpu import why_no_gpu
from fdk_cuda.launch_cache import is_traced
from fdk_cuda.marlin.layout import (
    STORED_DTYPES,
    Geometry,
    has_grid,
    why_not,
)
from fdk_cuda.marlin.ops import DTYPES, linear_op
from fdk_cuda.marlin.ready import ReadyCalls
from fdk_cuda.marlin.repack import lay_out, take_back
from fdk_cuda.nvrtc import why_unavailable
from fdk_cuda.stream_sync import SettledLayout
from fdk_formats.backends import Layout, Problem
from fdk_formats.codebooks import named_codebook
from fdk_formats.format import Format
from fdk_formats.scales import decode_scale
from fdk_formats.tensor import QuantisedTensor, zero_point_dtype


class MarlinLayout(SettledLayout):
    """A weight in the order of tensor-core fragments; see ``layout``.

    packed             :: [rows / 32, columns / 64, block bytes, uint8]
    codebook           :: [2^bits, dtype]     0, 1, 2, ... for affine formats
    canonical_codebook :: [2^bits, float32]   or None: what ``unpack`` returns

    Args:
        q: the weight.
        dtype: of the activations.
        batch_invariant: a row of y does not depend on the other rows or their number; see
            docs/kernels/marlin.md for what that costs.
    """

    packed: Tensor
    codebook: Tensor
    canonical_codebook: Tensor | None

    def __init__(
        self, q: QuantisedTensor, dtype: torch.dtype, *, batch_invariant: bool = False
    ) -> None:
        super().__init__()
        self.batch_invariant = batch_invariant
        self.format, self.shape = q.format, q.shape
        # What kernels are told of.
        format = _computed_format(q, dtype)
        self.geometry = Geometry.of(format, *q.shape)
        scale = _stored(q.scale, q.format)
        zero_point = None if q.zero_point is None else q.zero_point.to(scale.dtype)
        packed = lay_out(self.geometry, q.packed, scale, zero_point)
        codebook = q.codebook
        if codebook is None:
            codebook = torch.arange(1 << q.format.bits, dtype=torch.float32, device=q.device)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("codebook", codebook.to(dtype), persistent=False)
        self.register_buffer("canonical_codebook", q.codebook, persistent=False)
        self._format, self._ready = str(format), ReadyCalls()
        self.settle()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``Layout``."""
        # Not by attribute: nn.Module takes a microsecond to find a buffer.
        tensors = self._buffers
        is_invariant = self.batch_invariant
        # torch.compile traces no further than the first question.
        if not (is_traced() or is_invariant):
            ready = self._ready.again(x, bias, tensors)
            if ready is not None:
                return ready
        is_direct = not is_invariant and linear_op.is_direct(x, bias)
        if is_direct and (ready := self._ready(x, bias, tensors)) is not None:
            return ready
        layout = self.packed, self.codebook, self._format, self.batch_invariant
        y = linear_op(x, *layout, bias, *self.shape)
        if is_direct:  # The op has checked the arguments.
            self._ready.keep(x, self._format, self.geometry.columns, self.shape[0])
        return y

    def unpack(self) -> QuantisedTensor:
        """See ``Layout``."""
        packed, scale, zero_point = take_back(self.geometry, self.packed)
        if self.format.scale_dtype == "e8m0":
            scale = (scale.view(torch.int16) >> 7).to(torch.uint8)
        if zero_point is not None:
            zero_point = zero_point.to(zero_point_dtype(self.format))
        codebook = self.canonical_codebook
        return QuantisedTensor(self.format, self.shape, packed, scale, codebook, zero_point)


class MarlinBackend:
    """Both backends: they differ in the formats that they take.

    Args:
        name: ``marlin`` or ``marlin-lut``.
        takes_affine: whether formats with zero points are taken.
        codebooks: names of the codebooks that are taken, or None for all.
        batch_invariant: of the layouts it packs, see ``MarlinLayout``.
    """

    def __init__(
        self,
        name: str,
        *,
        takes_affine: bool,
        codebooks: tuple[str, ...] | None,
        batch_invariant: bool = False,
    ) -> None:
        self.name, self.takes_affine, self.codebooks = name, takes_affine, codebooks
        self.batch_invariant = batch_invariant

    def unsupported(self, problem: Problem) -> str | None:
        """See ``Backend``."""
        if problem.activations != "float":
            return f"has no {problem.activations} activations"
        format = problem.format
        if format.is_affine and not self.takes_affine:
            return "needs a codebook, got an affine format (the backend marlin takes those)"
        taken = self.codebooks
        if not format.is_affine and taken is not None and format.codebook not in taken:
            return f"needs an affine or integer grid, got the codebook {format.codebook}"
        if problem.dtype not in DTYPES:
            return f"needs activations of {' or '.join(map(str, DTYPES))}, got {problem.dtype}"
        reason = why_not(format, problem.k) or why_no_gpu(problem.device)
        return reason or why_unavailable()

    def priority(self, problem: Problem) -> int:
        """Above ``triton``, which no shape recorded on an H100 or H200 has ahead of Marlin."""
        return 20

    def pack(self, q: QuantisedTensor, *, dtype: torch.dtype, activations: str = "float") -> Layout:
        """See ``Backend``."""
        return MarlinLayout(q, dtype, batch_invariant=self.batch_invariant)


def marlin_backends(*, batch_invariant: bool = False) -> tuple[MarlinBackend, MarlinBackend]:
    """``marlin`` and ``marlin-lut``."""
    return (
        MarlinBackend(
            "marlin", takes_affine=True, codebooks=("int",), batch_invariant=batch_invariant
        ),
        MarlinBackend(
            "marlin-lut", takes_affine=False, codebooks=None, batch_invariant=batch_invariant
        ),
    )


MARLIN, MARLIN_LUT = marlin_backends()


def _computed_format(q: QuantisedTensor, dtype: torch.dtype) -> Format:
    """The format by which kernels may compute what codes stand for: ``custom`` where they may not.

    The table of a weight is what counts, not its name: 1 bit is ``binary`` where its values are -c
    and c as kernels have them, in the dtype of the activations. Of the integers from -127 to 127
    the last comes twice, so that its second code is none to compute. (``quantise`` does not give
    it; older files and codes that others made may hold it.)
    """
    if q.format.bits == 1 and q.codebook is not None:
        low, high = q.codebook.to(dtype)
        by_signs = bool(low == -high)
        return replace(q.format, codebook="binary" if by_signs else "custom")
    if not has_grid(q.format):
        return q.format
    grid = named_codebook(q.format, q.shape[1]).tensor(q.device)
    assert q.codebook is not None
    computes = torch.equal(q.codebook, grid)
    if computes and q.format.scale_rule != "signmax" and q.packed.numel() > 0:
        computes = int(q.packed.max()) < 255
    return q.format if computes else replace(q.format, codebook="custom")


def _stored(scale: Tensor, format: Format) -> Tensor:
    """The scales as the layout holds them: the same bits, or for e8m0 the same values in bf16."""
    if format.scale_dtype == "e8m0":
        return decode_scale(scale).to(STORED_DTYPES["e8m0"])
    return scale
