"""The peak memory of the blockwise ops, each in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from fdk_formats.blockwise.torch_kernels import CHUNK

# The peak of the process while the op runs, above what it held before and what the op returns.
# The op runs on a small tensor first, so that threads, tables and code are not counted.
SCRIPT = """
import re, torch
from fdk_formats.blockwise import *

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def run(q=None, x=None):
    if {quantise!r}:
        return {op}(x, nested=True)
    return {op}(q)

torch.set_num_threads(2)
register_kernels("cpu", TORCH_KERNELS)
x = torch.randn(4096, 4096).to(torch.bfloat16)
q = None if {quantise!r} else {made_by}(x, nested=True)
run({made_by}(x[:64], nested=True), x[:64])
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")
before = status("VmRSS")
result = run(q, x)
print(status("VmHWM") - before - result.nbytes)
"""

OPS = {
    "quantise_blockwise": "quantise_blockwise",
    "quantise_4bit": "quantise_4bit",
    "dequantise_blockwise": "quantise_blockwise",
    "dequantise_4bit": "quantise_4bit",
}


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs /proc to read and reset the peak"
)
@pytest.mark.parametrize("op", OPS)
def test_extra_memory_is_that_of_chunks(op):
    script = SCRIPT.format(op=op, made_by=OPS[op], quantise=op.startswith("quantise"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    extra = int(done.stdout)
    # 12 float32 chunks are 24 MiB to quantise; the tensor is 32 MiB, and its float32 copy would be
    # 64. Dequantising has the absmax where that is nested, 1 MiB, and little else: 1 MiB is the
    # allocator's.
    limit = 12 * 4 * CHUNK if op.startswith("quantise") else 2 << 20
    assert extra < limit, f"{op} took {extra / 2**20:.1f} MiB beyond its result"
