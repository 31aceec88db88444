"""Canonical weights to the Marlin layout and back: by a kernel on a GPU, by torch elsewhere."""

import torch
from torch import Tensor

from fdk_cuda.marlin.instantiations import repack_program, shared_kernel
from fdk_cuda.marlin.layout import BLOCK_K, BLOCK_N, Geometry, pack_layout, unpack_layout
from fdk_cuda.nvrtc import Launch, unavailable_reason
from fdk_formats.packing import packed_width

# Fields of repack.cu's Params, in the notation of ``struct``.
REPACK_FIELDS = "4P7i"
# Blocks of 32 x 64 weights along k in a thread block, a warp each. Canonical bytes are moved 8 at a
# time where rows hold whole units.
WARPS, UNIT_BYTES = 8, 8


def pack(geometry: Geometry, canonical: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Returns what ``pack_layout`` returns; on a GPU without temporaries."""
    if not _has_kernel(canonical):
        return pack_layout(geometry, canonical, scale, zero_point)
    kinds = [kind.contiguous() for kind in (scale, zero_point) if kind is not None]
    packed = canonical.new_empty(geometry.shape)
    _run("pack", geometry, canonical.contiguous(), kinds, packed)
    return packed


def unpack(geometry: Geometry, packed: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns what ``unpack_layout`` returns; on a GPU without temporaries."""
    g = geometry
    if not _has_kernel(packed):
        return unpack_layout(g, packed)
    canonical = packed.new_empty((g.n, packed_width(g.bits, g.k)))
    shape = g.n, g.k // g.group_size
    kinds = [
        packed.new_empty(shape, dtype=g.scale_dtype) for _ in range(2 if g.has_zero_point else 1)
    ]
    _run("unpack", g, canonical, kinds, packed)
    return canonical, kinds[0], kinds[1] if g.has_zero_point else None


def repack_fields(geometry: Geometry, *, is_aligned: bool) -> tuple[int, ...]:
    """Returns the fields of repack.cu's Params after the pointers.

    Args:
        geometry: geometry of the weight.
        is_aligned: whether the canonical bytes begin at a multiple of ``UNIT_BYTES``.
    """
    g = geometry
    is_whole = is_aligned and g.k % BLOCK_K == 0
    row_bytes = packed_width(g.bits, g.k)
    return g.n, g.k, g.padded_k, row_bytes, g.k // g.group_size, g.repeats, int(is_whole)


def repack_grid(geometry: Geometry) -> int:
    """Returns the number of thread blocks."""
    n_blocks, k_blocks, _ = geometry.shape
    return n_blocks * -(-k_blocks // WARPS)


def shared_bytes(bits: int) -> int:
    """Returns the shared memory of a thread block: repack.cu's tile of 32 rows."""
    return BLOCK_N * (WARPS * BLOCK_K * bits // 8 + (8 if bits % 2 else 4) * bits)


def _run(
    entry: str, geometry: Geometry, canonical: Tensor, kinds: list[Tensor], packed: Tensor
) -> None:
    if packed.numel() == 0:
        return
    launch = Launch(
        shared_kernel(repack_program(geometry), entry),
        packed.get_device(),
        fields=REPACK_FIELDS,
        grid=repack_grid(geometry),
        threads=32 * WARPS,
        shared_bytes=shared_bytes(geometry.bits),
    )
    pointers = canonical.data_ptr(), kinds[0].data_ptr(), kinds[-1].data_ptr(), packed.data_ptr()
    is_aligned = canonical.data_ptr() % UNIT_BYTES == 0
    launch(*pointers, *repack_fields(geometry, is_aligned=is_aligned))


def _has_kernel(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.version.hip is None and unavailable_reason() is None
