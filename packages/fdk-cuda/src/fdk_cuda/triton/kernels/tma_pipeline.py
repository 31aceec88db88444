# mypy: ignore-errors
"""A ring of stages in shared memory that TMA fills, for the kernels in Gluon."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Columns of a stage: a row of 128 bytes of 16 bits each, as wide as TMA swizzles.
STEP = gl.constexpr(64)
# Triton 3.8 names TMA's copies anew, and 3.9 refuses the names of before.
load_by_tma = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_by_tma = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


def shared_layout(bits: int) -> gl.NVMMASharedLayout:
    """Of x and of what is stored, for elements of so many bits."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)


@gluon.jit
def new_ring(desc, DTYPE: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):
    """The stages, and a barrier for each."""
    stages = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, STEP], desc.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=1)
    hopper.fence_async_shared()
    return stages, barriers


@gluon.jit
def after(stage, phase, STAGES: gl.constexpr):
    """The next stage, and the phase of its barrier."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def fetch_x(
    x_desc, x_stages, barriers, stage, row, step, last, COUNT: gl.constexpr, STAGES: gl.constexpr
):
    """Has COUNT steps of x, from ``step`` on, brought to the stages from ``stage`` on.

    Those of them that are this program's. One barrier serves them all.
    """
    at = stage
    for i in gl.static_range(COUNT):
        mbarrier.expect(barriers.index(at), x_desc.block_type.nbytes, pred=step + i < last)
        at = gl.where(at == STAGES - 1, 0, at + 1)
    # All have done with what the stages held, and no thread runs ahead of the lines above.
    tl.debug_barrier()
    at = stage
    for i in gl.static_range(COUNT):
        place = [row, (step + i) * STEP]
        load_by_tma(x_desc, place, barriers.index(at), x_stages.index(at), pred=step + i < last)
        at = gl.where(at == STAGES - 1, 0, at + 1)
