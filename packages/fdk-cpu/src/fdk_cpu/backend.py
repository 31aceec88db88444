"""The backend ``cpu``: every format on CPU tensors, in one packed layout."""

import torch
from torch import Tensor

from fdk_cpu import _native
from fdk_cpu.expert_linear import CpuExpertLayout
from fdk_cpu.linear import (
    NativeWeightCache,
    lut_linear_int8_op,
    lut_linear_op,
    supports_direct_call,
)
from fdk_cpu.native_args import FLOAT_NAMES
from fdk_cpu.tiles import Tiles, supported_dtypes
from fdk_formats.backends import (
    ExpertLayout,
    Layout,
    Problem,
    all_reasons,
    check_activations,
    check_unrotated,
    no_activations,
    register,
    wrong_dtype,
)
from fdk_formats.int8 import int8_table
from fdk_formats.tensor import QuantisedStack, QuantisedTensor
from fdk_formats.torch_internals import is_plain_call


class CpuLayout(Layout):
    """A weight packed in tiles of 4 rows by ``_native.TILE_K`` positions of k.

    native/common/layout.h describes the bytes.

    codes      :: [stripes, tiles, 64 * bits, uint8]
    scale      :: [stripes, stored groups, 4, scale dtype]
    zero_point :: like scale, or None
    codebook   :: [2^bits, float32], or None for affine formats

    Args:
        q: the weight.
        batch_invariant: a row of y does not depend on the other rows of x or their number, nor on
            the threads. The gradient does depend on them.

    Attributes:
        dtypes: the dtypes of x that ``forward`` supports; the bytes are the same for each.
    """

    codes: Tensor
    scale: Tensor
    codebook: Tensor | None
    zero_point: Tensor | None

    def __init__(self, q: QuantisedTensor, *, batch_invariant: bool = False) -> None:
        super().__init__()
        self.batch_invariant, self.dtypes = batch_invariant, supported_dtypes(q)
        self.format, self.shape, self.group_size = q.format, q.shape, q.group_size
        tiles = Tiles(q.shape, q.group_size, q.format.bits)
        self.register_buffer("codes", tiles.pack_codes(q.packed), persistent=False)
        for name in ("scale", "zero_point"):
            tensor = getattr(q, name)
            packed = None if tensor is None else tiles.pack_groups(tensor)
            self.register_buffer(name, packed, persistent=False)
        codebook = None if q.codebook is None else q.codebook.contiguous()
        self.register_buffer("codebook", codebook, persistent=False)
        self._weight = NativeWeightCache()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``Layout``."""
        n, k = self.shape
        if is_plain_call(x, bias) and supports_direct_call(x, bias, n, k):
            # Read the dict: nn.Module takes a microsecond to find a buffer as an attribute.
            group_size, bits = self.group_size, self.format.bits
            return self._weight.linear(
                x, bias, self._buffers, group_size, bits, n, self.batch_invariant
            )
        tensors = (self.codes, self.scale, self.codebook, self.zero_point)
        options = self.group_size, self.format.bits, self.batch_invariant
        return lut_linear_op(x, *tensors, *options, bias, n, k)

    def unpack(self) -> QuantisedTensor:
        """See ``Layout``."""
        tiles = Tiles(self.shape, self.group_size, self.format.bits)
        zero_point = None if self.zero_point is None else tiles.unpack_groups(self.zero_point)
        return QuantisedTensor(
            self.format,
            self.shape,
            tiles.unpack_codes(self.codes),
            tiles.unpack_groups(self.scale),
            self.codebook,
            zero_point,
        )


class CpuInt8Layout(CpuLayout):
    """The same bytes, multiplied with x rounded to 8 bits (``fdk_formats.int8``).

    levels :: [2^bits, int8], or None for affine formats
    """

    levels: Tensor | None

    def __init__(self, q: QuantisedTensor, *, batch_invariant: bool = False) -> None:
        super().__init__(q, batch_invariant=batch_invariant)
        table = None if q.codebook is None else int8_table(q.codebook)
        self.step, self.offset = (1.0, 0.0) if table is None else (table.step, table.offset)
        levels = None if table is None else table.levels
        self.register_buffer("levels", levels, persistent=False)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``Layout``."""
        n, k = self.shape
        group_size, bits, table = self.group_size, self.format.bits, (self.step, self.offset)
        invariant = self.batch_invariant
        if is_plain_call(x, bias) and supports_direct_call(x, bias, n, k):
            return self._weight.linear(
                x, bias, self._buffers, group_size, bits, n, invariant, table
            )
        tensors = (self.codes, self.scale, self.codebook, self.zero_point)
        options = group_size, bits, invariant, self.levels, *table
        return lut_linear_int8_op(x, *tensors, *options, bias, n, k)


class CpuBackend:
    """The backend for tensors on the CPU; it supports every format.

    Attributes:
        batch_invariant: property of the layouts that it packs, see ``CpuLayout``.
    """

    name = "cpu"

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant

    def unsupported(self, problem: Problem) -> str | None:
        """See ``Backend``."""
        is_cpu = problem.device.type == "cpu"
        return all_reasons(
            None if is_cpu else f"needs tensors on the CPU, got {problem.device}",
            wrong_dtype(problem.dtype, FLOAT_NAMES),
            None if problem.experts is None else no_activations(problem),
        )

    def priority(self, problem: Problem) -> int:
        """See ``Backend``."""
        return 10

    def pack(self, q: QuantisedTensor, *, dtype: torch.dtype, activations: str = "float") -> Layout:
        """See ``Backend``.

        Raises:
            TypeError: if ``dtype`` is not one of ``FLOAT_NAMES``.
            ValueError: if rows are padded with code 0 and the codebook's first entry overflows
                ``dtype``, and for ``activations`` that no ``Problem`` has.
        """
        check_activations(activations)
        _check(q, dtype)
        kind = CpuLayout if activations == "float" else CpuInt8Layout
        return kind(q, batch_invariant=self.batch_invariant)

    def pack_stack(
        self, stack: QuantisedStack, *, dtype: torch.dtype, activations: str = "float"
    ) -> ExpertLayout:
        """See ``ExpertBackend``; raises as ``pack``."""
        _check(stack, dtype)
        return CpuExpertLayout(stack, batch_invariant=self.batch_invariant)


def _check(q: QuantisedTensor | QuantisedStack, dtype: torch.dtype) -> None:
    check_unrotated(q.format)
    if dtype not in FLOAT_NAMES:
        wanted = ", ".join(map(str, FLOAT_NAMES))
        raise TypeError(f"fdk_cpu: needs activations of {wanted}, got {dtype}")
    if dtype not in supported_dtypes(q):
        assert q.codebook is not None
        first = q.codebook[..., 0].flatten()
        raise ValueError(
            f"fdk_cpu: needs a first codebook entry that {dtype} holds, or k a multiple of "
            f"{_native.TILE_K}, got {first[first.abs().argmax()]:g} and k={q.shape[-1]}"
        )


def register_backends(*, batch_invariant: bool = False) -> None:
    """Register ``cpu`` again, for layers packed from now on.

    Args:
        batch_invariant: a row of y does not depend on m; docs/guide/serve.md has what it costs.
    """
    register(CpuBackend(batch_invariant=batch_invariant))


register_backends()
