"""What tests of the Marlin kernels without a GPU share: devices, shapes, compiling."""

from fdk_cuda import nvrtc
from fdk_cuda.marlin.heuristics_small_m import Device
from fdk_cuda.marlin.layout import Geometry

DEVICES = {
    "sm_80": Device(sm_count=108, shared_bytes=166912, has_clusters=False),
    "sm_90a": Device(sm_count=132, shared_bytes=232448, has_clusters=True, is_hopper=True),
    "sm_120": Device(sm_count=170, shared_bytes=101376, has_clusters=True),
}


def geometry_of(variant, n=8192, k=8192):
    group_size = 32 if variant.per_row == 2 else 64
    zero_points = variant.affine, variant.whole_zero_point, variant.grid_zero_point
    kinds = *zero_points, variant.has_signs
    return Geometry(variant.bits, n, k, group_size, variant.scale_dtype, *kinds)


def check_resources(program, arch, shape=None):
    resources = nvrtc.compile_program(program, arch).resources
    assert (resources.stack_bytes, resources.spill_bytes) == (0, 0), (program.options, shape)
