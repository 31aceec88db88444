"""The order of barriers and shared memory in what the compiler makes of the Hopper kernel."""

import re

import pytest
import torch
from cuda.bindings import nvrtc

from fdk_cuda.marlin.instantiations import HopperShape, Variant, hopper_program
from fdk_cuda.nvrtc import Program

KINDS = {
    "st.shared.v4.f32": "send",
    "ld.shared.v4.f32": "receive",
    "bar.sync": "sync",
    "barrier.cluster.wait": "cluster",
    "stmatrix": "store",
}


def memory_order(program: Program) -> list[str]:
    """What PTX does with sums in shared memory, in its order, by the names of ``KINDS``."""
    names = [name.encode() for name, _ in program.headers]
    texts = [text.encode() for _, text in program.headers]
    status, handle = nvrtc.nvrtcCreateProgram(
        program.source.encode(), program.name.encode(), len(names), texts, names
    )
    assert not status.value
    common = "-arch=compute_90a", "--std=c++17", "--device-as-default-execution-space"
    options = [option.encode() for option in (*common, *program.options)]
    assert not nvrtc.nvrtcCompileProgram(handle, len(options), options)[0].value
    ptx = bytearray(nvrtc.nvrtcGetPTXSize(handle)[1])
    nvrtc.nvrtcGetPTX(handle, ptx)
    nvrtc.nvrtcDestroyProgram(handle)
    found = re.findall("|".join(map(re.escape, KINDS)), ptx.decode())
    return [KINDS[instruction] for instruction in found]


@pytest.mark.parametrize(("columns", "cluster"), [(32, 1), (32, 2), (64, 2)])
def test_a_pair_is_read_before_y_goes_through_its_memory(columns: int, cluster: int) -> None:
    """Some warp of a group may have stored its part of y before another has read its sums."""
    variant = Variant(4, torch.bfloat16, torch.bfloat16, 1, False)
    shape = HopperShape(columns, 4, 2, 4, cluster, has_table=True, k_groups=2)
    order = memory_order(hopper_program(variant, shape))
    last_sent = len(order) - 1 - order[::-1].index("send")
    between = order[last_sent : order.index("store")]
    # The send, the barrier behind it, what is received, and the barrier that it is about.
    assert between[1:3] == ["sync", "receive"]
    after = between[2:]
    assert {"sync", "cluster"} & set(after[after.index("receive") :]), order
