"""What the tests of the Triton kernels share."""

import re
import subprocess
from tempfile import NamedTemporaryFile
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.interpreter import InterpreterBuilder

from fdk_cuda.triton import TritonLayout, launch
from fdk_cuda.triton.configs import DgradConfig, GemmConfig

# Bytes of stack that a thread may take. Configurations take none with Triton 3.7; before and after
# it registers go to other values, and some configurations have a few: docs/design/triton.md.
MAX_STACK = 0 if triton.__version__.startswith("3.7.") else 64

# One configuration per number of rows.
GEMM_CONFIGS = (
    GemmConfig(n_tiles=1, warps=4, block_m=32),
    GemmConfig(n_tiles=1, warps=8, block_m=64),
    GemmConfig(n_tiles=1, warps=8, block_m=128),
)
DGRAD_CONFIGS = (
    DgradConfig(n_tiles=1, warps=8, m_tiles=1, overlap=True),
    DgradConfig(n_tiles=1, warps=4, m_tiles=2, ahead=0, overlap=True),
    DgradConfig(n_tiles=1, warps=4, m_tiles=4, ahead=0, overlap=True),
)


def weight(layout: TritonLayout) -> launch.PackedWeight:
    """A layout's weight as the kernels take it."""
    tensors = (layout.words, layout.scale, layout.zero_point, layout.values, layout.lanes)
    return launch.PackedWeight(*tensors, layout.packed_layout)


def mend_interpreter() -> None:
    """Has masks of a scalar's comparison be bool: Triton 3.9's interpreter refuses others.

    It spreads what comes of a comparison in the dtype of what was compared.
    """
    spread = InterpreterBuilder.create_splat

    def create_splat(self: object, type: Any, scalar: Any) -> Any:
        result = spread(self, type, scalar)
        if type.scalar == tl.int1:
            result.data = result.data.astype(bool)
        return result

    InterpreterBuilder.create_splat = create_splat


def registers_and_stack(compiled: Any) -> tuple[int, int]:
    """Of a thread, in registers and bytes, as ptxas made it for Triton, by Triton's options."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout).groups()
    return int(registers), int(stack)


def check_stack(compiled: Any) -> None:
    """None, by the Triton that configurations are chosen with."""
    _, stack = registers_and_stack(compiled)
    assert stack <= MAX_STACK


def check_hopper(compiled: Any) -> None:
    """No stack, and products that run on, of registers, of a kernel in Gluon for 9.0."""
    check_stack(compiled)
    ptx = compiled.asm["ptx"]
    command = [get_ptxas(90).path, "-arch=sm_90a", "-v", "-o", "/dev/null", "/dev/stdin"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
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
