"""Weights into the Marlin layout and back: by a kernel on a GPU, by torch elsewhere."""

import torch
from torch import Tensor

from fdk_cuda.marlin.instantiations import layout_kernel, layout_program
from fdk_cuda.marlin.layout import BLOCK_COLUMNS, BLOCK_ROWS, Geometry, pack_layout, unpack_layout
from fdk_cuda.nvrtc import Launch, why_unavailable
from fdk_formats.packing import packed_width

# The notation of ``struct`` for layout.cu's Params.
LAYOUT_FIELDS = "4P7i"
# Blocks of 32 x 64 side by side that a block of threads takes, a warp each; its canonical bytes are
# moved 8 at a time where rows hold them whole.
WARPS, UNIT_BYTES = 8, 8


def lay_out(geometry: Geometry, packed: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """``pack_layout``, with no temporaries on a GPU."""
    if not _has_kernel(packed):
        return pack_layout(geometry, packed, scale, zero_point)
    kinds = [kind.contiguous() for kind in (scale, zero_point) if kind is not None]
    laid_out = packed.new_empty(geometry.shape)
    _run("lay_out", geometry, packed.contiguous(), kinds, laid_out)
    return laid_out


def take_back(geometry: Geometry, laid_out: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """``unpack_layout``, with no temporaries on a GPU."""
    g = geometry
    if not _has_kernel(laid_out):
        return unpack_layout(g, laid_out)
    packed = laid_out.new_empty((g.n, packed_width(g.bits, g.k)))
    shape = g.n, g.k // g.group_size
    kinds = [
        laid_out.new_empty(shape, dtype=g.scale_dtype) for _ in range(2 if g.has_zero_point else 1)
    ]
    _run("take_back", g, packed, kinds, laid_out)
    return packed, kinds[0], kinds[1] if g.has_zero_point else None


def layout_fields(geometry: Geometry, *, is_aligned: bool) -> tuple[int, ...]:
    """The fields of layout.cu's Params after the pointers.

    Args:
        geometry: of the weight.
        is_aligned: whether the canonical bytes begin at a multiple of ``UNIT_BYTES``.
    """
    g = geometry
    is_whole = is_aligned and g.k % BLOCK_COLUMNS == 0
    row_bytes = packed_width(g.bits, g.k)
    return g.n, g.k, g.columns, row_bytes, g.k // g.group_size, g.repeats, int(is_whole)


def layout_grid(geometry: Geometry) -> int:
    """Blocks of threads."""
    row_blocks, column_blocks, _ = geometry.shape
    return row_blocks * -(-column_blocks // WARPS)


def shared_bytes(bits: int) -> int:
    """Of a block of threads: layout.cu's tile of 32 rows."""
    return BLOCK_ROWS * (WARPS * BLOCK_COLUMNS * bits // 8 + (8 if bits % 2 else 4) * bits)


def _run(
    entry: str, geometry: Geometry, packed: Tensor, kinds: list[Tensor], laid_out: Tensor
) -> None:
    if laid_out.numel() == 0:
        return
    launch = Launch(
        layout_kernel(layout_program(geometry), entry),
        laid_out.get_device(),
        fields=LAYOUT_FIELDS,
        grid=layout_grid(geometry),
        threads=32 * WARPS,
        shared_bytes=shared_bytes(geometry.bits),
    )
    pointers = packed.data_ptr(), kinds[0].data_ptr(), kinds[-1].data_ptr(), laid_out.data_ptr()
    is_aligned = packed.data_ptr() % UNIT_BYTES == 0
    launch(*pointers, *layout_fields(geometry, is_aligned=is_aligned))


def _has_kernel(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.version.hip is None and why_unavailable() is None
