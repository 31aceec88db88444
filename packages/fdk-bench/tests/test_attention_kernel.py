"""The attention kernel of a step, in Triton's interpreter, against that of torch."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import sys
import torch
from fdk_bench import attention_kernel as kernel
from fdk_bench.llama import Block, LlamaSize, rotary_table

heads, kv_heads, head_dim, batch, length, position, parts = map(int, sys.argv[1:])
torch.manual_seed(0)
size = LlamaSize(heads * head_dim, 1, heads, kv_heads, 64)
block = Block(
    size, "", lambda name, n, k: torch.nn.Identity(), fused=True, device="cpu", dtype=torch.float32
)
qkv = torch.randn(batch, 1, (heads + 2 * kv_heads) * head_dim)
cache = torch.randn(2, batch, kv_heads, length, head_dim)
cache[:, :, :, position:] = torch.nan  # not there yet
mine = cache.clone()
positions = torch.tensor([position])
turn = rotary_table(length, head_dim, "cpu")[:, positions]
seen = torch.arange(length) <= position
cache[:, :, :, position + 1 :] = 0  # torch multiplies what it masks
expected = block._attend(qkv, turn, positions, seen, cache)
kernel.parts_of = lambda *sizes: parts
y = kernel.attend(qkv, turn, positions, mine)
torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
torch.testing.assert_close(mine[:, :, :, : position + 1], cache[:, :, :, : position + 1])
assert mine[:, :, :, position + 1 :].isnan().all()
"""


@pytest.mark.parametrize(
    "case",
    [
        (4, 2, 32, 2, 192, 0, 1),
        (6, 2, 32, 3, 192, 64, 1),
        (4, 4, 16, 1, 192, 130, 1),
        (12, 2, 32, 2, 192, 130, 3),
        (4, 2, 32, 1, 320, 20, 4),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_attend(case):
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *map(str, case)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_parts():
    from fdk_bench.attention_kernel import parts_of

    assert parts_of(1, 8, 192) == 1
    assert parts_of(1, 8, 2112) == 16  # 132 processors, 8 heads
    assert parts_of(1, 1, 1024) == 16  # blocks of 64
    assert parts_of(64, 8, 2112) == 1
