"""What the tests of the Triton kernels share."""

import re
import subprocess
from pathlib import Path

import triton

from fdk_cuda.triton import TritonLayout, launch


def weight(layout: TritonLayout) -> launch.Weight:
    """A layout's weight as the kernels take it."""
    tensors = (layout.words, layout.scale, layout.zero_point, layout.values, layout.lanes)
    return launch.Weight(*tensors, layout.arrangement)


def check_hopper(ptx: str) -> None:
    """No stack, and products that run on, of registers, of a kernel in Gluon for 9.0."""
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [str(ptxas), "-arch=sm_90a", "-v", "-o", "/dev/null", "/dev/stdin"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert " 0 bytes stack frame" in done.stderr, done.stderr
    assert "serialized" not in done.stderr, done.stderr  # C7510 to C7515: it waits for each wgmma
    # Operand A is four registers; a descriptor of shared memory would be one.
    products = operands_of(ptx)
    assert products
    assert all(operand.count("%") + operand.count("$") == 4 for operand in products)
    # Sums are stored over x: after a barrier behind the last wait, which is of one group of warps.
    end = ptx[ptx.rindex("wgmma.wait_group.sync.aligned 0") :]
    assert "bar.sync" in re.split(r"st\.shared|stmatrix", end)[0]


def operands_of(ptx: str) -> list[str]:
    """Operand A of every wgmma."""
    return re.findall(r"wgmma\.mma_async\S* *\{[^}]*\}, *(\{[^}]*\})", ptx)
