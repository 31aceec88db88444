"""The backends ``marlin`` (affine and integer grids) and ``marlin-lut`` (any codebook)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fdk_cuda.gpu import unsupported_gpu
from fdk_cuda.launch_cache import LaunchCache
from fdk_cuda.marlin import repack
from fdk_cuda.marlin.layout import Geometry, has_grid, stored_dtype, unsupported_reason
from fdk_cuda.marlin.ops import DTYPES, linear_op, small_m_limit
from fdk_cuda.marlin.runtime import small_launch_for
from fdk_cuda.nvrtc import unavailable_reason
from fdk_cuda.stream_sync import SyncedLayout
from fdk_formats.backends import (
    Layout,
    Problem,
    all_reasons,
    check_unrotated,
    no_activations,
    wrong_dtype,
)
from fdk_formats.codebooks import named_codebook
from fdk_formats.format import Format
from fdk_formats.scales import decode_scale
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.torch_internals import is_plain_call


class MarlinLayout(SyncedLayout):
    """A weight in fragment order; see ``fdk_cuda.marlin.layout``.

    packed             :: [padded_n / 32, padded_k / 64, block bytes, uint8]
    codebook           :: [2^bits, dtype]     0, 1, 2, ... for affine formats
    canonical_codebook :: [2^bits, float32]   or None: the codebook that ``unpack`` returns

    Args:
        q: the weight.
        dtype: dtype of the activations.
        batch_invariant: a row of y does not depend on the other rows or their number; see
            docs/design/marlin.md for the cost.
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
        format = _kernel_format(q, dtype)
        self.geometry = Geometry.of(format, *q.shape)
        scale = _stored_scale(q.scale, q.format)
        zero_point = None if q.zero_point is None else q.zero_point.to(scale.dtype)
        packed = repack.pack(self.geometry, q.packed, scale, zero_point)
        codebook = q.codebook
        if codebook is None:
            codebook = torch.arange(1 << q.format.bits, dtype=torch.float32, device=q.device)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("codebook", codebook.to(dtype), persistent=False)
        self.register_buffer("canonical_codebook", q.codebook, persistent=False)
        self._format, self._launches = str(format), LaunchCache()
        self.synchronise()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns ``x @ W_hat.T + bias``, see ``Layout``."""
        if self.batch_invariant or not is_plain_call(x, bias):
            return self._linear(x, bias)
        tensors: Any = self._buffers  # nn.Module takes 0.5 us to find one as an attribute
        packed, codebook = tensors["packed"], tensors["codebook"]
        addresses = packed.data_ptr(), codebook.data_ptr()
        state = packed.get_device(), codebook.dtype
        y = self._launches.launch(x, bias, addresses, state)
        if y is None:
            y = self._linear(x, bias)
            self._launches.insert(x, bias, y, state, self._prepare_launch)
        return y

    def _linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Calls the op, which checks x and bias."""
        layout = self.packed, self.codebook, self._format, self.batch_invariant
        return linear_op(x, *layout, bias, *self.shape)

    def _prepare_launch(self, x: Tensor, bias: Tensor | None) -> Callable[..., None] | None:
        """Prepares small_m.cu for x; None where another kernel runs or x has to be padded."""
        (n, k), device = self.shape, x.get_device()
        m = x.numel() // k
        if k != self.geometry.padded_k or m > small_m_limit(self._format, n, k, device):
            return None
        launch, fields = small_launch_for(self._format, x.dtype, m, n, k, device, False)
        return launch.bound(*fields).__call__

    def unpack(self) -> QuantisedTensor:
        """Returns the weight in canonical form, see ``Layout``."""
        packed, scale, zero_point = repack.unpack(self.geometry, self.packed)
        if self.format.has_power_of_two_scale:
            scale = (scale.view(torch.int16) >> 7).to(torch.uint8)
        if zero_point is not None:
            zero_point = zero_point.to(self.format.stored_zero_point_dtype)
        codebook = self.canonical_codebook
        return QuantisedTensor(self.format, self.shape, packed, scale, codebook, zero_point)


class MarlinBackend:
    """Either backend: they differ in the formats that they support.

    Args:
        name: ``marlin`` or ``marlin-lut``.
        takes_affine: True to support formats with zero points.
        grids_only: True to support, of the codebooks, integer grids only.
        batch_invariant: property of the layouts that it packs, see ``MarlinLayout``.
    """

    def __init__(
        self, name: str, *, takes_affine: bool, grids_only: bool, batch_invariant: bool = False
    ) -> None:
        self.name, self.takes_affine, self.grids_only = name, takes_affine, grids_only
        self.batch_invariant = batch_invariant

    def unsupported(self, problem: Problem) -> str | None:
        """Returns every reason why a layer is not supported, or None; see ``Backend``."""
        format, dtype = problem.format, problem.dtype
        is_known_codebook = format.is_affine or format.is_grid or not self.grids_only
        return all_reasons(
            no_activations(problem),
            "needs a codebook, got an affine format (the backend marlin takes those)"
            if format.is_affine and not self.takes_affine
            else None,
            None
            if is_known_codebook
            else f"needs an affine or integer grid, got the codebook {format.codebook}",
            wrong_dtype(dtype, DTYPES),
            unsupported_reason(format, problem.k),
            unsupported_gpu(problem.device) or unavailable_reason(),
        )

    def priority(self, problem: Problem) -> int:
        """Returns a priority above triton's: Marlin was faster in every case measured on Hopper."""
        return 20

    def pack(self, q: QuantisedTensor, *, dtype: torch.dtype, activations: str = "float") -> Layout:
        """Returns the weight in the Marlin layout, see ``Backend``."""
        check_unrotated(q.format)
        return MarlinLayout(q, dtype, batch_invariant=self.batch_invariant)


def marlin_backends(*, batch_invariant: bool = False) -> tuple[MarlinBackend, MarlinBackend]:
    """Returns the backends ``marlin`` and ``marlin-lut``."""
    return (
        MarlinBackend(
            "marlin", takes_affine=True, grids_only=True, batch_invariant=batch_invariant
        ),
        MarlinBackend(
            "marlin-lut", takes_affine=False, grids_only=False, batch_invariant=batch_invariant
        ),
    )


MARLIN, MARLIN_LUT = marlin_backends()


def _kernel_format(q: QuantisedTensor, dtype: torch.dtype) -> Format:
    """Returns the format that kernels are compiled for: ``custom`` where they must look codes up.

    What counts is the weight's codebook, not its name. 1 bit is ``binary`` if its values are -c and
    c in the dtype of the activations. The 8-bit grid from -127 to 127 holds 127 twice, so a weight
    with code 255 is looked up. ``quantise`` never gives that code; older files may hold it.
    """
    if q.format.bits == 1 and q.codebook is not None:
        low, high = q.codebook.to(dtype)
        return replace(q.format, codebook="binary" if bool(low == -high) else "custom")
    if not has_grid(q.format):
        return q.format
    grid = named_codebook(q.format, q.shape[1]).tensor(q.device)
    assert q.codebook is not None
    is_computed = torch.equal(q.codebook, grid)
    if is_computed and q.format.has_repeated_top and q.packed.numel() > 0:
        is_computed = int(q.packed.max()) < 255
    return q.format if is_computed else replace(q.format, codebook="custom")


def _stored_scale(scale: Tensor, format: Format) -> Tensor:
    """Returns the scales as the layout stores them: e8m0 as bf16, others unchanged."""
    if format.has_power_of_two_scale:
        return decode_scale(scale).to(stored_dtype(format))
    return scale
