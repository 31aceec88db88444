# mypy: ignore-errors
"""Pipeline of shared-memory stages that TMA fills, for the Gluon kernels."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Columns of a stage: 16-bit rows of 128 bytes, the widest swizzle of TMA.
STEP = gl.constexpr(64)
# Triton 3.8 renamed the TMA copies; 3.9 has only the new names.
load_by_tma = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_by_tma = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


def shared_layout(bits: int) -> gl.NVMMASharedLayout:
    """Returns the layout of stages and stores, for elements of a number of bits."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)


@gluon.jit
def new_ring(desc, DTYPE: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):
    """Allocates the stages, and a barrier for each."""
    stages = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, STEP], desc.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=1)
    hopper.fence_async_shared()
    return stages, barriers


@gluon.jit
def after(stage, phase, STAGES: gl.constexpr):
    """Returns the next stage and the phase of its barrier."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def fetch_x(
    x_desc, x_stages, barriers, stage, row, step, last, COUNT: gl.constexpr, STAGES: gl.constexpr
):
    """Starts the copies of COUNT steps of x, from ``step`` on, into the stages from ``stage`` on.

    Steps from ``last`` on belong to other programs and are skipped.
    """
    at = stage
    for i in gl.static_range(COUNT):
        mbarrier.expect(barriers.index(at), x_desc.block_type.nbytes, pred=step + i < last)
        at = gl.where(at == STAGES - 1, 0, at + 1)
    # All warps are done with the old contents, and with the lines above.
    tl.debug_barrier()
    at = stage
    for i in gl.static_range(COUNT):
        place = [row, (step + i) * STEP]
        load_by_tma(x_desc, place, barriers.index(at), x_stages.index(at), pred=step + i < last)
        at = gl.where(at == STAGES - 1, 0, at + 1)
