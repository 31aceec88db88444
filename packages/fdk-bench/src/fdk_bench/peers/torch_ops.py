"""torch's own 4-bit kernels: tinygemm on a GPU, int4pack on a CPU."""

from functools import partial

import torch
from torch import Tensor

from fdk_bench.cases import KernelCase
from fdk_bench.peers.base import Prepared, copies_of
from fdk_bench.peers.integers import needs, random_integers

GROUP_SIZES = (32, 64, 128, 256)
# Of 2, 4 and 8 the fastest wherever k allows it (torchao's choice too); a tile is 16 columns.
INNER_TILES = (8, 4, 2)


class TinyGemm:
    """``torch._weight_int4pack_mm``: integer codes with bf16 scales and zero points."""

    name = "tinygemm"
    note = "integer grid with zero points"

    def missing(self) -> str | None:
        """See ``Peer``."""
        return None if torch.cuda.is_available() else "needs an NVIDIA GPU: torch finds none"

    def unsupported(self, case: KernelCase) -> str | None:
        """See ``Peer``."""
        if reason := needs(case, device="cuda", bits=(4,), dtypes=("bf16",)):
            return reason
        return _unsupported_shape(case, rows=8, columns=16 * INNER_TILES[-1])

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """See ``Peer``."""
        weight = random_integers(case)
        pairs = weight.codes[:, ::2] << 4 | weight.codes[:, 1::2]
        tiles = next(tiles for tiles in INNER_TILES if case.k % (16 * tiles) == 0)
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs, tiles)
        op = torch.ops.aten._weight_int4pack_mm
        return _prepared(case, packed, weight.scale, weight.dequantise, op, self.name, copies)


class Int4PackCpu:
    """``torch._weight_int4pack_mm_for_cpu``."""

    name = "int4pack"
    note = "integer grid with zero points"

    def missing(self) -> str | None:
        """See ``Peer``."""
        return None

    def unsupported(self, case: KernelCase) -> str | None:
        """See ``Peer``."""
        dtypes = ("bf16", "fp16", "fp32")
        if reason := needs(case, device="cpu", bits=(4,), dtypes=dtypes):
            return reason
        return _unsupported_shape(case, rows=16, columns=2)

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """See ``Peer``."""
        weight = random_integers(case)
        codes = weight.codes.to(torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
        op = torch.ops.aten._weight_int4pack_mm_for_cpu
        return _prepared(case, packed, weight.scale, weight.dequantise, op, self.name, copies)


def _unsupported_shape(case: KernelCase, *, rows: int, columns: int) -> str | None:
    if case.group_size not in GROUP_SIZES:
        return f"needs groups of {', '.join(map(str, GROUP_SIZES))}, got {case.group_size}"
    if case.n % rows or case.k % columns:
        return f"needs n % {rows} == 0 and k % {columns} == 0, got n={case.n}, k={case.k}"
    return None


def _prepared(  # type: ignore[no-untyped-def]
    case: KernelCase, packed: Tensor, scale: Tensor, weight, op, name: str, copies: int | None
) -> Prepared:
    zeros = torch.zeros_like(scale)
    pairs = torch.stack((scale, zeros), dim=-1).transpose(0, 1).contiguous()  # [k/G, n, 2]
    nbytes = packed.nbytes + pairs.nbytes
    calls = [
        partial(_int4pack, packed.clone(), pairs.clone(), case.group_size, op)
        for _ in range(copies_of(case, nbytes, copies))
    ]
    return Prepared(calls, weight, nbytes, name)


def _int4pack(packed: Tensor, pairs: Tensor, group_size: int, op, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    y: Tensor = op(x, packed, group_size, pairs)
    return y
