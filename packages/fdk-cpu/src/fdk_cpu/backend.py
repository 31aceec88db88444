"""The backend ``cpu``: every format on CPU tensors, from one packed layout."""

import torch
from torch import Tensor

from fdk_cpu import _native
from fdk_cpu.arguments import FLOAT_NAMES
from fdk_cpu.linear import (
    KeptWeight,
    lut_linear_int8_op,
    lut_linear_op,
    takes,
)
from fdk_cpu.memory import weight_memory
from fdk_cpu.runtime import num_threads
from fdk_formats.backends import Layout, Problem, check_activations, register
from fdk_formats.int8 import int8_table
from fdk_formats.tensor import QuantisedTensor


class CpuLayout(Layout):
    """Codes in tiles of 4 rows by ``_native.TILE_K`` inner positions; see native/common/layout.h.

    codes      :: [stripes, tiles, 64 * bits, uint8]
    scale      :: [stripes, groups stored, 4, scale dtype]
    zero_point :: like scale, or None
    codebook   :: [2^bits, float32] or None
    """

    codes: Tensor
    scale: Tensor
    codebook: Tensor | None
    zero_point: Tensor | None

    def __init__(self, q: QuantisedTensor) -> None:
        super().__init__()
        self.format, self.shape, self.group_size = q.format, q.shape, q.group_size
        code_bytes, _ = self._sizes()
        codes = weight_memory(code_bytes, torch.uint8)
        self._convert_codes(q.packed.contiguous(), codes, to_layout=True)
        self.register_buffer("codes", codes, persistent=False)
        for name in ("scale", "zero_point"):
            tensor = getattr(q, name)
            laid_out = None if tensor is None else self._lay_out_groups(tensor.contiguous())
            self.register_buffer(name, laid_out, persistent=False)
        codebook = None if q.codebook is None else q.codebook.contiguous()
        self.register_buffer("codebook", codebook, persistent=False)
        self._kept = KeptWeight()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``Layout``."""
        n, k = self.shape
        if lut_linear_op.is_direct(x, bias) and takes(x, bias, n, k):
            # Not by attribute: nn.Module takes a microsecond to find a buffer.
            return self._kept.linear(x, bias, self._buffers, self.group_size, self.format.bits, n)
        group_size, bits = self.group_size, self.format.bits
        return lut_linear_op(
            x, self.codes, self.scale, self.codebook, self.zero_point, group_size, bits, bias, n, k
        )

    def unpack(self) -> QuantisedTensor:
        """See ``Layout``."""
        n, k = self.shape
        packed = torch.empty((n, (k * self.format.bits + 7) // 8), dtype=torch.uint8, device="cpu")
        self._convert_codes(packed, self.codes, to_layout=False)
        zero_point = None if self.zero_point is None else self._restore_groups(self.zero_point)
        scale = self._restore_groups(self.scale)
        return QuantisedTensor(self.format, self.shape, packed, scale, self.codebook, zero_point)

    def _sizes(self) -> tuple[int, int]:
        """Bytes of codes, and scales: none of a layer without outputs."""
        if self.shape[0] == 0:
            return 0, 0
        sizes: tuple[int, int] = _native.layout_sizes(
            *self.shape, self.group_size, self.format.bits
        )
        return sizes

    def _convert_codes(self, packed: Tensor, codes: Tensor, *, to_layout: bool) -> None:
        if self.shape[0] == 0:
            return
        _native.convert_codes(
            *self.shape,
            self.group_size,
            self.format.bits,
            (packed.data_ptr(), packed.nbytes),
            (codes.data_ptr(), codes.nbytes),
            to_layout,
            num_threads(),
        )

    def _lay_out_groups(self, groups: Tensor) -> Tensor:
        _, stored = self._sizes()
        laid_out = weight_memory(stored, groups.dtype)
        self._convert_groups(groups, laid_out, to_layout=True)
        return laid_out

    def _restore_groups(self, laid_out: Tensor) -> Tensor:
        n, k = self.shape
        groups = torch.empty((n, k // self.group_size), dtype=laid_out.dtype, device="cpu")
        self._convert_groups(groups, laid_out, to_layout=False)
        return groups

    def _convert_groups(self, groups: Tensor, laid_out: Tensor, *, to_layout: bool) -> None:
        if self.shape[0] == 0:
            return
        _native.convert_groups(
            *self.shape,
            self.group_size,
            groups.element_size(),
            (groups.data_ptr(), groups.nbytes),
            (laid_out.data_ptr(), laid_out.nbytes),
            to_layout,
        )


class CpuInt8Layout(CpuLayout):
    """The same bytes, and products with x rounded to 8 bits, see ``fdk_formats.int8``.

    levels :: [2^bits, int8], or None for affine formats
    """

    levels: Tensor | None

    def __init__(self, q: QuantisedTensor) -> None:
        super().__init__(q)
        table = None if q.codebook is None else int8_table(q.codebook)
        self.step, self.offset = (1.0, 0.0) if table is None else (table.step, table.offset)
        levels = None if table is None else table.levels
        self.register_buffer("levels", levels, persistent=False)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``Layout``."""
        n, k = self.shape
        group_size, bits, table = self.group_size, self.format.bits, (self.step, self.offset)
        if lut_linear_int8_op.is_direct(x, bias) and takes(x, bias, n, k):
            return self._kept.linear(x, bias, self._buffers, group_size, bits, n, table)
        tensors = (self.codes, self.scale, self.codebook, self.zero_point)
        return lut_linear_int8_op(x, *tensors, group_size, bits, self.levels, *table, bias, n, k)


class CpuBackend:
    """Takes every format on the CPU."""

    name = "cpu"

    def unsupported(self, problem: Problem) -> str | None:
        """See ``Backend``."""
        if problem.device.type != "cpu":
            return f"needs tensors on the CPU, got {problem.device}"
        if problem.dtype not in FLOAT_NAMES:
            return f"needs activations of {', '.join(map(str, FLOAT_NAMES))}, got {problem.dtype}"
        return None

    def priority(self, problem: Problem) -> int:
        """See ``Backend``."""
        return 10

    def pack(self, q: QuantisedTensor, *, dtype: torch.dtype, activations: str = "float") -> Layout:
        """See ``Backend``.

        Raises:
            TypeError: for activations of another dtype than those of ``FLOAT_NAMES``.
            ValueError: where a row is filled up with a code, 0, that stands for an infinity, and
                for other ``activations`` than a ``Problem`` has.
        """
        check_activations(activations)
        if dtype not in FLOAT_NAMES:
            wanted = ", ".join(map(str, FLOAT_NAMES))
            raise TypeError(f"fdk_cpu: needs activations of {wanted}, got {dtype}")
        first = 0.0 if q.codebook is None else q.codebook[0].item()
        if q.shape[1] % _native.TILE_K and abs(first) > torch.finfo(dtype).max:
            raise ValueError(
                f"fdk_cpu: needs a first codebook entry that {dtype} holds, or k a multiple of "
                f"{_native.TILE_K}, got {first:g} and k={q.shape[1]}"
            )
        return CpuLayout(q) if activations == "float" else CpuInt8Layout(q)


register(CpuBackend())
