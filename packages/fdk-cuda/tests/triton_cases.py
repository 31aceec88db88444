"""What the tests of the Triton kernels share."""

from fdk_cuda.triton import TritonLayout, launch


def weight(layout: TritonLayout) -> launch.Weight:
    """A layout's weight as the kernels take it."""
    tensors = (layout.words, layout.scale, layout.zero_point, layout.values, layout.lanes)
    return launch.Weight(*tensors, layout.arrangement)
